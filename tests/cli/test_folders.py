"""The commands on folders, as a new user tries them: on good, empty, foreign, damaged and missing
paths.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner, Result

from holdfast.checkpoint import (
    CheckpointManager,
    Corrupt,
    Files,
    Json,
    Options,
    StepGone,
    load,
    save,
)
from holdfast.checkpoint.steps.holds import add_hold
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.checkpoint.storage.tombstone import sealed
from holdfast.cli.common import EachStep, Failure
from holdfast.cli.entry import main

FOLDER_COMMANDS = ("ls", "show", "verify", "diff", "convert", "prune", "sweep", "cp")


def run(*arguments: object, code: int = 0) -> Result:
    """Runs a command; asserts its exit code and that no traceback reached the user."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == code, (arguments, result.output, result.exception)
    assert "Traceback" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def state(k: int) -> dict[str, Any]:
    dense = {"kernel": jnp.ones((8, 4)) * k, "bias": jnp.zeros(4, jnp.bfloat16)}
    return {
        "params": {"dense": dense},
        "step": k,
        "key": jax.random.key(k),
        "n": np.arange(3),
        "name": "x",
        "opt": (None, {}),
    }


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three steps of two items, with metrics and metadata."""
    path = tmp_path / "run"
    with CheckpointManager(path) as manager:
        for k in (1, 2, 3):
            manager.save(
                k,
                items={"state": state(k), "config": Json({"lr": k})},
                metrics={"loss": 1 / k},
                metadata={"who": "me"},
            )
            manager.wait_until_finished()
    return path


@pytest.fixture
def orbax_root(root: Path, tmp_path: Path) -> Path:
    run("convert", root, tmp_path / "orbax", "--to", "orbax")
    return tmp_path / "orbax"


def pack_of(step: Path) -> Path:
    return next(path for path in (step / "state").iterdir() if path.suffix == ".safetensors")


def flip(path: Path, at: int = -5) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def arguments(command: str, path: Path, tmp_path: Path) -> list[object]:
    """Returns what a user would type to try `command` on `path`."""
    extra: dict[str, list[object]] = {
        "diff": [path],
        "convert": [tmp_path / "converted", "--to", "holdfast"],
        "prune": ["--keep", "last:1"],
        "cp": [tmp_path / "copied"],
    }
    return [command, path, *extra.get(command, [])]


def test_no_command_takes_a_device(root: Path, tmp_path: Path) -> None:
    """Whoever trains on this machine may hold them all."""
    lines = [arguments(command, root, tmp_path) for command in FOLDER_COMMANDS]
    program = (
        "import json, sys\n"
        "from click.testing import CliRunner\n"
        "from holdfast.cli.entry import main\n"
        "for line in json.loads(sys.argv[1]):\n"
        "    result = CliRunner().invoke(main, line)\n"
        "    assert result.exit_code == 0, (line, result.output, result.exception)\n"
    )
    subprocess.run(
        [sys.executable, "-c", program, json.dumps(lines, default=str)],
        env=os.environ | {"JAX_PLATFORMS": "held_by_others"},
        check=True,
        timeout=100,
    )


@pytest.mark.parametrize("command", FOLDER_COMMANDS)
def test_good_empty_foreign_damaged_missing(command: str, root: Path, tmp_path: Path) -> None:
    """Every command says a sentence that helps, with the right exit code, on each kind of path."""
    empty = tmp_path / "empty"
    foreign = tmp_path / "notes"
    empty.mkdir()
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    run(*arguments(command, root, tmp_path))
    sayings = {
        empty: "is empty: no checkpoint was saved there",
        tmp_path / "missing": "there is nothing at",
    }
    for path, saying in sayings.items():
        result = run(*arguments(command, path, tmp_path), code=3)
        assert saying in result.output and str(path) in result.output
    assert not (tmp_path / "missing").exists()
    assert "it holds notes.txt" in run(*arguments(command, foreign, tmp_path), code=3).output
    assert (foreign / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("ls", 0),
        ("show", 4),
        ("verify", 4),
        ("diff", 4),
        ("convert", 4),
        ("prune", 0),
        ("sweep", 0),
        ("cp", 4),
    ],
)
def test_a_damaged_record(command: str, code: int, root: Path, tmp_path: Path) -> None:
    """A damaged record is named; listing, pruning and sweeping go on around it and leave it
    alone.
    """
    (root / "3" / "checkpoint.json").write_text("{}")
    result = run(*arguments(command, root, tmp_path), code=code)
    if command != "sweep":
        assert "damaged" in result.output
    assert (root / "3" / "checkpoint.json").read_text() == "{}" and pack_of(root / "3").exists()


def test_cp_brings_the_names_of_steps(tmp_path: Path) -> None:
    """A copy of a root has its steps, before the first one is whole, and nobody's claims or holds;
    a root that calls its steps otherwise is left alone.
    """
    named = Options(step_format="checkpoint_{:04d}")
    for name, options in (("named", named), ("plain", Options())):
        with CheckpointManager(tmp_path / name, options=options) as manager:
            for k in (1, 2):
                manager.save(k, {"n": np.arange(k)}).wait()
    add_hold(LocalStorage(tmp_path / "named"), 1, 3600)
    damaged = pack_of(shutil.copytree(tmp_path / "named", tmp_path / "damaged") / "checkpoint_0001")
    flip(damaged)
    run("cp", tmp_path / "damaged", tmp_path / "half", "--step", 1, code=4)
    assert (tmp_path / "half/.holdfast/steps.json").exists()
    run("cp", tmp_path / "named", tmp_path / "copy")
    assert os.listdir(tmp_path / "copy/.holdfast") == ["steps.json"]
    with CheckpointManager(tmp_path / "copy") as manager:
        assert manager.all_steps() == [1, 2]
    for source, target in (("named", "plain"), ("plain", "named")):
        before = sorted(tmp_path.joinpath(target).rglob("*"))
        refused = run("cp", tmp_path / source, tmp_path / target, code=5)
        assert "a root has one format for good" in refused.output
        assert sorted(tmp_path.joinpath(target).rglob("*")) == before


def test_a_hostile_writer_makes_no_folders(root: Path, tmp_path: Path) -> None:
    """A record whose writer is a path is damaged for every command, and a copy makes nothing."""
    record = json.loads((root / "3" / "checkpoint.json").read_text())
    del record["crc32c"]
    record["writer"] = "../../x"
    (root / "3" / "checkpoint.json").write_bytes(sealed(json.dumps(record).encode()[:-1]))
    for command in ("show", "verify", "cp"):
        result = run(*arguments(command, root / "3", tmp_path), code=4)
        assert "'../../x' is no id of a save" in result.output
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_ls_lists_steps_and_what_was_never_finished(root: Path, orbax_root: Path) -> None:
    """`ls` tells whole, damaged and unfinished apart, for holdfast and for Orbax."""
    shutil.rmtree(root / "2" / "config")
    (root / "2" / "checkpoint.json").unlink()
    (root / "9.orbax-checkpoint-tmp").mkdir()
    rows = {row["name"]: row for row in json.loads(run("ls", root, "--json").output)["steps"]}
    assert [rows[name]["state"] for name in ("1", "2", "3", "9.orbax-checkpoint-tmp")] == [
        "whole",
        "unfinished",
        "whole",
        "unfinished",
    ]
    assert (
        rows["3"]["metrics"] == {"loss": pytest.approx(1 / 3)}
        and rows["3"]["items"] == ["state", "config"]
        and rows["3"]["bytes"] > 100
    )
    assert "holdfast sweep" in run("ls", root).output
    (row,) = json.loads(run("ls", orbax_root, "--json").output)["steps"]
    assert (row["layout"], row["step"], row["state"]) == ("orbax", 3, "whole")
    assert json.loads(run("ls", root / "3", "--json").output)["steps"][0]["step"] == 3


def test_no_name_steers_the_terminal(tmp_path: Path) -> None:
    """Who may write into a root or bucket chooses the names in it."""
    hostile = "\x1b]0;owned\x07"
    (tmp_path / f"{hostile}.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "other" / hostile).mkdir(parents=True)
    for path, code in ((tmp_path, 0), (tmp_path / "other", 3)):
        shown = run("ls", path, code=code).output
        assert r"\x1b]0;owned\x07" in shown
        assert all(each.isprintable() or each == "\n" for each in shown), shown


def test_show_tells_what_has_changed_since_a_step(root: Path) -> None:
    """The share of each leaf's elements, in the table, in JSON and on the page; what is not as it
    was in one element alone has not changed as a whole.
    """
    tree = state(3)
    tree["params"]["dense"]["kernel"] = tree["params"]["dense"]["kernel"].at[0, 0].set(9)
    tree["added"] = jnp.ones(3)
    with CheckpointManager(root) as manager:
        manager.save(4, items={"state": tree, "config": Json({"lr": 3})})
    since = ("show", root, "--since")
    found = json.loads(run(*since, 3, "--json").output)
    assert found["since"] == 3
    shares = {leaf["path"]: leaf["changed"] for leaf in found["leaves"]}
    assert shares["params.dense.kernel"] == 1 / 32
    assert shares["params.dense.bias"] == shares[""] == shares["n"] == 0
    assert shares["added"] == 1
    assert "3.1%" in run(*since, 3).output
    since_2 = json.loads(run(*since, 2, "--item", "config", "--json").output)
    assert since_2["leaves"][0]["changed"] == 1
    page = root.parent / "since.html"
    run(*since, 3, "--html", page)
    assert "share that has changed since step 3" in page.read_text()
    assert "has no step 7; it has 1, 2, 3, 4" in run(*since, 7, code=3).output


def test_what_has_changed_is_seen_where_the_item_is_called_otherwise(tmp_path: Path) -> None:
    """A step has one tree, and an earlier one called it otherwise: these two are compared."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, items={"params": {"w": np.arange(4.0), "b": np.zeros(3)}})
        manager.save(2, {"w": np.arange(4.0) + 1, "b": np.zeros(3)})
    leaves = json.loads(run("show", tmp_path, "--since", 1, "--json").output)["leaves"]
    assert {leaf["path"]: leaf["changed"] for leaf in leaves} == {"w": 1, "b": 0}


