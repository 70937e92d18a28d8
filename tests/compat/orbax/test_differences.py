"""Programs that once ran otherwise here than on Orbax: each on both, with the same results."""

from __future__ import annotations

import dataclasses
import functools
import os
import queue
import shutil
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as real
import pytest
from etils import epath
from orbax.checkpoint.experimental import v1 as real_v1

from holdfast.checkpoint import SAVED, CheckpointManager, Corrupt, load, structure
from holdfast.checkpoint import save as native_save
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.compat import orbax as ours
from holdfast.compat.orbax import v1 as ours_v1
from tests.support.orbax_programs import assert_equal, outcome, run_both

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")  # Orbax's own

SHORT = [
    "array",
    "asynchronous",
    "atomicity",
    "checkpointables",
    "deletion",
    "file",
    "memory",
    "multiprocessing",
    "pathways",
    "pytree",
    "safetensors",
]
TREE = {"w": jnp.arange(4.0)}


def test_a_step_in_flight_is_restored(tmp_path: Path) -> None:
    """A restore at once after the save waits for it, with and without a target, by number or as the
    newest.
    """

    def program(ocp: Any, root: Path) -> Any:
        found = []
        with ocp.CheckpointManager(root) as manager:
            for step, args in enumerate((None, ocp.args.StandardRestore(TREE))):
                manager.save(step, args=ocp.args.StandardSave(TREE))
                found.append(manager.restore(step if args else None, args=args))
        return found

    run_both(program, tmp_path)


def test_a_native_restore_waits_for_its_step(tmp_path: Path) -> None:
    """`restore(step)` of the step in flight waits for its commit, however often."""
    with CheckpointManager(tmp_path) as manager:
        for step in range(20):
            manager.save(step, {"w": np.full(1000, step)})
            assert manager.restore(step)["w"][0] == step


def test_items_that_were_not_named(tmp_path: Path) -> None:
    """Items beside `item_names`, and a single item where several are named."""

    def program(ocp: Any, root: Path) -> Any:
        save = ocp.args.StandardSave
        with ocp.CheckpointManager(root, item_names=("a",)) as manager:
            found = [
                outcome(lambda: manager.save(0, args=ocp.args.Composite(b=save(TREE)))),
                outcome(lambda: manager.save(1, args=save(TREE))),
                # A step of its own: Orbax may still be making the folder of one that it refused.
                manager.save(2, args=ocp.args.Composite(a=save(TREE))),
            ]
            manager.wait_until_finished()
            return [*found, list(manager.all_steps())]

    assert run_both(program, tmp_path) == ["ValueError"] * 2 + [True, [2]]


def test_a_reader_deletes_nothing(tmp_path: Path) -> None:
    """`delete` of a manager that only reads does nothing."""

    def program(ocp: Any, root: Path) -> Any:
        with ocp.CheckpointManager(root) as manager:
            manager.save(0, args=ocp.args.StandardSave(TREE))
        reads = ocp.CheckpointManagerOptions(read_only=True)
        with ocp.CheckpointManager(root, options=reads) as manager:
            return manager.delete(0), list(manager.all_steps())

    run_both(program, tmp_path)


def test_a_policy_knows_the_processes(tmp_path: Path) -> None:
    """A save policy of one's own finds `context.multiprocessing_options`."""

    def program(ocp: Any, root: Path) -> Any:
        seen: list[Any] = []

        class Policy(ocp.training.save_decision_policies.SaveDecisionPolicy):  # type: ignore[misc]
            def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
                seen.append(context.multiprocessing_options.primary_host)
                return True

        with ocp.training.Checkpointer(root, save_decision_policy=Policy()) as checkpointer:
            checkpointer.save(0, TREE)
        return seen[:1]

    run_both(program, tmp_path, v1=True)


def test_a_new_step_is_a_context(tmp_path: Path) -> None:
    """`wait_for_new_checkpoint` is a context manager that yields the step, or -1."""

    def program(ocp: Any, root: Path) -> Any:
        with ocp.CheckpointManager(root) as manager:
            manager.save(3, args=ocp.args.StandardSave(TREE))
        wait = ocp.checkpoint_utils.wait_for_new_checkpoint
        folder = epath.Path(root)
        with wait(folder, until_step=3, timeout=5) as step:
            found = step
        with wait(folder, until_step=9, timeout=0) as step:
            return found, step

    assert run_both(program, tmp_path) == (3, -1)


def test_a_handler_class_takes_types() -> None:
    """v1's `CheckpointableHandler[Value, Abstract]` is a base."""

    class Handler(ours_v1.handlers.CheckpointableHandler[int, str]):
        pass

    assert isinstance(Handler(), ours_v1.handlers.CheckpointableHandler)


def test_background_work_calls_back(tmp_path: Path) -> None:
    """`AsyncResponse.on_complete` calls with the response's value, at its end."""

    def program(ocp: Any, root: Path) -> Any:
        seen: queue.SimpleQueue[Any] = queue.SimpleQueue()
        response = ocp.save_async(root / "x", TREE)
        response.on_complete(seen.put)
        return seen.get(timeout=60), response.result()

    run_both(program, tmp_path, v1=True)


def test_a_context_has_its_options() -> None:
    """Each kind of options is an attribute of a context, given or not, by both of its names, and
    those of the options may be set.
    """

    def program(ocp: Any) -> Any:
        context = ocp.Context()
        context.asynchronous.timeout_secs = 7
        context.pytree.loading.partial_load = True
        context.array.saving.use_ocdbt = False
        inner = ocp.Context(context)
        context.asynchronous.timeout_secs = 9
        kinds = [name for name in dir(context) if not name.startswith("_")]
        return [
            {name: type(getattr(inner, name)).__name__ for name in kinds if name in SHORT},
            inner.async_options.timeout_secs,
            inner.pytree_options.loading.partial_load,
            inner.checkpoint_layout.name,
        ]

    assert program(ours_v1) == program(real_v1)


