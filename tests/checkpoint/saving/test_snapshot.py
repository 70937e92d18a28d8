"""Snapshots: once one is taken the caller may do with its arrays what it likes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holdfast.checkpoint.format.record import read_record
from holdfast.checkpoint.restoring.restore import restore_item
from holdfast.checkpoint.saving.pack_writer import write_snapshot
from holdfast.checkpoint.saving.planner import Planner
from holdfast.checkpoint.saving.record_builder import build_record
from holdfast.checkpoint.saving.snapshot import Snapshot, take_snapshot
from holdfast.checkpoint.storage.local import LocalStorage


def commit(snapshot: Snapshot, storage: LocalStorage) -> None:
    report = write_snapshot(snapshot, storage, "", "state", "ab12cd34")
    record = build_record(0, {"state": (snapshot.plan, [report])}, writer="ab12cd34", processes=1, started_s=0.0, finished_s=0.0)
    (Path(storage.root) / ".holdfast/ab12cd34").mkdir(parents=True)
    storage.commit("checkpoint.json", record, ".holdfast/ab12cd34")


@pytest.mark.parametrize("views", [None, False])
def test_donation_and_overwriting_do_not_disturb_it(tmp_path: Path, views: bool | None) -> None:
    """Arrays donated, and numpy leaves overwritten, right after the snapshot are saved as they were."""
    tree = {"device": jnp.arange(1 << 16, dtype=jnp.float32), "host": np.arange(1000), "key": jax.random.key(2)}
    planner, storage = Planner(), LocalStorage(tmp_path)
    snapshot = take_snapshot(planner.plan(tree), tree, views=views)
    assert snapshot.wait(0)
    step = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    array: Any = tree["device"]
    for _ in range(3):
        array = step(array)
    array.block_until_ready()
    tree["host"][:] = -1  # type: ignore[index]
    commit(snapshot, storage)
    found = restore_item(storage, "", read_record(storage, ""))
    np.testing.assert_array_equal(found["device"], np.arange(1 << 16, dtype=np.float32))
    np.testing.assert_array_equal(found["host"], np.arange(1000))
    np.testing.assert_array_equal(found["key"], jax.random.key_data(jax.random.key(2)))


def test_a_bound_on_host_memory_makes_the_caller_wait(tmp_path: Path) -> None:
    """With room for one of four arrays, `wait` ends when the writer has fetched the others; what is written is right."""
    tree = {f"w{i}": jnp.full(1 << 18, i, jnp.float32) for i in range(4)}
    storage = LocalStorage(tmp_path)
    snapshot = take_snapshot(Planner().plan(tree), tree, host_memory_bytes=1 << 20, views=False)
    assert not snapshot.wait(0)
    writer = threading.Thread(target=commit, args=(snapshot, storage))
    writer.start()
    assert snapshot.wait(60)
    for array in tree.values():
        array.delete()
    writer.join()
    found = restore_item(storage, "", read_record(storage, ""))
    assert all((found[f"w{i}"] == i).all() for i in range(4))


def test_a_snapshot_that_is_not_written_lets_go() -> None:
    """`release` ends every wait, and may be called twice."""
    tree = {"w": jnp.arange(8)}
    snapshot = take_snapshot(Planner().plan(tree), tree, host_memory_bytes=0, views=False)
    assert not snapshot.wait(0)
    snapshot.release()
    snapshot.release()
    assert snapshot.wait(0)