def test_show_tells_tree_values_and_statistics(root: Path, orbax_root: Path) -> None:
    """`show` lists leaves of any layout; `--stats` reads them; `--path` and `--item` narrow it
    down.
    """
    for path in (root, orbax_root):
        output = run("show", path).output
        assert "params.dense.kernel" in output and "bfloat16" in output and "loss" in output
        found = json.loads(run("show", path, "--path", "params", "--stats", "--json").output)
        assert [leaf["path"] for leaf in found["leaves"]] == [
            "params.dense.bias",
            "params.dense.kernel",
        ]
        assert found["leaves"][1]["stats"] == {
            "nan": 0,
            "inf": 0,
            "min": 3.0,
            "max": 3.0,
            "mean": 3.0,
            "bins": [],
        }
        assert json.loads(run("show", path, "--item", "config", "--json").output)["leaves"][0][
            "value"
        ] == {"lr": 3}
    assert "every byte is as it was written" in run("show", root, "--verify").output
    page = root.parent / "page.html"
    run("show", root, "--stats", "--html", page)
    assert (
        'title="state.params.dense.kernel: ' in page.read_text()
        and 'aria-label="Sizes of the leaves' in page.read_text()
    )
    assert (
        "cannot be written: "
        in run("show", root, "--html", root / "none" / "page.html", code=5).output
    )
    assert "no leaf below 'nothing'" in run("show", root, "--path", "nothing", code=3).output
    assert (
        "has no item 'x'; it has: config, state" in run("show", root, "--item", "x", code=3).output
    )
    assert "has no step 7; it has 1, 2, 3" in run("show", root, "--step", 7, code=3).output