def _read(options: Any, like: Any, at: str) -> dict[str, Any]:
    """Returns all options below `options` by name, those that `like` has."""
    found: dict[str, Any] = {}
    for name in (each for each in dir(like) if not each.startswith("_")):
        theirs = getattr(like, name)
        if dataclasses.is_dataclass(theirs) and not isinstance(theirs, type):
            found |= _read(getattr(options, name), theirs, f"{at}.{name}")
        elif isinstance(theirs, type):
            found[f"{at}.{name}"] = isinstance(getattr(options, name), type)
        elif not callable(theirs):  # a method of Orbax's
            value = getattr(options, name)
            found[f"{at}.{name}"] = getattr(value, "name", value)
    return found


def test_options_are_read_where_none_was_given() -> None:
    """Each option of v1's, and each class of options inside another, with Orbax's default."""
    theirs = real_v1.Context()
    read = _read(ours_v1.Context(), theirs, "Context")
    expected = _read(theirs, theirs, "Context")
    own = {"registry", "array_metadata_store", "path_class"}  # objects of Orbax's own
    different = {name for name, value in expected.items() if read[name] != value}
    assert len(expected) > 60
    assert {name.rpartition(".")[2] for name in different} == own


def test_a_bucket_for_deleted_steps(tmp_path: Path) -> None:
    """`todelete_full_path` may be set; a deletion with it is refused, where a manager may let steps
    go when it is opened.
    """
    keep = ours_v1.training.preservation_policies.LatestN

    def program(ocp: Any, root: Path) -> Any:
        context = ocp.Context()
        context.deletion.gcs_deletion_options.todelete_full_path = "trash"
        given = type(context.deletion.gcs_deletion_options)(todelete_full_path="trash")
        assert given.todelete_full_path == "trash"
        with ocp.training.Checkpointer(root, context=context) as checkpointer:
            checkpointer.save(0, TREE)
            with pytest.raises(NotImplementedError):
                checkpointer.delete(0)
            return [each.step for each in checkpointer.checkpoints]

    run_both(program, tmp_path, v1=True)
    context = ours_v1.Context()
    context.deletion.gcs_deletion_options.todelete_full_path = "trash"
    with pytest.raises(NotImplementedError, match=r"todelete_full_path='trash'.*todelete_subdir"):
        ours_v1.training.Checkpointer(tmp_path, context=context, preservation_policy=keep(1))


def test_the_best_are_kept_without_best_fn(tmp_path: Path) -> None:
    """`BestN` as the policy, alone and among others, finds the metrics that were given to `save`,
    and those of an earlier run.
    """

    def program(ocp: Any, root: Path) -> Any:
        module = ocp.checkpoint_managers

        def run(folder: str, policy: Any, losses: dict[int, float]) -> Any:
            options = ocp.CheckpointManagerOptions(preservation_policy=policy)
            with ocp.CheckpointManager(root / folder, options=options) as manager:
                for step, loss in losses.items():
                    save = ocp.args.StandardSave(TREE)
                    manager.save(step, args=save, metrics={"loss": loss})
                manager.wait_until_finished()
                return list(manager.all_steps())

        best = module.BestN(get_metric_fn=lambda metrics: metrics["loss"], reverse=True, n=2)
        both = module.AnyPreservationPolicy([best, module.CustomSteps([2])])
        losses = {0: 3.0, 1: 9.0, 2: 4.0, 3: 1.0}
        return [
            run("a", best, losses),
            run("b", both, losses),
            run("c", best, losses | {4: 0.5}),
        ]

    assert run_both(program, tmp_path) == [[0, 3], [0, 2, 3], [3, 4]]
    policy = ours.checkpoint_managers.BestN(
        get_metric_fn=lambda metrics: metrics["loss"], reverse=True, n=2
    )
    options = ours.CheckpointManagerOptions(preservation_policy=policy)
    with ours.CheckpointManager(tmp_path / "holdfast/a", options=options) as manager:
        manager.save(4, args=ours.args.StandardSave(TREE), metrics={"loss": 2.0})
        manager.wait_until_finished()
        assert manager.all_steps() == [3, 4]


NUMBERS = {"n": 3, "f": 2.5, "b": True, "w": jnp.arange(4.0), "x": np.arange(6.0).reshape(2, 3)}
LIKE_V0 = [
    {"n": 0.0},
    {"b": 0},
    {"b": 1.0},
    {"n": None},
    {"w": None},
    {"w": np.array([])},
    {"x": np.array([], np.float32)},
]
LIKE_V1 = [
    *LIKE_V0,
    {"n": int},
    {"f": float},
    {"b": bool},
    {"n": np.ndarray},
    {"w": np.ndarray},
    {"x": np.ndarray},
    {"w": jax.Array},
    {"w": jax.ShapeDtypeStruct},
]


def test_targets_of_types_and_nothing(tmp_path: Path) -> None:
    """A target may have types for leaves, None for what is not wanted, an empty array for any
    shape; Python numbers come back in the target's type.
    """

    def program_v0(ocp: Any, root: Path) -> Any:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(root / "a", NUMBERS)
            checkpointer.wait_until_finished()
            return [
                outcome(lambda like=like: checkpointer.restore(root / "a", NUMBERS | like))
                for like in LIKE_V0
            ]

    def program_v1(ocp: Any, root: Path) -> Any:
        ocp.save(root / "b", NUMBERS | {"text": "hello"})
        return [
            outcome(lambda like=like: ocp.load(root / "b", NUMBERS | {"text": str} | like))
            for like in LIKE_V1
        ]

    (tmp_path / "v0").mkdir()
    (tmp_path / "v1").mkdir()
    run_both(program_v0, tmp_path / "v0")
    run_both(program_v1, tmp_path / "v1", v1=True)


