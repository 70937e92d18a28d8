"""Progress bars: after a second, on a terminal, not with --json; and everything that reads says how
far it is.
"""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from holdfast.checkpoint import save
from holdfast.checkpoint.layouts.base import CheckpointReader, total_bytes
from holdfast.checkpoint.layouts.detect import open_checkpoint
from holdfast.checkpoint.storage.counting import CountingStorage
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.checkpoint.storage.path import StorePath
from holdfast.checkpoint.tools.convert import convert
from holdfast.checkpoint.tools.diff import compare

SHOW = """
import sys, threading
import click
from holdfast.cli import common
from holdfast.cli.common import json_option, progress_bar

common.SHOW_AFTER_S = 0.05 if sys.argv.pop(1) == "slow" else 3600

@click.command()
@json_option
def command(as_json):
    with progress_bar("comparing") as meter:
        meter.expect(4_000_000)
        meter(1_000_000)
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer) and common.SHOW_AFTER_S < 1:
                thread.join()
    print("done")

command()
"""


def on_a_terminal(*arguments: str) -> str:
    """Runs SHOW with a terminal as its stderr; returns what appears there."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100"}
    process = subprocess.Popen(
        [sys.executable, "-c", SHOW, *arguments],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=environment,
    )
    os.close(theirs)
    seen = b""
    try:
        while part := os.read(ours, 4096):
            seen += part
    except OSError:  # Linux: nobody has the other end any more
        pass
    os.close(ours)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and out == b"done\n", (out, seen)
    return seen.decode()


def test_a_bar_appears_when_it_takes_long() -> None:
    """On a terminal, with the bytes done and those to come; not before its time, and not with
    --json.
    """
    seen = on_a_terminal("slow")
    assert "comparing" in seen and "1.0/4.0 MB" in seen
    assert on_a_terminal("fast") == ""
    assert on_a_terminal("slow", "--json") == ""


def test_no_bar_without_a_terminal() -> None:
    """A log file stays clean."""
    done = subprocess.run(
        [sys.executable, "-c", SHOW, "slow"], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("done\n", "")


@pytest.mark.parametrize("layout", ["holdfast", "orbax", "safetensors"])
def test_verify_and_diff_report_how_far_they_are(layout: str, tmp_path: Path) -> None:
    """Every layout reports the bytes of its arrays while it reads them, in many steps."""
    save(
        tmp_path / "a",
        {f"w{i}": jnp.asarray(np.arange(1 << 18, dtype=np.float32)) for i in range(24)},
    )
    convert(open_checkpoint(tmp_path / "a"), StorePath(LocalStorage(tmp_path / "b")), layout)
    reported: list[int] = []

    def opened() -> CheckpointReader:
        return open_checkpoint(
            tmp_path / "b", wrap=lambda storage: CountingStorage(storage, reported.append)
        )

    checkpoint = opened()
    total = total_bytes(checkpoint)
    for work in (checkpoint.verify, lambda: list(compare(checkpoint, opened()))):
        reported.clear()
        work()
        times = len([size for size in reported if size > 1 << 16])
        assert total <= sum(reported) < 2.1 * total + (1 << 20) and times >= 6, (total, reported)


INTERRUPT = """
import os, signal, sys
from holdfast.cli import common, main

class Interrupting(common.Meter):
    def __call__(self, done_bytes):
        os.kill(os.getpid(), signal.SIGINT)

common.Meter = Interrupting
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    "command",
    [
        "verify A",
        pytest.param("convert A B --to orbax", marks=pytest.mark.slow),
        pytest.param("convert A B --to holdfast", marks=pytest.mark.slow),
        pytest.param("convert A B --to safetensors", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c(command: str, tmp_path: Path) -> None:
    """Exit code 130, one word, and nothing left of what was begun."""
    save(tmp_path / "a", {"w": np.ones(1 << 16)})
    words = {"A": str(tmp_path / "a"), "B": str(tmp_path / "b")}
    arguments = [words.get(word, word) for word in command.split()]
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPT, *arguments], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.splitlines()[-1] == "Error: interrupted"
    assert not (tmp_path / "b").exists() or os.listdir(tmp_path / "b") == []