def test_statistics_of_odd_values() -> None:
    """NaN, infinities and empty arrays do not get in the way."""
    from holdfast.cli.show import bars, statistics

    found = statistics(np.array([np.nan, np.inf, 1.0, 2.0, 2.0]))
    assert (found["nan"], found["inf"], found["min"], found["max"]) == (1, 1, 1.0, 2.0)
    assert statistics(np.zeros((0, 3)))["min"] is None
    near = statistics(np.array([0.3, 0.1 + 0.2]))["bins"]
    assert near[0] == near[-1] == 1 and sum(near) == 2
    assert bars([0, 1, 8]) == "·▁█" and bars([]) == ""


def test_json_has_no_numbers_that_json_has_not(tmp_path: Path) -> None:
    """A loss that went NaN is a text in a record, and here."""
    with CheckpointManager(tmp_path) as manager:
        metrics = {"loss": float("nan"), "worst": float("-inf"), "accuracy": 1.0}
        manager.save(1, {"rate": float("inf"), "n": 1}, metrics=metrics)
    expected = {"loss": "nan", "worst": "-inf", "accuracy": 1.0}
    for command in ("ls", "show"):
        output = run(command, tmp_path, "--json").output
        found = json.loads(output, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        assert (found["steps"][0] if command == "ls" else found)["metrics"] == expected
    assert found["leaves"][1]["value"] == "inf"


def test_a_checkpoint_is_no_root_and_says_so(root: Path, tmp_path: Path) -> None:
    """Where a step is asked for that it cannot have."""
    for command in ("show", "verify", "prune", "sweep"):
        options = {"show": ("--step", 1), "verify": ("--step", 1), "prune": ("--keep", "last:1")}
        output = run(command, root / "1", *options.get(command, ()), code=3).output
        assert f"{root / '1'} is a checkpoint, not a root of steps" in output, command


def test_options_that_contradict_or_count_below_nothing(root: Path, tmp_path: Path) -> None:
    """They are refused: an option that does nothing would hide what is done."""
    whole = "names one step: leave --all out"
    assert whole in run("verify", root, "--all", "--step", 1, code=2).output
    converts = ("convert", root, tmp_path / "new", "--to", "orbax")
    assert whole in run(*converts, "--all", "--step", 1, code=2).output
    force = "is for the root's writers: leave --local out"
    assert force in run("sweep", root, "--local", tmp_path, "--force", code=2).output
    run("diff", root, root, "--limit", -1, code=2)
    run(*converts, "--process", -1, code=2)
    run(*converts, "--shard-bytes", 0, code=2)
    assert not (tmp_path / "new").exists()


def test_a_letter_that_the_terminal_lacks(tmp_path: Path) -> None:
    """It is written as Python writes it, and a width of nothing is none."""
    save(tmp_path / "a", {"größe": np.arange(4.0)})
    command = "from holdfast.cli import main; main()"
    shown = subprocess.run(
        [sys.executable, "-c", command, "show", str(tmp_path / "a"), "--stats"],
        env=os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "0"},
        capture_output=True,
        check=True,
        text=True,
    )
    assert "gr\\xf6\\xdfe" in shown.stdout and "\\u2588" in shown.stdout and not shown.stderr


