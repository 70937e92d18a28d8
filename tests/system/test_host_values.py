"""Values of the host in a job of several processes: one copy of what is equal, a refusal of what
differs, a copy each on request.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holdfast.checkpoint import (
    CheckpointManager,
    HostileCheckpoint,
    Options,
    TreeMismatch,
    load,
    save,
    verify,
)
from holdfast.checkpoint.format.record import parse_record
from tests.support.checkpointing import run_in_turn
from tests.support.programs.reader import Reader


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the roots, one a program."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def printed(runs: Path) -> dict[str, list[str]]:
    """What the programs print, which come in turn in the same two processes."""
    programs = [
        ("host_values_round_trip", runs / "r"),
        ("host_values_readers", runs / "readers"),
        ("host_values_differ", runs / "differ"),
    ]
    return run_in_turn(2, programs)


@pytest.mark.usefixtures("printed")
def test_a_value_of_each_process(runs: Path) -> None:
    """Two processes keep values of their own of every kind in one tree with shared ones: each gets
    its own back, or another's on request.

    On another number of processes it is an error that says what is there; `process` takes one's
    copy, a predicate leaves them out.
    """
    root = runs / "r"
    verify(root / "2")
    record = parse_record((root / "2" / "checkpoint.json").read_bytes(), "")
    kept = {leaf.path: leaf for leaf in record.items["state"].leaves if leaf.per_process}
    assert (
        len(kept) == 10
        and kept["reader.seen"].shape == (2, 5)
        and kept["reader.at"].value == (1020, 1021)
    )
    files = {file.name.split("/")[1][:5] for file in record.items["state"].files}
    assert files == {"00000", "00001"}, "each process writes its own"

    with CheckpointManager(root, options=Options(read_only=True)) as manager:
        with pytest.raises(
            TreeMismatch,
            match=(
                r"kept per process and is there for 2 processes, not for each of 1 processes; .*"
                r" process=0 to 1"
            ),
        ):
            manager.restore(2)
        got = manager.restore(2, process=1)
        assert (
            got["reader"]["at"] == 1021
            and (got["reader"]["seen"] == np.arange(5) * 22).all()
            and got["name"] == "net"
        )
        with pytest.raises(TreeMismatch, match="not of process 2"):
            manager.restore(2, process=2)
        shared = manager.restore(2, partial=lambda path: not path.startswith("reader."))
        assert shared["name"] == "net" and shared["reader"]["at"] is None
    wanted = {"at": 0, "seen": np.zeros(5, np.int64)}
    rename = {"reader.at": "at", "reader.seen": "seen"}
    renamed = load(root / "2", wanted, rename=rename, partial=True, process=1)
    assert renamed["at"] == 1021 and (renamed["seen"] == np.arange(5) * 22).all()
    like = {
        "reader": {"seen": np.zeros(5, np.int64), "on": jax.ShapeDtypeStruct((3,), jnp.float32)}
    }
    got = load(root / "2", like, partial=True, process=0)
    assert (got["reader"]["seen"] == np.arange(5) * 21).all() and (
        got["reader"]["on"] == jnp.arange(3.0) + 20
    ).all()


@pytest.mark.usefixtures("printed")
def test_the_state_of_each_reader(runs: Path) -> None:
    """An iterator's state is each process's own too: on another number of processes it is an error,
    unless one is chosen.
    """
    root = runs / "readers"
    assert [path.name[:7] for path in (root / "1/same").iterdir()] == [
        "00000-j"
    ]  # the primary's alone
    with CheckpointManager(root, options=Options(read_only=True)) as manager:
        with pytest.raises(
            TreeMismatch,
            match=(
                r"'data' has a state for each of 2 processes, and this job has 1; .* process=0 to 1"
            ),
        ):
            manager.restore(1, like=Reader(0), item="data")
        assert manager.restore(1, like=Reader(0), item="data", process=1).at == 71


def test_alone_it_is_a_job_of_one(tmp_path: Path) -> None:
    """One process may keep values per process too: the record says so, and they come back as they
    were.
    """
    tree = {"mine": {"a": jnp.arange(4.0), "n": 7}, "w": np.ones(3)}
    save(tmp_path, tree, per_process=lambda path: path.startswith("mine."))
    got = load(tmp_path, tree)
    assert (
        got["mine"]["n"] == 7
        and isinstance(got["mine"]["a"], jax.Array)
        and (got["mine"]["a"] == jnp.arange(4.0)).all()
    )
    assert (load(tmp_path)["mine"]["a"] == np.arange(4.0)).all()
    record = json.loads((tmp_path / "checkpoint.json").read_text())
    assert [leaf.get("per_process", False) for leaf in record["items"]["state"]["leaves"]] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("change", [{"per_process": 1}, {"per_process": True, "shape": []}])
def test_a_record_that_lies_about_it(tmp_path: Path, change: dict[str, object]) -> None:
    """A leaf that is kept per process without an axis for them, or not by a truth value, is
    hostile.
    """
    from crc32c import crc32c

    save(tmp_path, {"a": np.float32(3.0)}, per_process=lambda _: True)
    record = json.loads((tmp_path / "checkpoint.json").read_text())
    record["items"]["state"]["leaves"][0] |= change
    del record["crc32c"]
    body = json.dumps(record, separators=(",", ":"))[:-1].encode()
    (tmp_path / "checkpoint.json").write_bytes(body + b',"crc32c":"%08x"}\n' % crc32c(body))
    with pytest.raises(HostileCheckpoint):
        load(tmp_path)


def test_what_differs_is_named(printed: dict[str, list[str]]) -> None:
    """Where the processes' trees differ in a leaf, its shape, dtype or sharding, or a local value,
    every process learns which leaf.
    """
    outputs = printed["host_values_differ"]
    assert [output.count("caught SaveFailed") for output in outputs] == [16, 16], outputs
