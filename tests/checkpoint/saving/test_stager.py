"""Staging: what a save takes in the caller's thread, and what it holds when it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from holdfast.checkpoint import (
    CheckpointManager,
    Files,
    Json,
    Options,
    SaveFailed,
    UnsupportedLeaf,
    save,
    save_async,
)
from holdfast.checkpoint.agreement.save_protocol import SaveKey
from holdfast.checkpoint.errors import LeafFailed, failure_of
from holdfast.checkpoint.saving import record_builder, stager
from holdfast.checkpoint.saving.snapshot import Shard, Snapshot
from holdfast.checkpoint.saving.stager import JsonValue, OneSave, SaveOrder, SaveStager
from holdfast.checkpoint.steps.claims import this_writer
from holdfast.checkpoint.steps.object_claims import open_claims
from holdfast.checkpoint.steps.opening import OpenRoot
from holdfast.checkpoint.storage.bucket import BucketStorage
from holdfast.multihost import Solo
from tests.support.failed_arrays import failed_array, forget_failures


class Reader:
    """A data iterator."""

    def get_state(self) -> dict[str, int]:
        return {"at": 7}

    def set_state(self, state: object) -> None:
        raise AssertionError("nobody restores here")


ROOT = OpenRoot(
    storage=BucketStorage("memory://staging"),
    group=Solo(),
    options=Options(per_process=lambda path: path == "mine"),
    claims=open_claims(BucketStorage("memory://staging")),
    writer=this_writer(),
)


@pytest.fixture
def save_stager() -> SaveStager:
    return SaveStager(ROOT)


def stage(save_stager: SaveStager, **order: Any) -> OneSave:
    """Returns a save with what an order of step 10 says."""
    save = OneSave(root=ROOT, key=SaveKey(ROOT.writer.id, 3, 10))
    try:
        save_stager.stage(save, SaveOrder(10, **order))
    except BaseException:
        assert not (save.trees or save.values or save.files or save.begun)
        raise
    return save


def test_items_are_told_apart(save_stager: SaveStager) -> None:
    """Trees are planned, JSON and the states of iterators are values, metrics are floats."""
    items = {
        "state": {"w": jnp.zeros(4), "mine": np.arange(2)},
        "config": Json([1, None]),
        "data": Reader(),
    }
    metrics = {"loss": np.float32(0.5)}
    staged = stage(save_stager, items=items, metrics=metrics, metadata={"run": "a"})
    assert (
        set(staged.trees) == {"state"}
        and staged.values["config"] == JsonValue(b"[1,null]", per_process=False)
        and set(staged.values) == {"config", "data"}
    )
    assert (
        staged.metrics == {"loss": 0.5}
        and type(staged.metrics["loss"]) is float
        and staged.metadata == {"run": "a"}
    )
    assert staged.total_bytes == staged.own_bytes == 16 + 16
    assert [leaf.per_process for leaf in staged.trees["state"].plan.leaves] == [True, False]


def test_each_item_keeps_its_plans(save_stager: SaveStager) -> None:
    """The second save of the same trees makes no new plan, and one item's plan is not another's."""
    items = {"state": {"w": np.zeros(4)}, "ema": {"w": np.zeros(4)}}
    first, second = (stage(save_stager, items=items) for _ in range(2))
    for name in items:
        assert second.trees[name].plan is first.trees[name].plan
    assert first.trees["ema"].plan is not first.trees["state"].plan


@pytest.mark.parametrize(
    ("items", "metrics", "kind"),
    [
        ({"a": {"w": np.zeros(4)}, "b": {"f": object()}}, None, UnsupportedLeaf),
        ({"a": {"w": np.zeros(4)}, "b": Json(set())}, None, TypeError),
        ({"a": {"w": np.zeros(4)}}, {"loss": "low"}, ValueError),
    ],
)
def test_what_fails_holds_nothing(
    save_stager: SaveStager,
    monkeypatch: pytest.MonkeyPatch,
    items: dict[str, object],
    metrics: dict[str, object] | None,
    kind: type[Exception],
) -> None:
    """A leaf or a value that cannot be saved, or a metric that is no number, is raised, and the
    snapshots taken before it are released.
    """
    taken: list[Snapshot] = []
    take = stager.take_snapshot

    def recorded(*args: object, **options: object) -> Snapshot:
        taken.append(take(*args, **options))  # type: ignore[arg-type]
        return taken[-1]

    monkeypatch.setattr(stager, "take_snapshot", recorded)
    with pytest.raises(kind):
        stage(save_stager, items=items, metrics=metrics)
    assert len(taken) == 1 and taken[0].packs == {}


@pytest.mark.parametrize("tree", [{}, {"state": {"w": np.zeros(4)}}])
def test_names_that_no_record_holds_are_refused_at_once(
    save_stager: SaveStager, tree: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of files, as long as they are, beside a tree or without one: before anything is written."""

    def write(folder: Path) -> None:
        for number in range(20):
            (folder / f"{number}-{'n' * 200}").touch()

    items = tree | {"files": Files(write)}
    stage(save_stager, items=items).release()
    monkeypatch.setattr(record_builder, "RECORD_LIMIT_BYTES", 7_000)
    with pytest.raises(ValueError, match="are the names of JSON items and files"):
        stage(save_stager, items=items)