def test_verify_names_file_and_leaf(root: Path) -> None:
    """One flipped bit in one array: exit 4, and the sentence names the pack; `--all` finds it among
    the whole steps.
    """
    assert "whole (holdfast" in run("verify", root).output
    pack = pack_of(root / "2")
    flip(pack)
    run("verify", root)
    result = run("verify", root, "--step", 2, code=4)
    assert pack.name in result.output and "leaf" in result.output
    reports = json.loads(run("verify", root, "--all", "--json", code=4).stdout)["steps"]
    assert ["error" in report for report in reports] == [False, True, False]
    pack.write_bytes(pack.read_bytes()[:-20])
    run("verify", root, "--step", 2, code=4)
    pack.unlink()
    assert pack.name in run("verify", root, "--step", 2, code=4).output


def test_diff_finds_one_ulp_of_a_thousand(tmp_path: Path) -> None:
    """A change in the last place of one number of one leaf is found and named, with its size."""
    tree = {f"w{i:04}": np.full(16, i + 1, np.float32) for i in range(1000)}
    save(tmp_path / "a", tree)
    tree["w0617"][3] = np.nextafter(tree["w0617"][3], np.float32(np.inf))
    save(tmp_path / "b", tree)
    found = json.loads(run("diff", tmp_path / "a", tmp_path / "b", "--json", code=1).output)[
        "differences"
    ]
    assert [(row["path"], row["what"], row["count"], row["size"]) for row in found] == [
        ("w0617", "value", 1, 16)
    ]
    assert found[0]["max_abs"] == pytest.approx(6.1e-5, rel=0.01) and found[0][
        "max_rel"
    ] == pytest.approx(9.9e-8, rel=0.01)
    assert "1 leaf differs" in run("diff", tmp_path / "a", tmp_path / "b", code=1).output
    assert "equal, bit by bit" in run("diff", tmp_path / "a", tmp_path / "a").output