@pytest.mark.parametrize(("leaf", "like"), [("f", 0), ("n", True), ("f", int)])
def test_inexact_numbers_are_refused(tmp_path: Path, leaf: str, like: Any) -> None:
    """Where Orbax cuts a number the error names the leaf, the number and what to ask for."""
    ours_v1.save(tmp_path / "a", NUMBERS)
    value = NUMBERS[leaf]
    expected = rf"leaf '{leaf}' .* {value}, which is none; give {type(value).__name__} in"
    with pytest.raises(ValueError, match=expected):
        ours_v1.load(tmp_path / "a", NUMBERS | {leaf: like})


def test_a_none_in_a_target_leaves_out_one_leaf(tmp_path: Path) -> None:
    """The others are still compared with the checkpoint."""
    ours_v1.save(tmp_path / "a", NUMBERS)
    with pytest.raises(ValueError, match="leaves that the target lacks: 'b', 'f', 'x'"):
        ours_v1.load(tmp_path / "a", {"n": None, "w": TREE["w"]})


def test_one_damaged_item_leaves_the_others(tmp_path: Path) -> None:
    """They are described and loaded, by name and as the usual one; the damaged one is an error,
    natively one that names its file.
    """
    save = real.args.StandardSave
    with real.CheckpointManager(tmp_path / "v0") as manager:
        manager.save(1, args=real.args.Composite(state=save(TREE), extra=save({"x": TREE["w"]})))
    real_v1.save_checkpointables(tmp_path / "v1", {"state": TREE, "extra": {"x": TREE["w"]}})
    for folder in ("v0/1", "v1"):
        (tmp_path / folder / "extra" / "_METADATA").write_text("{broken")

    def program_v0(ocp: Any, root: Path) -> Any:
        with ocp.CheckpointManager(tmp_path / "v0", item_names=("state", "extra")) as manager:
            restore = ocp.args.Composite(state=ocp.args.StandardRestore())
            state = manager.restore(1, args=restore)["state"]
            return state, manager.item_metadata(1)["state"]["w"].shape

    def program_v1(ocp: Any, root: Path) -> Any:
        path = tmp_path / "v1"
        return [
            ocp.load(path),
            ocp.load_checkpointables(path, {"state": None}),
            sorted(ocp.checkpointables_metadata(path).metadata),
        ]

    run_both(program_v0, tmp_path)
    (tmp_path / "one").mkdir()
    run_both(program_v1, tmp_path / "one", v1=True)
    found = structure(tmp_path / "v1").items["extra"]
    assert (found.kind, found.tree) == ("tree", None) and "_METADATA" in str(found.error)
    with pytest.raises(Corrupt, match=r"extra/_METADATA"):
        ours_v1.load_checkpointables(tmp_path / "v1", {"extra": None})
    (tmp_path / "v1" / "state" / "_METADATA").write_text("{broken")
    with pytest.raises(Corrupt):
        structure(tmp_path / "v1")


@pytest.mark.parametrize("value", [jnp.arange(3.0), np.arange(3), {"checkpoint": jnp.ones(2)}])
def test_what_is_written_for_orbax_comes_back(tmp_path: Path, value: Any) -> None:
    """One array is one array for Orbax's manager and for `load`, and a dict with a key of Orbax's
    own name for arrays is a dict.
    """
    native_save(tmp_path / "root" / "0", value, layout="orbax")
    assert_equal(load(tmp_path / "root" / "0", SAVED), value)
    with real.CheckpointManager(tmp_path / "root") as manager:
        args = None if isinstance(value, dict) else real.args.ArrayRestore()
        assert_equal(np.asarray(jax.tree.leaves(manager.restore(0, args=args))[0]), first(value))
    if isinstance(value, dict):
        assert_equal(real_v1.load(tmp_path / "root" / "0"), value)


def first(tree: Any) -> Any:
    return np.asarray(jax.tree.leaves(tree)[0])


def test_a_tree_written_for_orbax_needs_no_name(tmp_path: Path) -> None:
    """Orbax's manager restores it without a Composite, and its v1 by itself."""
    native_save(tmp_path / "root" / "0", TREE, layout="orbax")
    with real.CheckpointManager(tmp_path / "root") as manager:
        assert_equal(manager.restore(0, args=real.args.StandardRestore(TREE)), TREE)
    assert_equal(real_v1.load(tmp_path / "root" / "0"), TREE)


def test_args_that_do_not_fit(tmp_path: Path) -> None:
    """Those of another kind of item, of no kind, a Composite for one item, None for an item."""

    def program(ocp: Any, root: Path) -> Any:
        args = ocp.args

        def names(restored: Any) -> list[str]:
            return sorted(restored.keys())

        with ocp.CheckpointManager(root / "one") as manager:
            manager.save(0, args=args.StandardSave(TREE))
            manager.wait_until_finished()
            composite = args.Composite(default=args.StandardRestore())
            one = [
                outcome(lambda: manager.restore(0, args=composite)),
                outcome(lambda: manager.restore(0, args={"a": 1})),
                manager.restore(0),
            ]
        with ocp.CheckpointManager(root / "several") as manager:
            save = args.Composite(state=args.StandardSave(TREE), about=args.JsonSave({"a": 1}))
            manager.save(0, args=save)
            manager.wait_until_finished()
            wrong = [
                args.Composite(state=args.JsonRestore()),
                args.Composite(about=args.StandardRestore()),
                args.Composite(nothing=None),
                {"state": 1},
            ]
            several = [
                *(outcome(lambda each=each: manager.restore(0, args=each)) for each in wrong),
                names(manager.restore(0, args=args.Composite())),
                names(manager.restore(0, args=args.Composite(state=None))),
            ]
        with ocp.CheckpointManager(root / "none") as manager:
            several += [
                outcome(
                    lambda: manager.save(1, args=args.Composite(state=args.StandardSave(None)))
                ),
                outcome(lambda: manager.save(2, args=args.Composite(state=args.ArraySave(TREE)))),
            ]
        return one, several

    run_both(program, tmp_path)