@pytest.fixture
def _forgotten() -> Iterator[None]:
    yield
    forget_failures()


def _by_manager(path: Path, tree: Any, **options: Any) -> None:
    with CheckpointManager(path) as manager:
        manager.save(7, tree, **options).wait()


FAILED: dict[str, Callable[[Path], object]] = {
    "'p.w' failed": lambda path: _by_manager(path, {"p": {"v": 1, "w": failed_array((99,))}}),
    "'z' failed": lambda path: save(path, {"a": jnp.ones(2), "z": failed_array()}, step=7),
    "'c' failed": lambda path: save(path, {"c": failed_array()}, step=7, dtype="bfloat16"),
    "'a' failed": lambda path: save_async(path, {"a": failed_array()}, step=7).wait(),
    "metrics.*failed": lambda path: _by_manager(path, {}, metrics={"loss": failed_array()}),
}


@pytest.mark.usefixtures("_forgotten")
@pytest.mark.parametrize("leaf", FAILED)
def test_a_computation_that_failed_names_leaf_and_step(leaf: str, tmp_path: Path) -> None:
    """It is an error of the save, whatever meets it first, and nothing is there then."""
    sentence = rf"^step 7 was not saved: .*the computation of .*{leaf}.*the reward model is down"
    with pytest.raises(SaveFailed, match=sentence) as raised:
        FAILED[leaf](tmp_path / "root")
    assert raised.value.step == 7
    assert raised.value.leaf
    assert not [*tmp_path.rglob("checkpoint.json")]


@pytest.mark.usefixtures("_forgotten")
def test_a_computation_that_failed_is_named_by_the_writer(tmp_path: Path) -> None:
    """Where a shard is on its way to the host it is met on another thread."""
    with pytest.raises(LeafFailed, match=r"'p\.w' failed: .*the reward model is down") as raised:
        Shard(failed_array(), path="p.w").get()
    failure = failure_of(raised.value, 3, 1)
    assert isinstance(failure, SaveFailed)
    assert (failure.step, failure.process, failure.leaf) == (3, 1, "p.w")
    with pytest.raises(SaveFailed, match=r"the computation of 'w' failed: .*model is down"):
        save(tmp_path / "orbax", {"w": failed_array()}, layout="orbax")
    assert not [*(tmp_path / "orbax").glob("*")]


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_a_donated_array_is_named_whatever_plan_is_cached(dtype: Any, tmp_path: Path) -> None:
    """The plan of the save before fits: the leaf is refused all the same, by its name."""
    tree = {"w": jnp.arange(4.0), "b": jnp.ones(3)}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, tree, dtype=dtype).wait()
        tree["b"].delete()
        with pytest.raises(UnsupportedLeaf, match="the leaf 'b' was deleted or donated"):
            manager.save(2, tree, dtype=dtype)
        assert manager.all_steps() == [1]