def test_diff_tells_structure_shape_dtype_and_value(tmp_path: Path) -> None:
    """Each kind of difference has its own word."""
    save(
        tmp_path / "a",
        {
            "same": 1,
            "gone": 1,
            "shape": jnp.ones(3),
            "dtype": jnp.ones(3),
            "value": "x",
            "type": 1,
            "nan": jnp.array([jnp.nan]),
        },
    )
    save(
        tmp_path / "b",
        {
            "same": 1,
            "new": 1,
            "shape": jnp.ones(4),
            "dtype": jnp.ones(3, jnp.float16),
            "value": "y",
            "type": jnp.ones(1),
            "nan": jnp.array([jnp.nan]),
        },
    )
    found = json.loads(run("diff", tmp_path / "a", tmp_path / "b", "--json", code=1).output)[
        "differences"
    ]
    words = {row["path"]: row["what"] for row in found}
    assert words == {
        "gone": "only in A",
        "new": "only in B",
        "shape": "shape",
        "dtype": "dtype",
        "value": "value",
        "type": "type",
    }


def test_convert_there_and_back_is_exact(root: Path, tmp_path: Path) -> None:
    """holdfast to Orbax to holdfast: `diff` finds nothing, step, metrics and metadata come
    along.
    """
    run("convert", root, tmp_path / "orbax", "--to", "orbax", "--all")
    run("convert", tmp_path / "orbax", tmp_path / "back", "--to", "holdfast", "--all")
    for step in (1, 2, 3):
        run("diff", root, tmp_path / "back", "--step-a", step, "--step-b", step)
    with CheckpointManager(tmp_path / "back") as manager:
        assert (
            manager.all_steps() == [1, 2, 3]
            and manager.metrics(2) == {"loss": 0.5}
            and manager.metadata(2) == {"who": "me"}
        )
        restored = manager.restore(3, state(0))
    assert (
        jax.random.key_data(restored["key"]).tolist()
        == jax.random.key_data(jax.random.key(3)).tolist()
    )
    assert (
        run("convert", root, tmp_path / "back", "--to", "holdfast", "--all").output.count(
            "left as it is"
        )
        == 3
    )
    flip(pack_of(root / "2"))
    result = run("convert", root, tmp_path / "most", "--to", "holdfast", "--all", code=4)
    assert pack_of(root / "2").name in result.stderr and sorted(os.listdir(tmp_path / "most")) == [
        "1",
        "3",
    ]
    found = json.loads(
        run(
            "convert", root, tmp_path / "most2", "--to", "safetensors", "--all", "--json", code=4
        ).stdout
    )
    assert (
        len(found["converted"]) == 2
        and len(found["errors"]) == 1
        and sorted(os.listdir(tmp_path / "most2")) == ["1", "3"]
    )
    assert "already" in run("convert", root, tmp_path / "back", "--to", "holdfast", code=5).output
    assert "already" in run("convert", root, tmp_path / "orbax", "--to", "orbax", code=5).output


def test_convert_a_subtree_with_a_map(root: Path, tmp_path: Path) -> None:
    """`--path` and `--map` make the file that another framework wants."""
    names = tmp_path / "names.json"
    names.write_text(
        json.dumps([[r"params\.(\w+)\.kernel", r"\1.weight"], [r"params\.(\w+)\.bias", r"\1.bias"]])
    )
    run("convert", root, tmp_path / "hf", "--to", "safetensors", "--path", "params", "--map", names)
    assert set(load(tmp_path / "hf")) == {"dense.weight", "dense.bias"}
    names.write_text("[")
    assert (
        "the map is not JSON"
        in run(
            "convert", root, tmp_path / "hf2", "--to", "safetensors", "--map", names, code=5
        ).output
    )
    assert (
        "no leaf below"
        in run(
            "convert", root, tmp_path / "hf3", "--to", "safetensors", "--path", "zzz", code=3
        ).output
    )