def test_a_closed_root_holds_its_steps_alone(tmp_path: Path) -> None:
    """As programs that list the root expect; a manager that is open there keeps its claim."""

    def program(ocp: Any, root: Path) -> Any:
        with ocp.CheckpointManager(root) as manager:
            for step in (1, 2):
                manager.save(step, args=ocp.args.StandardSave(TREE))
        return sorted(path.name for path in root.iterdir())

    assert run_both(program, tmp_path) == ["1", "2"]
    root = tmp_path / "holdfast"
    with CheckpointManager(root) as native:
        with ours.CheckpointManager(root) as manager:
            assert manager.all_steps() == [1, 2]
        assert len(list((root / ".holdfast").iterdir())) == 1
        native.save(3, TREE)
    assert load(root / "3")["w"].shape == (4,)


SHAPES = [
    {"w": jnp.zeros((3, 2)), "x": np.zeros(3), "n": 0},
    {"w": jnp.zeros((2, 3)), "x": np.zeros(5), "n": 0},
    {"w": jnp.zeros(6), "x": np.zeros(3), "n": 0},
    {"w": jax.ShapeDtypeStruct((1, 4), jnp.int32), "x": np.zeros(3), "n": 0},
    {"w": jnp.zeros((4, 4), jnp.bfloat16), "x": np.zeros(3), "n": 1.0},
]


# A restore of Orbax's own that is refused leaves futures, which come when its loop is closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_arrays_are_cut_and_padded(tmp_path: Path) -> None:
    """Without `strict` an array of jax's comes back in the target's shape: cut, or with zeros."""

    def program(ocp: Any, root: Path) -> Any:
        saved = {"w": jnp.arange(6.0).reshape(2, 3), "x": np.arange(3.0), "n": 3}
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(root / "a", saved)
            checkpointer.wait_until_finished()
            return [
                outcome(lambda like=like: checkpointer.restore(root / "a", like, strict=False))
                for like in SHAPES
            ]

    run_both(program, tmp_path)


def test_steps_of_others_need_no_reload(tmp_path: Path) -> None:
    """Orbax shows a step that another manager saved, and one that was removed, after `reload`.

    Here both are seen at once, and `reload` changes nothing.
    """

    def program(ocp: Any, root: Path) -> Any:
        save = ocp.args.StandardSave(TREE)
        with ocp.CheckpointManager(root) as manager:
            manager.save(0, args=save)
            manager.wait_until_finished()
            with ocp.CheckpointManager(root) as other:
                other.save(1, args=save)
            found = [list(manager.all_steps()), manager.latest_step()]
            manager.reload()
            found += [list(manager.all_steps()), manager.latest_step()]
            shutil.rmtree(root / "1")
            found.append(list(manager.all_steps()))
            manager.reload()
            return [*found, list(manager.all_steps())]

    (tmp_path / "orbax").mkdir()
    assert program(real, tmp_path / "orbax") == [[0], 0, [0, 1], 1, [0, 1], [0]]
    (tmp_path / "holdfast").mkdir()
    assert program(ours, tmp_path / "holdfast") == [[0, 1], 1, [0, 1], 1, [0], [0]]


def test_times_of_steps(tmp_path: Path) -> None:
    """A policy sees a time within the call of `save`, in both libraries.

    `checkpoints` has that time in Orbax, and a later run the time of the commit; here it is the
    other way round.
    """

    def program(ocp: Any, root: Path) -> Any:
        seen: list[Any] = []

        class Policy(ocp.training.save_decision_policies.SaveDecisionPolicy):  # type: ignore[misc]
            def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
                seen[:] = [info.time for info in previous_steps]
                return True

        with ocp.training.Checkpointer(root, save_decision_policy=Policy()) as checkpointer:
            before = datetime.now(UTC)
            checkpointer.save(0, TREE)
            after = datetime.now(UTC)
            checkpointer.should_save(1)
            [at_first] = seen
            listed = checkpointer.checkpoints[0].time
            committed = checkpointer.metadata(0).time
        with ocp.training.Checkpointer(root, save_decision_policy=Policy()) as checkpointer:
            checkpointer.should_save(1)
            [later] = seen
        assert before <= at_first < committed <= after
        times = [at_first, listed, later]
        return ["committed" if each == committed else before <= each < committed for each in times]

    (tmp_path / "orbax").mkdir()
    assert program(real_v1, tmp_path / "orbax") == [True, True, "committed"]
    (tmp_path / "holdfast").mkdir()
    assert program(ours_v1, tmp_path / "holdfast") == [True, "committed", True]


