"""Tables at 60, 80 and 120 columns and in a pipe: each is read back, and no column is lost."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Sequence
from fcntl import ioctl
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from holdfast.checkpoint import CheckpointManager, Json
from holdfast.cli.entry import main
from holdfast.cli.layers import fold_layers
from holdfast.cli.status_tables import status_tables
from holdfast.cli.tables import Table
from holdfast.coordination import StatusClient
from holdfast.coordination.process.job_folder import JobFolder, RunningJob
from tests.support.checkpointing import served_groups
from tests.support.local_hosts import job
from tests.support.tables import read_table

LONG_ROW = """
from holdfast.cli.tables import Table, console
table = Table(("left", "right"), folds=("right",))
table.add("x" * 25, "y" * 40)
console().print(table)
"""
WIDTHS = (60, 80, 120)
LAYERS = 12
LS = ("step", "state", "layout", "saved", "on disk", "frees", "items", "metrics")
SHOW = ("path", "shape", "dtype", "size", "value", "sharding")
STATS = ("path", "shape", "dtype", "size", "value", "min", "max", "mean", "NaN", "histogram")
DIFF = ("leaf", "what", "max abs", "max rel", "differing", "A", "B")
PROCESSES = ("process", "state", "host", "pid", "last heard", "step", "steps/s", "saved") + (
    "blocked",
    "waiting",
    "waits",
    "memory",
    "peak",
    "error",
)
JOBS = ("job", "attempt", "state", "began", "ended", "command", "folder", "address")
LOCAL_STEPS = ("local step", "hosts that may be lost", "whose part is where")
BARRIERS = ("barrier", "waiting (for)", "missing", "time left")


def printed(*arguments: object, columns: int | None = None, code: int = 0) -> str:
    """Returns what a command prints: in a pipe, or for so many columns."""
    width = None if columns is None else str(columns)
    runner = CliRunner(env={"COLUMNS": width})
    result = runner.invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout


def widest(text: str, titles: Sequence[str]) -> int:
    """Returns the columns of the longest line from the table on."""
    begin = re.search(rf"^ *{titles[0]}(  |$)", text, re.MULTILINE)
    assert begin is not None, text
    table = text[begin.start() :].partition("\n\n")[0]
    return max(map(len, table.splitlines()))


def read_at_each_width(
    *arguments: object, titles: Sequence[str], keys: Sequence[str], code: int = 0
) -> list[dict[str, str]]:
    """Returns the rows of a command's table in a pipe; asserts that they are the same at each
    width, and that no line is longer than that.
    """
    in_pipe = printed(*arguments, code=code)
    rows = read_table(in_pipe, titles, keys)
    assert [row[titles[0]] for row in rows] == [key.replace(" ", "") for key in keys]
    for columns in WIDTHS:
        text = printed(*arguments, columns=columns, code=code)
        assert read_table(text, titles, keys) == rows, text
        assert widest(text, titles) <= columns, text
    return rows


def state(step: int) -> dict[str, Any]:
    """Returns a small transformer's state."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    sharded = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    layer = {"attention": {"query": jnp.ones((8, 8)) * step}, "mlp": {"bias": jnp.zeros(8)}}
    return {
        "embedding_of_the_vocabulary": {"table": jax.device_put(jnp.ones((16, 4)), sharded)},
        "layers": [layer] * LAYERS,
        "step": step,
        "name": "tiny",
        "key": jax.random.key(step),
        "noise": jnp.arange(24.0).at[3].set(jnp.nan) * step,
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two whole steps, one that is damaged, and one that was begun."""
    path = tmp_path_factory.mktemp("tables") / "root"
    with CheckpointManager(path) as manager:
        for step in (1, 20, 3000):
            items = {"state": state(step), "config": Json({"rate": step})}
            metrics = {"loss": 1 / step, "accuracy_on_the_validation_set": 0.5}
            manager.save(step, items=items, metrics=metrics)
            manager.wait_until_finished()
    (path / "3000" / "checkpoint.json").write_text("{}")
    (path / "7").mkdir()
    (path / "7" / "begun").write_text("x")
    return path


def test_ls(root: Path) -> None:
    """Steps with what the JSON has of each."""
    listed = json.loads(printed("ls", root, "--json"))
    assert listed["version"] == 1 and listed["root"] == str(root)
    names = [row["name"] for row in listed["steps"]]
    rows = read_at_each_width("ls", root, titles=LS, keys=names)
    for row, facts in zip(rows, listed["steps"], strict=True):
        assert row["state"] == facts["state"]
        assert row.get("layout", "") == facts["layout"]
        assert row.get("items", "") == ",".join(facts["items"])
        assert all(name in row["metrics"] for name in facts["metrics"])
        assert facts["step"] is None or type(facts["step"]) is int
    assert {"1", "20", "3000", "7"} == set(names)


def test_show(root: Path) -> None:
    """Leaves, those of repeated layers as one line with its count, and values under their own
    header.
    """
    shown = json.loads(printed("show", root / "20", "--json"))
    layer = "layers.{{0..{}}}.{} x{}"
    paths = [
        "embedding_of_the_vocabulary.table",
        "key",
        *(layer.format(LAYERS - 1, leaf, LAYERS) for leaf in ("attention.query", "mlp.bias")),
        "name",
        "noise",
        "step",
    ]
    rows = read_at_each_width("show", root / "20", titles=SHOW, keys=paths)
    by_path = dict(zip(paths, rows, strict=True))
    assert by_path["name"] == {"path": "name", "dtype": "str", "value": "'tiny'"}
    assert by_path["step"]["value"] == "20"
    sharded = by_path[paths[0]]
    assert "data" in sharded["sharding"] and sharded["shape"] == "[16,4]"
    folded = by_path[paths[2]]
    assert (folded["shape"], folded["dtype"]) == ("[8,8]", "float32")
    assert folded["size"] == "3.1kB"  # of all layers
    leaves = [leaf["path"] for leaf in shown["leaves"] if leaf["item"] == "state"]
    unfolded = read_at_each_width("show", root / "20", "--unfold", titles=SHOW, keys=leaves)
    assert len(unfolded) == len(paths) - 2 + 2 * LAYERS
    assert '{"rate": 20}' in printed("show", root / "20", "--item", "config")


def test_show_stats(root: Path) -> None:
    """Each array has its own statistics: nothing is folded."""
    shown = json.loads(printed("show", root / "20", "--stats", "--json"))
    leaves = [leaf for leaf in shown["leaves"] if leaf["item"] == "state"]
    paths = [leaf["path"] for leaf in leaves]
    rows = read_at_each_width("show", root / "20", "--stats", titles=STATS, keys=paths)
    for row, leaf in zip(rows, leaves, strict=True):
        if "stats" in leaf:
            assert float(row["max"]) == pytest.approx(leaf["stats"]["max"], rel=1e-3)
            assert row.get("NaN", "0") == str(leaf["stats"]["nan"])
            assert len(row.get("histogram", "")) == len(leaf["stats"]["bins"])


def test_diff(root: Path, tmp_path: Path) -> None:
    """A leaf is a row: what has no size first, then what has become NaN, then the largest."""
    with CheckpointManager(tmp_path / "other") as manager:
        other = state(20)
        other["layers"] = [
            {"attention": {"query": jnp.ones((8, 8)) * (20 + layer)}, "mlp": {"bias": jnp.zeros(8)}}
            for layer in range(LAYERS)
        ]
        other["noise"] = jnp.arange(24.0)
        other["name"] = "large"
        other["new"] = jnp.ones(3)
        manager.save(20, items={"state": other, "config": Json({"rate": 20})}).wait()
    command = ("diff", root / "20", tmp_path / "other" / "20")
    found = json.loads(printed(*command, "--json", code=1))["differences"]
    assert [row["path"] for row in found] == [
        "name",
        "new",
        "noise",
        *(f"layers.{layer}.attention.query" for layer in range(LAYERS - 1, 0, -1)),
    ]
    keys = [f"state: {row['path']}" for row in found]
    rows = read_at_each_width(*command, titles=DIFF, keys=keys, code=1)
    for row, facts in zip(rows, found, strict=True):
        assert row["what"] == facts["what"].replace(" ", "")
        assert row.get("A", "") == facts["a"].replace(" ", "")
    assert rows[2]["differing"] == "23of24,1NaNorinf"
    assert float(rows[3]["max abs"]) == LAYERS - 1
    lines = printed(*command, code=1).splitlines()
    assert len(lines) == len(rows) + 5  # the two paths, the header, a space, and the count


def test_status(tmp_path: Path) -> None:
    """Processes, local steps and barriers of a job that runs."""
    hosts = [tmp_path / f"host{rank}" for rank in range(3)]
    barrier = "a/barrier/of/the/program"
    with job(tmp_path / "root", hosts) as first:
        first.save(5)
    with served_groups(3) as members, job(tmp_path / "root", hosts, members=members):
        clients: list[Any] = [group._group_client.client for group in members]
        waits = [
            threading.Thread(target=client.wait_at_barrier, args=(barrier, 60_000))
            for client in clients
        ]
        waits[0].start()
        clients[0].report(step=7, trouble="step 6 failed:\nno space left on the device")
        with StatusClient(clients[0].address) as status:
            while not _has_all(answer := status.status()):
                pass
        shown = printed("status", clients[0].address, columns=60)
        for wait in waits[1:]:
            wait.start()
        for wait in waits:
            wait.join(60)
    (found,) = _read_status(shown, BARRIERS, [barrier], columns=60)
    assert found["missing"] == "1,2" and found["waiting (for)"].startswith("0(")
    processes = [str(task.task_id) for task in answer.tasks]
    rows = _status_at_each_width(answer, PROCESSES, processes)
    assert rows[0]["error"] == "step6failed:nospaceleftonthedevice"
    assert rows[0]["step"] == "7" and rows[0]["pid"] == str(os.getpid())
    assert {row["state"] for row in rows} == {"CONNECTED"}
    assert _status_at_each_width(answer, BARRIERS, [barrier])[0]["missing"] == "1,2"
    (step,) = _status_at_each_width(answer, LOCAL_STEPS, ["5"])
    assert step["hosts that may be lost"] == "1" and step["whose part is where"].startswith("0:0(")


def _has_all(answer: Any) -> bool:
    progress = answer.tasks[0].progress
    return bool(answer.barriers and progress.trouble and progress.root.steps)


def _status_at_each_width(
    answer: Any, titles: Sequence[str], keys: Sequence[str]
) -> list[dict[str, str]]:
    """Returns the rows of one answer's table, which are the same at each width."""

    def shown(columns: int) -> str:
        console = Console(width=columns, file=io.StringIO(), soft_wrap=True)
        with console.capture() as captured:
            console.print(status_tables(answer, []))
        return captured.get()

    rows = read_table(shown(1_000_000), titles, keys)
    for columns in WIDTHS:
        assert _read_status(shown(columns), titles, keys, columns=columns) == rows
    return rows


def _read_status(
    text: str, titles: Sequence[str], keys: Sequence[str], *, columns: int
) -> list[dict[str, str]]:
    assert widest(text, titles) <= columns, text
    return read_table(text, titles, keys)


def test_the_jobs_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`status` without a job lists those that have ended, and of several those that run: with their
    commands, folders and times.
    """
    base = tempfile.mkdtemp(dir="/tmp")  # a socket's path is short
    monkeypatch.setattr(tempfile, "tempdir", base)
    command = ["run", "-n", "1", "--job-id", "ended", "--", "sh", "-c", "exit 3"]
    subprocess.run(
        [sys.executable, "-c", "from holdfast.cli import main; main()", *command],
        env=os.environ | {"TMPDIR": base},
        cwd=tmp_path,
        check=False,
        timeout=100,
    )
    listed = json.loads(printed("status", "--json", code=3))
    assert (listed["version"], listed["exit_code"]) == (1, 3)
    (row,) = read_at_each_width("status", titles=JOBS, keys=["ended"], code=3)
    assert row["state"] == "failed,exitcode3" and row["folder"] == str(tmp_path)
    assert row["command"].endswith("--job-idended--sh-c'exit3'")
    assert row["ended"] and row["address"] == listed["jobs"][0]["address"]
    for job_id in ("one", "two"):
        folder = JobFolder.create()
        folder.publish(RunningJob(job_id, 1, folder.socket, os.getpid()))
    rows = read_at_each_width("status", titles=JOBS, keys=["one", "two", "ended"], code=2)
    assert [row["state"] for row in rows[:2]] == ["running", "running"]
    assert rows[0]["began"] and rows[0]["command"] and rows[0]["folder"] == os.getcwd()
    shutil.rmtree(base)


def test_a_table_on_a_terminal_is_as_wide_as_it() -> None:
    """By its own size, without COLUMNS."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    command = [sys.executable, "-c", LONG_ROW]
    with subprocess.Popen(command, stdout=theirs, env=environment) as process:
        os.close(theirs)
        seen = b""
        with contextlib.suppress(OSError):  # Linux: nobody has the other end any more
            while part := os.read(ours, 4096):
                seen += part
        os.close(ours)
        assert process.wait(60) == 0
    text = re.sub(r"\x1b\[[0-9;]*m|\r", "", seen.decode())
    assert text == f"left\n{'x' * 25}\n    right: {'y' * 40}\n"


@pytest.mark.parametrize("columns", [20, 60])
def test_control_characters_stay_in_their_cell(columns: int) -> None:
    """What a name would do to the terminal is printed as an escape."""
    table = Table(("leaf", "what"), folds=("what",))
    table.add("a\x1b]0;owned\x07", "first\nsecond\u202e")
    console = Console(width=columns, file=io.StringIO())
    with console.capture() as captured:
        console.print(table)
    shown = captured.get()
    assert all(each.isprintable() or each == "\n" for each in shown)
    assert r"\x1b]0;owned\x07" in shown.replace("\n", "").replace(" ", "")


def test_layers_fold_by_the_number_that_most_have_in_common() -> None:
    """Of one shape alone, and in ranges; what is folded nowhere stays as it is."""
    alike = {f"{n}.layers.{k}.w": k == 5 for n in (0, 1) for k in range(10)}
    alike |= {"a1": False, "a2": False, "b.07": True, "b.08": True, "b.09": True}
    folds = fold_layers(alike)
    assert [fold.path for fold in folds] == [
        "0.layers.{0..4,6..9}.w",
        "0.layers.5.w",
        "1.layers.{0..4,6..9}.w",
        "1.layers.5.w",
        "a1",
        "a2",
        "b.{07..09}",
    ]
    assert {path for fold in folds for path in fold.members} == set(alike)
    every_second = {f"w{k}": k % 2 for k in range(40)}
    assert [fold.path for fold in fold_layers(every_second)] == [
        "w{0,2,...,38}",
        "w{1,3,...,39}",
    ]