def test_prune_keeps_what_is_held_since_it_looked(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that comes while prune opens the root keeps its step."""
    opens = CheckpointManager.__init__

    def opened(*arguments: Any, **options: Any) -> None:
        opens(*arguments, **options)
        add_hold(LocalStorage(root), 1, 3600)

    monkeypatch.setattr(CheckpointManager, "__init__", opened)
    told = json.loads(run("prune", root, "--keep", "last:1", "--json").output)
    assert 1 in told["kept"] and 1 not in told["deleted"] and (root / "1").exists()


def test_prune_keeps_what_the_rules_say(root: Path, orbax_root: Path) -> None:
    """`--dry-run` says and does nothing; then the same steps go; Orbax's never do."""
    rules = "last:1,best:1:loss:max"
    assert json.loads(run("prune", root, "--keep", rules, "--dry-run", "--json").output)[
        "deleted"
    ] == [2]
    assert (root / "2" / "checkpoint.json").exists()
    assert "deleted: 2" in run("prune", root, "--keep", rules).output
    assert sorted(path.name for path in root.iterdir() if path.name.isdigit()) == ["1", "3"]
    day = run(
        "prune",
        root,
        "--keep",
        "last-seconds:86400,every-seconds:3600,closest:3",
        "--dry-run",
        "--json",
    )
    assert json.loads(day.output)["deleted"] == []
    for wrong in ("first:1", "every-seconds:x", "last:x", "last:0", "best:1", ""):
        assert "--keep" in run("prune", root, "--keep", wrong, code=2).output
    assert "none of holdfast's" in run("prune", orbax_root, "--keep", "last:1", code=3).output


def test_sweep_takes_only_what_is_unfinished_and_dead(root: Path) -> None:
    """Packs of a dead writer without a record go; whole steps and foreign files stay."""
    (root / "2" / "checkpoint.json").unlink()
    foreign = root / "7" / "notes.txt"
    foreign.parent.mkdir()
    foreign.write_text("mine")
    swept = json.loads(run("sweep", root, "--json").output)
    assert len(swept["files"]) == 2 and not (root / "2").exists()
    assert foreign.exists() and (root / "3" / "checkpoint.json").exists()


def test_cp_copies_verifies_and_goes_on(root: Path, orbax_root: Path, tmp_path: Path) -> None:
    """A copy is read back; a second one copies nothing; one that was cut off goes on; a wrong file
    is found; no other step is replaced.
    """
    copy = tmp_path / "copy"
    assert "whole" in run("cp", root, copy).output
    run("diff", root, copy)
    again = json.loads(run("cp", root, copy, "--json").output)
    assert again["written"] == [] and len(again["skipped"]) == 6
    (copy / "2" / "checkpoint.json").unlink()
    pack_of(copy / "2").unlink()
    assert len(json.loads(run("cp", root, copy, "--json").output)["written"]) == 2
    flip(pack_of(copy / "1"))
    assert "checksum" in run("cp", root, copy, code=4).output
    assert "is called as another step" in run("cp", root / "3", copy / "2", code=5).output
    run("cp", root / "2", tmp_path / "best")
    assert "another checkpoint" in run("cp", root / "3", tmp_path / "best", code=5).output
    run("cp", orbax_root, tmp_path / "orbax2")
    run("diff", orbax_root, tmp_path / "orbax2")


def test_help_and_version() -> None:
    """Every command has examples in its help; the version is told."""
    for command in FOLDER_COMMANDS:
        output = run(command, "--help").output
        assert "Examples:" in output and "Exit codes:" in output and "--json" in output
    assert "version" in run("--version").output


def test_no_permission_is_a_sentence(root: Path, tmp_path: Path) -> None:
    """A path that is a file, and a place that cannot be written, are sentences too."""
    file = tmp_path / "file"
    file.write_text("x")
    for command in FOLDER_COMMANDS:
        result = CliRunner().invoke(
            main, [str(argument) for argument in arguments(command, file, tmp_path)]
        )
        assert (
            result.exit_code in (3, 5)
            and "Traceback" not in result.output
            and str(file) in result.output
        ), (command, result.output)
    assert "file" in run("cp", root, file / "below", code=5).output
    assert "file" in run("convert", root, file / "below", "--to", "orbax", code=5).output


def test_commands_go_by_the_names_of_the_root(tmp_path: Path) -> None:
    """A root that calls its steps by a format of its own is listed, pruned and converted into under
    these names.
    """
    with CheckpointManager(tmp_path / "run", options=Options(step_format="ck_{:04d}")) as manager:
        for step in (1, 2):
            manager.save(step, {"w": np.arange(3.0)}).wait()
    (tmp_path / "run" / "ck_0007").mkdir()
    listed = {
        row["name"]: row["state"]
        for row in json.loads(run("ls", tmp_path / "run", "--json").output)["steps"]
    }
    assert listed == {"ck_0001": "whole", "ck_0002": "whole", "ck_0007": "unfinished"}
    save(tmp_path / "other" / "5", {"w": np.arange(3.0)}, step=5)
    run("convert", tmp_path / "other" / "5", tmp_path / "run", "--to", "holdfast")
    assert (tmp_path / "run" / "ck_0005" / "checkpoint.json").exists()
    assert json.loads(run("prune", tmp_path / "run", "--keep", "last:1", "--json").output)[
        "deleted"
    ] == [1, 2]


def test_commands_on_a_root_take_its_steps(root: Path, tmp_path: Path) -> None:
    """A model, a folder of Orbax's and half a record in the root are passed over, and a checkpoint
    that is called by a number is named; `cp` brings how Orbax's steps are called.
    """
    run("convert", root, root, "--step=1", "--to=safetensors")
    run("convert", root, tmp_path / "made", "--step=1", "--to=orbax")
    shutil.copytree(tmp_path / "made/1", root / "export_2024")
    shutil.copytree(tmp_path / "made/1/state", root / "export")
    (root / "checkpoint.json").write_text('{"format":')
    (root / "7").mkdir()
    (root / "7/notes.txt").write_text("mine")
    listed = json.loads(run("ls", root, "--json").output)
    assert [row["step"] for row in listed["steps"] if row["state"] == "whole"] == [1, 2, 3]
    assert listed["beside"] == {"export_2024": "orbax"}
    said = " ".join(run("ls", root).output.split())
    assert "export_2024: a checkpoint (orbax), but no step of this root" in said
    assert "7: no finished checkpoint, and not holdfast's alone: `holdfast sweep` leaves" in said
    assert "step 3 of" in run("show", root).output
    assert f"{root / '3'}: whole" in run("verify", root).output
    assert len(json.loads(run("verify", root, "--all", "--json").output)["steps"]) == 3
    assert "export_2024 there is a" in run("show", root, "--step", 2024, code=3).output
    run("prune", root, "--keep", "last:1", "--dry-run")
    run("sweep", root)
    (root / ".holdfast").mkdir(exist_ok=True)
    (root / ".holdfast/foreign.json").write_text('{"prefix": "export_"}')
    run("cp", root, tmp_path / "copy")
    assert sorted(os.listdir(tmp_path / "copy")) == [".holdfast", "1", "2", "3", "export_2024"]
    rows = json.loads(run("ls", tmp_path / "copy", "--json").output)["steps"]
    assert [row["step"] for row in rows] == [1, 2, 3, 2024]
    run("convert", root, root / "3", "--to", "safetensors", code=5)


def test_each_size_says_what_it_counts_and_one_is_one(tmp_path: Path) -> None:
    """A step takes more room than its arrays, and a verification reads what lies between: three
    numbers, and each with its word. Nothing is of "1 files" or "0 file(s)".
    """
    path = tmp_path / "run"
    with CheckpointManager(path) as manager:
        manager.save(1, {"w": np.zeros(3, np.float32)})
    assert run("ls", path).output.splitlines()[1].split()[4:6] == ["on", "disk"]
    assert run("show", path).output.splitlines()[-1] == "1 leaf, 12 bytes of arrays"
    assert "(holdfast: 1 leaf, " in run("verify", path).output
    assert " read from 1 file, " in run("verify", path).output
    (path / "1" / "checkpoint.json").write_text("{}")
    assert "1 of 1 step is damaged" in run("verify", path, "--all", code=4).output
    assert run("sweep", path).output.endswith("0 files of unfinished saves deleted\n")


def test_a_file_that_cannot_be_read_hides_no_other_step(tmp_path: Path) -> None:
    """What the system says of one file is said of that step, and the steps after it are copied and
    verified.
    """
    path = tmp_path / "run"
    with CheckpointManager(path) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"w": np.zeros(3, np.float32)})
    (pack,) = (path / "2" / "state").iterdir()
    pack.unlink()
    pack.mkdir()
    copied = run("cp", path, tmp_path / "copy", code=5)
    assert copied.stderr == f"Error: {pack}: Is a directory\n"
    assert f"{tmp_path / 'copy' / '3'}: whole" in run("verify", tmp_path / "copy", "--all").output
    assert f"{path / '3'}: whole" in run("verify", path, "--all", code=4).output