def test_the_time_of_a_step_in_flight_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy that is asked twice during a save sees the same time of it."""
    opened = threading.Event()
    write = LocalStorage.write

    def write_later(self: LocalStorage, name: str, *args: Any) -> None:
        if name.endswith(".safetensors"):
            assert opened.wait(60)
        write(self, name, *args)

    monkeypatch.setattr(LocalStorage, "write", write_later)
    seen: list[Any] = []

    class Policy(ours.checkpoint_managers.SaveDecisionPolicy):  # type: ignore[misc]
        def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
            seen.extend(info.time for info in previous_steps)
            return True

    options = ours.CheckpointManagerOptions(save_decision_policy=Policy())
    with ours.CheckpointManager(tmp_path, options=options) as manager:
        try:
            manager.save(0, args=ours.args.StandardSave(TREE))
            assert manager.should_save(1)
            assert manager.should_save(1)
        finally:
            opened.set()
    assert len(seen) == 2
    assert seen[0] == seen[1]


def test_kinds_of_items_stand_for_handlers(tmp_path: Path) -> None:
    """`item_handlers` has the same items as in Orbax, with kinds for classes."""

    def program(ocp: Any, root: Path) -> Any:
        args = ocp.args
        items = args.Composite(state=args.StandardSave(TREE), about=args.JsonSave({"a": 1}))
        with ocp.CheckpointManager(root) as manager:
            manager.save(0, args=items)
            manager.wait_until_finished()
            return dict(manager.metadata(0).item_handlers)

    (tmp_path / "orbax").mkdir()
    expected = program(real, tmp_path / "orbax")
    assert expected["about"] == real.JsonCheckpointHandler.typestr()
    (tmp_path / "holdfast").mkdir()
    found = program(ours, tmp_path / "holdfast")
    assert found == {"state": "tree", "about": "json"}
    assert found.keys() == expected.keys()


@dataclasses.dataclass
class Abstract:
    """As the abstract arrays that programs have of their own."""

    shape: tuple[int, ...]
    dtype: Any


def _on_a_mesh() -> jax.sharding.NamedSharding:
    return jax.sharding.NamedSharding(
        jax.sharding.Mesh(np.array(jax.devices()[:4]), "x"), jax.sharding.PartitionSpec("x")
    )


def test_a_target_without_a_sharding_is_numpy(tmp_path: Path) -> None:
    """What has a shape and a dtype, and no sharding, comes back as numpy, 64 bits and casts too."""

    def program(ocp: Any, root: Path) -> Any:
        saved = {"w": jax.device_put(jnp.arange(8.0), _on_a_mesh()), "x": np.arange(3)}
        ocp.save(root / "a", saved)
        return [
            ocp.load(root / "a", {"w": Abstract((8,), dtype), "x": Abstract((3,), np.int64)})
            for dtype in (np.float32, np.float16)
        ]

    run_both(program, tmp_path, v1=True)


SAVE_ON_TWO = """
import sys
import jax
import jax.numpy as jnp
import numpy as np
from holdfast.checkpoint import save
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
tree = {"w": jax.device_put(jnp.arange(16.0), sharding), "n": 3}
save(sys.argv[1] + "/holdfast/a", items={"default": tree})
save(sys.argv[1] + "/orbax/a", items={"default": tree}, layout="orbax")
"""


def test_a_sharding_that_does_not_fit_is_asked_for(tmp_path: Path) -> None:
    """A target without one gets the fallback, and without that too the restore is a ValueError; no
    array lands on a device that nobody chose.
    """
    devices = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-c", SAVE_ON_TWO, str(tmp_path)]
    subprocess.run(command, env=os.environ | devices, check=True)

    def program(ocp: Any, root: Path) -> Any:
        v1 = real_v1 if ocp is real else ours_v1
        like = {"w": jax.ShapeDtypeStruct((16,), np.float32), "n": 0}
        fallback = _on_a_mesh()
        restore = functools.partial(
            ocp.Checkpointer(ocp.StandardCheckpointHandler()).restore, root / "a" / "default"
        )
        calls = [
            lambda: restore(args=ocp.args.StandardRestore(like, fallback_sharding=fallback)),
            lambda: restore(args=ocp.args.StandardRestore(None, fallback_sharding=fallback)),
            lambda: restore(args=ocp.args.StandardRestore(like)),
            lambda: ocp.PyTreeCheckpointer().restore(root / "a" / "default", item=like),
            lambda: v1.load(root / "a", like, checkpointable_name="default"),
            lambda: ocp.PyTreeCheckpointer().restore(
                root / "a" / "default",
                restore_args=ocp.checkpoint_utils.construct_restore_args(like),
            ),
        ]
        return [outcome(call) for call in calls]

    expected = program(real, tmp_path / "orbax")
    assert [*map(type, expected)] == [dict, dict, str, str, str, dict], expected
    assert_equal(program(ours, tmp_path / "holdfast"), expected)


def _described(sharding: Any) -> Any:
    names = ("axis_names", "axis_types", "partition_spec")
    known = [getattr(sharding, name) for name in names]
    ids = [device.id for device in sharding.device_mesh.mesh]
    return [*known, list(sharding.shape), ids, sharding.to_jax_sharding()]


def test_shardings_of_metadata(tmp_path: Path) -> None:
    """`to_jax_sharding`, of both versions; metadata is a target, and of restore arguments too."""

    def program(ocp: Any, root: Path) -> Any:
        tree = {"w": jax.device_put(jnp.arange(8.0), _on_a_mesh()), "one": jnp.arange(2.0)}
        with ocp.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(root / "a", tree)
            item = checkpointer.metadata(root / "a").item_metadata
            args = ocp.checkpoint_utils.construct_restore_args(item.tree)
            paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(item)]
            single = item["one"].sharding
            kinds = [
                isinstance(leaf.sharding, ocp.metadata.ShardingMetadata) for leaf in item.values()
            ]
            return [
                _described(item["w"].sharding),
                single.to_jax_sharding().device_set,
                type(single) is ocp.metadata.SingleDeviceShardingMetadata,
                kinds,
                checkpointer.restore(root / "a", restore_args=args),
                jax.tree.map(lambda leaf: leaf.shape, item).tree,
                paths,
                ocp.metadata.NamedShardingMetadata.from_jax_sharding(_on_a_mesh())
                == item["w"].sharding,
                ocp.metadata.NamedShardingMetadata(
                    np.array([jax.device_count()]), ["x"], ("x",)
                ).to_jax_sharding(),
            ]

    def program_v1(ocp: Any, root: Path) -> Any:
        tree = {"w": jax.device_put(jnp.arange(8.0), _on_a_mesh())}
        ocp.save(root / "a", tree)
        found = ocp.metadata(root / "a").metadata["w"]
        return _described(found.sharding_metadata), found.sharding

    (tmp_path / "v0").mkdir()
    (tmp_path / "v1").mkdir()
    run_both(program, tmp_path / "v0")
    run_both(program_v1, tmp_path / "v1", v1=True)


class Unknown:
    """What is no tree and no number."""


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    """A leaf of a tree is a ValueError; a checkpointable without a handler a KeyError, and so is
    one whose tree has such a leaf, unless its name has a handler.
    """
    leaves = (Unknown(), {1, 2}, lambda: 1)

    def values_of(leaf: Any) -> list[dict[str, Any]]:
        deep = {"a": [1, {"b": leaf}]}
        return [{"state": leaf}, {"state": deep}, {"a": TREE, "b": leaf}, {"a": TREE, "b": deep}]

    def program_v0(ocp: Any, root: Path) -> Any:
        found = []
        for number, leaf in enumerate(leaves):
            with ocp.CheckpointManager(root / str(number)) as manager:
                save = ocp.args.PyTreeSave({"x": leaf})
                found.append(outcome(lambda save=save: manager.save(0, args=save)))
            save_tree = ocp.PyTreeCheckpointer().save
            place = root / f"{number}x"
            found.append(outcome(lambda at=place, it=leaf, do=save_tree: do(at, {"x": it})))
        return found

    def program_v1(ocp: Any, root: Path) -> Any:
        found = []
        for number, leaf in enumerate(leaves):
            for how, value in enumerate(values_of(leaf)):
                path = root / f"{number}.{how}"
                found.append(outcome(lambda at=path, it=value: ocp.save_checkpointables(at, it)))
            path = root / f"{number}.tree"
            found.append(outcome(lambda at=path, leaf=leaf: ocp.save(at, leaf)))
            with ocp.training.Checkpointer(root / f"{number}.steps") as checkpointer:
                items = {"mine": [leaf]}
                found.append(outcome(lambda it=items: checkpointer.save_checkpointables(0, it)))
        return found

    (tmp_path / "v0").mkdir()
    (tmp_path / "v1").mkdir()
    assert set(run_both(program_v0, tmp_path / "v0")) == {"ValueError"}
    assert set(run_both(program_v1, tmp_path / "v1", v1=True)) == {"ValueError", "KeyError"}
    with pytest.raises(KeyError, match=r"'mine'.*Unknown.*register_handler") as refused:
        ours_v1.save_checkpointables(tmp_path / "a", {"mine": Unknown()})
    with pytest.raises(ValueError, match=r"^the tree itself has dtype <U1"):
        ours_v1.save(tmp_path / "a", np.array(["a"]))
    assert "\\r" not in str(refused.value)


UNKNOWN = {
    "v0": [
        "Checkpointer(ocp.PyTreeCheckpointHandler(), nonsense=1)",
        "AsyncCheckpointer(ocp.PyTreeCheckpointHandler(), nonsense=1)",
        "StandardCheckpointer(nonsense=1)",
        "PyTreeCheckpointer(nonsense=1)",
        "StandardCheckpointHandler(nonsense=1)",
        "PyTreeCheckpointHandler(nonsense=1)",
        "JsonCheckpointHandler(nonsense=1)",
        "ArrayCheckpointHandler(nonsense=1)",
        "JaxRandomKeyCheckpointHandler(nonsense=1)",
        "NumpyRandomKeyCheckpointHandler(nonsense=1)",
        "type_handlers.ArrayHandler(nonsense=1)",
        "type_handlers.NumpyHandler(nonsense=1)",
        "type_handlers.SingleReplicaArrayHandler(nonsense=1)",
        "CheckpointManagerOptions(nonsense=1)",
    ],
    "v1": [
        "Context(nonsense=1)",
        "options.MemoryOptions(nonsense=1)",
        "options.ArrayOptions.Saving(nonsense=1)",
        "options.ArrayOptions.Saving.StorageOptions(nonsense=1)",
        "options.PyTreeOptions.Saving(nonsense=1)",
        "options.AtomicityOptions(nonsense=1)",
        "options.DeletionOptions(nonsense=1)",
        "handlers.PyTreeHandler(nonsense=1)",
        "save_async(root, TREE, nonsense=1)",
    ],
}


def test_unknown_words_are_type_errors(tmp_path: Path) -> None:
    """A word that Orbax does not know is one here too; those that it knows are taken."""

    def program(ocp: Any, root: Path) -> Any:
        calls = UNKNOWN["v1" if hasattr(ocp, "Context") else "v0"]
        where = {"ocp": ocp, "TREE": TREE, "root": root}
        return [outcome(lambda call=call: eval(f"ocp.{call}", where)) for call in calls]

    (tmp_path / "v0").mkdir()
    (tmp_path / "v1").mkdir()
    found = run_both(program, tmp_path / "v0"), run_both(program, tmp_path / "v1", v1=True)
    assert {each for results in found for each in results} == {"TypeError"}
    ours.StandardCheckpointer(use_ocdbt=True, file_options=ours.options.FileOptions())
    ours.AsyncCheckpointer(ours.StandardCheckpointHandler(), 300)


def test_a_logger_is_refused(tmp_path: Path) -> None:
    """It would never be told anything."""
    with pytest.raises(NotImplementedError, match=r"logger=.*statistics"):
        ours.CheckpointManager(tmp_path, logger=object())
    with pytest.raises(NotImplementedError, match=r"logger=.*statistics"):
        ours_v1.training.Checkpointer(tmp_path, logger=object())


def test_metadata_of_an_item(tmp_path: Path) -> None:
    """It is kept with the step, apart from that of the step."""

    def program(ocp: Any, root: Path) -> Any:
        args = ocp.args
        save = args.StandardSave(TREE, custom_metadata={"a": 1})
        with ocp.CheckpointManager(root / "several") as manager:
            items = args.Composite(one=save, two=args.StandardSave(TREE))
            manager.save(0, args=items, custom_metadata={"step": 0})
            manager.wait_until_finished()
            found = [
                {name: each.custom_metadata for name, each in manager.item_metadata(0).items()},
                dict(manager.metadata(0).custom_metadata),
            ]
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            given = args.PyTreeSave(TREE, custom_metadata={"z": 2})
            checkpointer.save(root / "folder", args=given)
            known = checkpointer.metadata(root / "folder")
            return [*found, known.item_metadata.custom_metadata, dict(known.custom_metadata)]

    run_both(program, tmp_path)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({}, {"step_prefix": "ck"}),
        ({"step_prefix": "ck"}, {"step_format_fixed_length": 4}),
        ({"step_prefix": "ck"}, {"step_prefix": "other"}),
    ],
)
def test_other_names_of_steps_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, first: Any, then: Any
) -> None:
    """A root that calls its steps otherwise opens: it keeps its names, and a warning says so, where
    Orbax sees no steps and begins anew.
    """

    def program(ocp: Any, root: Path) -> Any:
        for step, options in enumerate((first, then)):
            made = ocp.CheckpointManagerOptions(**options)
            with ocp.CheckpointManager(root, options=made) as manager:
                manager.save(step, args=ocp.args.StandardSave(TREE))
                manager.wait_until_finished()
                found = list(manager.all_steps())
        return found

    (tmp_path / "orbax").mkdir()
    assert program(real, tmp_path / "orbax") == [1]
    (tmp_path / "holdfast").mkdir()
    assert program(ours, tmp_path / "holdfast") == [0, 1]
    assert "calls its step 7" in caplog.text and "Take another folder to begin anew" in caplog.text


RESTORES = """
import sys
from holdfast.compat import orbax as ocp
manager = ocp.CheckpointManager(sys.argv[1])
print(sorted(manager.restore(0)))
"""


def test_a_program_that_only_restores_leaves_nothing(tmp_path: Path) -> None:
    """Nor does it close its manager."""
    with ours.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ours.args.StandardSave(TREE))
    command = [sys.executable, "-c", RESTORES, str(tmp_path)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)
    assert ran.returncode == 0 and ran.stdout == "['w']\n", ran.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_options_hold_for_the_whole_block(tmp_path: Path) -> None:
    """Those of a context that is active cannot be set; before and afterwards they can."""

    def program(ocp: Any, root: Path) -> Any:
        context = ocp.Context()
        context.async_options.timeout_secs = 77
        inherited: list[Any] = []

        def inside(change: Callable[[], Any]) -> Any:
            with context:
                inherited.append(ocp.Context(context))
                try:
                    return change()
                except RuntimeError:
                    return "RuntimeError"

        def set_to(options: Any, name: str, value: Any) -> Callable[[], None]:
            return lambda: setattr(options, name, value)

        found = [
            inside(set_to(context.array.saving, "use_ocdbt", False)),
            inside(set_to(context.array.saving.storage_options, "dtype", np.float16)),
            inside(set_to(context.asynchronous, "timeout_secs", 5)),
            inside(set_to(context.pytree.loading, "partial_load", True)),
            inside(set_to(context, "checkpoint_layout", ocp.options.CheckpointLayout.SAFETENSORS)),
        ]
        context.pytree.loading.partial_load = True
        inherited[0].asynchronous.timeout_secs = 3
        return [
            *found,
            context.asynchronous.timeout_secs,
            context.pytree_options.loading.partial_load,
            inherited[0].async_options.timeout_secs,
        ]

    assert run_both(program, tmp_path, v1=True)[:5] == ["RuntimeError"] * 5


def test_intervals_and_times_of_policies() -> None:
    """An interval of 0 is a ValueError, of the first call at the latest; a time without a zone is
    local.
    """
    now = datetime.now()
    infos = [
        types.SimpleNamespace(step=step, metrics=None, time=now - timedelta(hours=hours))
        for step, hours in ((1, 3), (2, 0))
    ]
    for ocp in (real, ours):
        module = ocp.checkpoint_managers
        for name in ("EveryNSteps", "EveryNStepsClosest"):
            with pytest.raises(ValueError, match="interval_steps"):
                getattr(module, name)(0).should_preserve(infos, context=None)
    with pytest.raises(ValueError, match="FixedIntervalPolicy: interval is 0"):
        ours.checkpoint_managers.FixedIntervalPolicy(0)
    newest = ours.checkpoint_managers.LatestDuration(timedelta(hours=1))
    assert newest.should_preserve(infos, context=None) == [False, True]


def test_what_guides_and_old_programs_use(tmp_path: Path) -> None:
    """A module of jax's that Orbax brings along, one array for all devices, what handlers of leaves
    are told, the class of temporary folders.
    """

    def program(ocp: Any, root: Path) -> Any:
        replicate = ocp.utils.fully_replicated_host_local_array_to_global_array
        everywhere = jax.sharding.NamedSharding(
            jax.sharding.Mesh(np.array(jax.devices()), "x"), jax.sharding.PartitionSpec()
        )
        info = ocp.type_handlers.ParamInfo(name="a.b", parent_dir=root, ts_context=3)
        handler = ocp.path.atomicity.CommitFileTemporaryPath
        options = ocp.CheckpointManagerOptions(temporary_path_class=handler)
        return [
            jax.experimental.array_serialization.__name__,
            replicate(jax.device_put(jnp.arange(4.0), everywhere)),
            [info.name, info.path.name, info.value_typestr, info.keypath, info.use_zarr3],
            options.temporary_path_class is handler,
        ]

    run_both(program, tmp_path)


def test_json_has_keys_of_text(tmp_path: Path) -> None:
    """Keys that json.dumps writes as text are text here too, of JSON items and of metadata."""
    value = {1: "int", 2.5: "float", None: ["none", {True: "bool"}]}

    def program(ocp: Any, root: Path) -> Any:
        v1 = real_v1 if ocp is real else ours_v1
        v1.save(root / "v1", TREE, custom_metadata={"a": value})
        with ocp.CheckpointManager(root / "v0") as manager:
            manager.save(1, args=ocp.args.JsonSave(value), custom_metadata={"a": value})
            manager.wait_until_finished()
            about = [manager.metadata(1).custom_metadata, v1.metadata(root / "v1").custom_metadata]
            return manager.restore(1, args=ocp.args.JsonRestore()), about

    run_both(program, tmp_path)


def test_orbax_reads_no_old_values(tmp_path: Path) -> None:
    """Where a checkpoint of Orbax's is overwritten, its files are deleted: Orbax finds nothing
    there, where it found the old values.
    """
    real_v1.save(tmp_path / "v1", TREE)
    with real.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "v0", TREE)
        checkpointer.save(tmp_path / "sync", TREE)
    ours_v1.save(tmp_path / "v1", {"w": jnp.ones(2)}, overwrite=True)
    with ours.StandardCheckpointer() as checkpointer:
        with pytest.raises(ValueError, match="holds a checkpoint already"):
            checkpointer.save(tmp_path / "v0", {"w": jnp.ones(2)})
        checkpointer.save(tmp_path / "v0", {"w": jnp.ones(2)}, force=True)
    ours.PyTreeCheckpointer().save(tmp_path / "sync", {"w": jnp.ones(2)}, force=True)
    with pytest.raises(ValueError, match=r"or pass force=True$"):
        ours.PyTreeCheckpointer().save(tmp_path / "sync", {"w": jnp.ones(2)})
    for name in ("v1", "v0", "sync"):
        names = [path.name for path in (tmp_path / name).rglob("*")]
        assert not {"_METADATA", "_CHECKPOINT_METADATA", "d", "manifest.ocdbt"} & {*names}, names
        item = "state" if name == "v1" else "default"
        assert load(tmp_path / name, item=item)["w"].tolist() == [1, 1]
    with pytest.raises(ValueError, match="v1"):
        real_v1.load(tmp_path / "v1")


def test_a_step_is_an_array(tmp_path: Path) -> None:
    """As a train state has it: saved, asked about, and deleted; a root has no item_metadata."""

    def program(ocp: Any, root: Path) -> Any:
        v1 = real_v1 if ocp is real else ours_v1
        step = jnp.int32(3)
        with v1.training.Checkpointer(root / "v1") as checkpointer:
            checkpointer.save(step, TREE)
            steps = [about.step for about in checkpointer.checkpoints]
        options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["a"])
        with ocp.CheckpointManager(root / "v0", options=options) as manager:
            saved = manager.save(step, args=ocp.args.StandardSave(TREE), metrics={"a": 1.0})
            manager.wait_until_finished()
            found = [*manager.all_steps(), manager.metrics(step), *manager.item_metadata(step)]
            without_step = outcome(lambda: manager.item_metadata(None))
            manager.delete(step)
            return steps, saved, found, without_step, list(manager.all_steps())

    run_both(program, tmp_path)


def test_checkpointers_say_whether_a_save_waits(tmp_path: Path) -> None:
    """A manager whose checkpointers are all synchronous saves so; the longest time of theirs and of
    the options' bounds a save.
    """

    def program(ocp: Any, root: Path) -> Any:
        with ocp.CheckpointManager(root, ocp.PyTreeCheckpointer()) as manager:
            manager.save(1, {"w": np.zeros(1 << 20)})
            return manager.is_saving_in_progress(), list(manager.all_steps(read=True))

    run_both(program, tmp_path)
    handler = ours.PyTreeCheckpointHandler()
    background = ours.AsyncCheckpointer(handler, timeout_secs=7200)
    checkpointers = {"a": ours.PyTreeCheckpointer(), "b": background}
    with ours.CheckpointManager(tmp_path / "both", checkpointers) as manager:
        assert manager.native._options.save_timeout_s == 7200.0


def test_metrics_that_are_not_written_choose_the_best(tmp_path: Path) -> None:
    """With `prevent_write_metrics` a manager knows those of its own saves, and another none."""

    def program(ocp: Any, root: Path) -> Any:
        options = ocp.CheckpointManagerOptions(
            best_fn=lambda metrics: metrics["a"], max_to_keep=2, prevent_write_metrics=True
        )
        with ocp.CheckpointManager(root, options=options) as manager:
            for step, value in enumerate((3.0, 1.0, 2.0, 4.0)):
                manager.save(step, args=ocp.args.StandardSave(TREE), metrics={"a": value})
                manager.wait_until_finished()
            found = list(manager.all_steps()), manager.best_step()
        with ocp.CheckpointManager(root, options=options) as manager:
            return *found, manager.best_step()

    assert run_both(program, tmp_path) == ([0, 3], 3, None)


def test_single_folders_of_each_kind_are_read(tmp_path: Path) -> None:
    """A folder that a checkpointer of Orbax's has filled with JSON, or a random key."""
    key = jax.random.key(3)
    state = np.random.RandomState(3).get_state()
    kinds = {
        "JsonCheckpointHandler": (real.args.JsonSave({"a": 1}), "JsonRestore"),
        "JaxRandomKeyCheckpointHandler": (real.args.JaxRandomKeySave(key), "JaxRandomKeyRestore"),
        "NumpyRandomKeyCheckpointHandler": (
            real.args.NumpyRandomKeySave(state),
            "NumpyRandomKeyRestore",
        ),
    }
    for name, (args, restore) in kinds.items():
        real.Checkpointer(getattr(real, name)()).save(tmp_path / name, args=args)
        found, expected = (
            ocp.Checkpointer(getattr(ocp, name)()).restore(
                tmp_path / name, args=getattr(ocp.args, restore)()
            )
            for ocp in (ours, real)
        )
        assert_equal(found, expected)


def test_options_and_functions_that_are_wrong(tmp_path: Path) -> None:
    """Options that exclude each other, and a `best_fn` that raises: it is heard from `save`."""

    def program(ocp: Any, root: Path) -> Any:
        policy = ocp.checkpoint_managers.LatestN(2)
        both = ocp.CheckpointManagerOptions(max_to_keep=2, preservation_policy=policy)
        kept = outcome(lambda: ocp.CheckpointManager(root / "kept", options=both))
        gone = outcome(
            lambda: ocp.CheckpointManagerOptions(todelete_subdir="a", todelete_full_path="b")
        )
        options = ocp.CheckpointManagerOptions(best_fn=lambda each: each["b"], max_to_keep=1)
        manager = ocp.CheckpointManager(root / "best", options=options)
        saved = []
        for step in (1, 2):
            args = ocp.args.StandardSave(TREE)
            saved.append(outcome(lambda: manager.save(step, args=args, metrics={"a": 1.0})))  # noqa: B023
            manager.wait_until_finished()
        steps = list(manager.all_steps())
        outcome(manager.close)
        return kept, gone, saved, steps

    assert run_both(program, tmp_path)[2] == [True, "KeyError"]
