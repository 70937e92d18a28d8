"""Runs each command on a store, from it and to it: `LOCAL URL_BEGIN URL_END [--single-writer]`."""

from __future__ import annotations

import json
import sys
from typing import Any

from click.testing import CliRunner

from holdfast.checkpoint import load, save
from holdfast.cli.entry import main

LOCAL, BEGIN, END, *PROMISE = sys.argv[1:]
# The emulator of gs:// does not tell generations, which an OCDBT database needs.
KEEPS_GENERATIONS = not PROMISE
# tensorstore, which reads and writes Orbax's arrays, does not know Azure.
HAS_ORBAX = KEEPS_GENERATIONS and not BEGIN.startswith("az://")


def url(name: str) -> str:
    return BEGIN + name + END


def run(*arguments: str, code: int = 0) -> Any:
    """Returns what a command prints; with --json as a value."""
    result = CliRunner().invoke(main, list(arguments))
    shown = (arguments, result.exit_code, result.output, result.exception)
    assert result.exit_code == code, shown
    assert "Traceback" not in result.output, arguments
    return json.loads(result.stdout) if "--json" in arguments else result.output


def copy_and_look() -> None:
    there = url("run")
    if PROMISE:
        refused = run("cp", f"{LOCAL}/run", there, code=5)
        assert "--single-writer" in refused
        refused = run("convert", f"{LOCAL}/run", there, "--to", "holdfast", code=5)
        assert "--single-writer" in refused
    assert len(run("cp", f"{LOCAL}/run", there, "--json", *PROMISE)["written"]) == 9
    assert run("cp", f"{LOCAL}/run", there, "--json", *PROMISE)["written"] == []
    rows = run("ls", there, "--json")["steps"]
    facts = [(row["step"], row["state"], row["files"]) for row in rows]
    assert facts == [(1, "whole", 3), (2, "whole", 3), (3, "whole", 3)], rows
    assert "params.w" in run("show", there)
    assert "lr" in run("show", there, "--item", "config")
    (leaf,) = run("show", there, "--stats", "--path", "params.w", "--json")["leaves"]
    assert leaf["stats"]["max"] == 3.0
    assert len(run("verify", there, "--all", "--json")["steps"]) == 3
    assert "equal, bit by bit" in run("diff", f"{LOCAL}/run", there)
    run("diff", there, there, "--step-a", "1", "--step-b", "2", code=1)


def convert_and_copy_back(layout: str) -> None:
    there = url(layout)
    run("convert", url("run"), there, "--to", layout, *PROMISE)
    (row,) = run("ls", there, "--json")["steps"]
    assert (row["layout"], row["state"], row["bytes"] > 0) == (layout, "whole", True), row
    run("show", there)
    assert run("verify", there, "--json")["steps"][0]["layout"] == layout
    run("convert", there, f"{LOCAL}/back-{layout}", "--to", "holdfast")
    assert "already" in run("convert", url("run"), there, "--to", layout, *PROMISE, code=5)
    run("cp", there, f"{LOCAL}/{layout}")
    run("diff", there, f"{LOCAL}/{layout}")
    run("cp", f"{LOCAL}/{layout}", url(f"{layout}-again"), *PROMISE)
    run("diff", url(f"{layout}-again"), f"{LOCAL}/{layout}")


def prune_and_sweep() -> None:
    there = url("run")
    keep = ("prune", there, "--keep", "last:1", "--json", *PROMISE)
    assert run(*keep, "--dry-run")["deleted"] == [1, 2]
    assert run(*keep)["kept"] == [3]
    assert run("sweep", there, "--json")["standing"] == []
    rows = run("ls", there, "--json")["steps"]
    assert [row["step"] for row in rows if row["state"] == "whole"] == [3]


def ask_for_nothing() -> None:
    nothing = url("nothing")
    for command in (
        ["ls", nothing],
        ["show", nothing],
        ["verify", nothing],
        ["diff", url("run"), nothing],
        ["prune", "--keep", "last:1", nothing],
        ["sweep", nothing],
        ["cp", nothing, f"{LOCAL}/no"],
    ):
        answer = run(*command, "--json", code=3)
        assert "there is nothing at" in answer["error"], answer
        assert answer["exit_code"] == 3, answer


copy_and_look()
for layout in ("orbax", "safetensors", "holdfast"):
    if layout != "orbax" or HAS_ORBAX:
        convert_and_copy_back(layout)
run("diff", f"{LOCAL}/run", f"{LOCAL}/back-holdfast")
if HAS_ORBAX:
    run("diff", f"{LOCAL}/run", f"{LOCAL}/back-orbax")
    save(url("direct"), load(f"{LOCAL}/run"), layout="orbax")
    run("cp", url("direct"), f"{LOCAL}/direct", *PROMISE)
prune_and_sweep()
ask_for_nothing()
print("all done")