def test_what_ends_a_command_on_all_steps_says_how_many_are_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where the disk is full they are not even begun, and the exit code is no damaged step's."""

    def work(step: int) -> None:
        if step == 1:
            raise Corrupt("step 1 is damaged", path="1")
        if step == 3:
            raise OSError(errno.ENOSPC, "No space left on device", "3")

    each = EachStep(several=True)
    assert [step for step, _ in each.run(range(1, 6), work)] == [1, 2, 3]
    with pytest.raises(Failure) as caught:
        each.end()
    assert caught.value.message.splitlines() == [
        "step 1 is damaged",
        "3: No space left on device",
        "1 of 3 steps is damaged",
        "2 steps after that: not looked at",
    ]
    assert (caught.value.exit_code, capsys.readouterr().err) == (5, "")


def test_a_sharding_that_all_have_is_said_once(tmp_path: Path) -> None:
    """And not as "each array on replicated on x=1"."""
    mesh = jax.make_mesh((1,), ("x",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    save(tmp_path / "one", {"w": jax.device_put(jnp.ones(3), everywhere)})
    said = run("show", tmp_path / "one").output
    assert "state (tree), sharding of each array: replicated on x=1" in said


def test_show_names_the_files_of_an_item(tmp_path: Path) -> None:
    """An item of files is shown by its files' names: a few of many, and how many more."""

    def write(folder: Path) -> None:
        for number in range(23):
            (folder / f"{number:02}.txt").write_text("x")

    save(tmp_path / "one", items={"state": {"n": 1}, "tokenizer": Files(write)})
    shown = run("show", tmp_path / "one").stdout
    assert "tokenizer (files): '00.txt', '01.txt', " in shown
    assert "and 18 more\n" in shown
    assert "00.txt" not in run("show", tmp_path / "one", "--item", "state").stdout


def test_one_file_of_safetensors_is_named_and_is_no_root(root: Path, tmp_path: Path) -> None:
    """What is said of one file names the file and not its folder, where others may lie. Where a
    root is expected, the command says that it is one file.
    """
    run("convert", root / "1", tmp_path / "7", "--to", "safetensors")
    file = next((tmp_path / "7").glob("*.safetensors"))
    for command in ("show", "verify"):
        assert f"{file} (" in run(command, file).output.replace(": whole", ""), command
    for words in (("verify", "--all"), ("sweep",), ("prune", "--keep", "last:1")):
        output = run(*words, file, code=3).output
        assert f"{file} is one file of safetensors, and no root of steps" in output, words
    run("convert", file, tmp_path / "back", "--to", "holdfast")
    assert [each.name for each in (tmp_path / "back").glob("[0-9]*")] == ["7"]


def test_a_job_that_deletes_all_that_was_listed(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command lists the root again, and never says that it is a file, or another library's."""
    from holdfast.cli import roots

    listings = iter([{}])
    find_steps = roots.find_steps
    monkeypatch.setattr(roots, "find_steps", lambda storage: next(listings, find_steps(storage)))
    assert "whole" in run("ls", root).output
    monkeypatch.setattr(roots, "find_steps", lambda storage: {})
    assert "has other steps than a moment ago" in run("cp", root, tmp_path / "x", code=3).output

    def gone(folder: object, layout: object) -> None:
        raise StepGone("it was deleted", path=str(folder))

    monkeypatch.setattr(roots, "find_steps", find_steps)
    monkeypatch.setattr(roots, "look_at", gone)
    output = run("prune", root, "--keep", "last:1", code=3).output
    assert f"{root} has other steps than a moment ago" in output


WITHOUT_RIGHTS = """
import sys
from click.testing import CliRunner
from holdfast.cli.entry import main
for command in ("ls {root}", "verify {root} --all", "cp {root} {root}-copy"):
    result = CliRunner().invoke(main, command.format(root=sys.argv[1]).split())
    print(result.exit_code, result.output)
"""


@pytest.mark.parametrize("shut", ["2", "2/checkpoint.json"])
def test_a_step_without_rights_hides_no_other(shut: str, root: Path) -> None:
    """The list has its row, and the others are verified and copied."""
    as_nobody = ["setpriv", "--inh-caps=-all", "--bounding-set=-all"] if not os.geteuid() else []
    (root / shut).chmod(0)
    done = subprocess.run(
        [*as_nobody, sys.executable, "-c", WITHOUT_RIGHTS, str(root)],
        capture_output=True,
        text=True,
        check=True,
    )
    (root / shut).chmod(0o755)
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines if line[:2] in ("0 ", "5 ")] == ["0", "5", "5"]
    (row,) = [line.split() for line in lines if line.split()[:1] == ["2"]]
    assert row[1] == "unreadable"
    assert sum(": whole (" in line for line in lines) == 2
    assert sorted(os.listdir(f"{root}-copy")) == ["1", "3"]
    assert done.stdout.count("Permission denied") == 3
