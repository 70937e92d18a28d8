"""Programs on Orbax's CheckpointManager: each runs on Orbax and on holdfast, with the same
results.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, namedtuple
from datetime import timedelta
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as real
import pytest
from flax import nnx

from holdfast.checkpoint import CheckpointManager as NativeManager
from holdfast.checkpoint import SaveFailed
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.compat import orbax as ours
from tests.support.orbax_programs import assert_equal, outcome, run_both

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")  # Orbax's own

Pair = namedtuple("Pair", "a b")


def state() -> dict[str, Any]:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), "d")
    params = {
        "w": jax.device_put(jnp.ones((2, 3)), jax.NamedSharding(mesh, jax.P("d"))),
        "b": np.arange(2.0),
    }
    return {
        "params": params,
        "opt": optax.adam(1e-3).init(params),
        "pair": Pair(1, 2.5),
        "list": [jnp.int8(1), (2, True)],
        "ordered": OrderedDict(z=1, a=jnp.ones(1, jnp.bfloat16)),
        "empty": {"d": {}, "l": [], "t": (), "n": None},
        "key": jax.random.key(3),
    }


def test_one_item_with_and_without_a_target(tmp_path: Path) -> None:
    """Without a target: dicts and lists, jax and numpy arrays as saved; with one, its classes; the
    latest step for None.
    """

    def program(ocp: Any, root: Path) -> Any:
        with ocp.CheckpointManager(root) as manager:
            saved = manager.save(3, args=ocp.args.StandardSave(state()))
            manager.wait_until_finished()
            like = jax.tree.map(
                lambda leaf: (
                    jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
                    if isinstance(leaf, jax.Array)
                    else leaf
                ),
                state(),
            )
            restored = manager.restore(None, args=ocp.args.StandardRestore(like))
            assert isinstance(restored["opt"][0], optax.ScaleByAdamState)
            raw = [manager.restore(3), manager.restore(3, args=ocp.args.StandardRestore())]
            return (
                saved,
                raw,
                restored,
                manager.all_steps(),
                manager.latest_step(),
                manager.metrics(3),
            )

    run_both(program, tmp_path)


def test_several_items(tmp_path: Path) -> None:
    """Composite in and out: trees, JSON, arrays and random keys, all or some."""

    def program(ocp: Any, root: Path) -> Any:
        np_state = np.random.RandomState(1).get_state()
        with ocp.CheckpointManager(
            root, item_names=("state", "meta", "array", "key", "np_key")
        ) as manager:
            items = ocp.args.Composite(
                state=ocp.args.PyTreeSave({"w": jnp.ones(2), "n": 3}),
                meta=ocp.args.JsonSave({"a": [1, None, "x"]}),
                array=ocp.args.ArraySave(jnp.arange(3)),
                key=ocp.args.JaxRandomKeySave(jax.random.key(5)),
                np_key=ocp.args.NumpyRandomKeySave(np_state),
            )
            manager.save(0, args=items, custom_metadata={"run": "a"})
            manager.wait_until_finished()
            some = manager.restore(
                0,
                args=ocp.args.Composite(
                    meta=ocp.args.JsonRestore(), state=ocp.args.PyTreeRestore()
                ),
            )
            keys = manager.restore(
                0,
                args=ocp.args.Composite(
                    key=ocp.args.JaxRandomKeyRestore(), np_key=ocp.args.NumpyRandomKeyRestore()
                ),
            )
            assert some.meta == some["meta"] and "state" in some
            named = manager.restore(0, args=ocp.args.Composite(array=ocp.args.ArrayRestore()))
            array = manager.restore(0)["array"]
            np_key = [keys["np_key"][0], keys["np_key"][1].tolist(), *keys["np_key"][2:]]
            return (
                dict(some.items()),
                keys["key"],
                np_key,
                dict(named.items()),
                array,
                manager.metadata(0).custom_metadata,
            )

    run_both(program, tmp_path)


def test_what_is_known_without_reading(tmp_path: Path) -> None:
    """item_metadata has shapes, dtypes and numbers' types, by mapping and attribute; it is a
    target, and makes restore arguments.
    """

    def program(ocp: Any, root: Path) -> Any:
        tree = {"w": jnp.ones((4, 2)), "n": 3, "b": np.zeros(2, np.int16)}
        with ocp.CheckpointManager(root) as manager:
            manager.save(1, args=ocp.args.StandardSave(tree))
            manager.wait_until_finished()
        with ocp.CheckpointManager(root, item_handlers=ocp.StandardCheckpointHandler()) as manager:
            about = manager.item_metadata(1)
            target = jax.tree.map(ocp.utils.to_shape_dtype_struct, about.tree)
            shapes = {
                key: (getattr(leaf, "shape", None), getattr(leaf, "dtype", None))
                for key, leaf in target.items()
            }
            restored = manager.restore(1, args=ocp.args.StandardRestore(target))
            assert manager.metadata(1).commit_timestamp_nsecs > 10**18
            return shapes, about["w"].shape, set(about.keys()), restored["w"], restored["n"]

    run_both(program, tmp_path)


def test_when_a_step_is_saved(tmp_path: Path) -> None:
    """Intervals, named steps, functions and policies choose the same steps; an older step is not
    saved, an existing one is an error.
    """
    every = range(12)

    def program(ocp: Any, root: Path) -> Any:
        policies = ocp.checkpoint_managers.save_decision_policy
        options = {
            "interval": ocp.CheckpointManagerOptions(save_interval_steps=4),
            "named": ocp.CheckpointManagerOptions(save_interval_steps=100, save_on_steps={3, 5}),
            "function": ocp.CheckpointManagerOptions(
                should_save_fn=lambda step, last: last is None or step - last >= 5
            ),
            "policy": ocp.CheckpointManagerOptions(
                save_decision_policy=policies.AnySavePolicy(
                    [policies.FixedIntervalPolicy(6), policies.SpecificStepsPolicy([7])]
                )
            ),
            "sync": ocp.CheckpointManagerOptions(enable_async_checkpointing=False),
        }
        found = {}
        for name, chosen in options.items():
            with ocp.CheckpointManager(root / name, options=chosen) as manager:
                steps = []
                for step in every:
                    wanted = manager.should_save(step)
                    assert manager.save(step, args=ocp.args.StandardSave({"x": step})) == wanted
                    steps += [step] if wanted else []
                older = manager.save(2, args=ocp.args.StandardSave({"x": 0}))
                latest = manager.latest_step()  # its save may be in flight: it counts
                forced = outcome(
                    lambda manager=manager, latest=latest: manager.save(
                        latest, args=ocp.args.StandardSave({"x": 0}), force=True
                    )
                )
                manager.wait_until_finished()
                found[name] = steps, older, forced, list(manager.all_steps())
        return found

    assert run_both(program, tmp_path)["interval"][0] == [0, 4, 8]


def test_a_decision_to_save_lists_nothing(tmp_path: Path) -> None:
    """What another manager has saved counts for a decision from `reload` on."""

    def program(ocp: Any, root: Path) -> Any:
        with ocp.CheckpointManager(root) as manager:
            with ocp.CheckpointManager(root) as other:
                other.save(5, args=ocp.args.StandardSave({"x": 5}))
            before = manager.should_save(3)
            manager.reload()
            return before, manager.should_save(3), manager.should_save(6), list(manager.all_steps())

    assert run_both(program, tmp_path) == (True, False, True, [5])


def test_which_steps_stay(tmp_path: Path) -> None:
    """Retention keeps the same steps by recency, period, metrics and policies (the newest is saved
    last and is among the best).
    """

    def program(ocp: Any, root: Path) -> Any:
        keep = ocp.checkpoint_managers.preservation_policy
        best: Any = {"best_fn": lambda metrics: metrics["loss"], "best_mode": "min"}
        options = {
            "latest": ocp.CheckpointManagerOptions(max_to_keep=2),
            "period": ocp.CheckpointManagerOptions(max_to_keep=1, keep_period=4),
            "best": ocp.CheckpointManagerOptions(max_to_keep=2, **best),
            "all": ocp.CheckpointManagerOptions(),
            "policy": ocp.CheckpointManagerOptions(
                preservation_policy=keep.AnyPreservationPolicy(
                    [keep.LatestN(1), keep.CustomSteps([2, 3]), keep.EveryNSteps(5, False)]
                )
            ),
            "seconds": ocp.CheckpointManagerOptions(
                max_to_keep=1, keep_time_interval=timedelta(hours=1)
            ),
            "duration": ocp.CheckpointManagerOptions(
                preservation_policy=keep.LatestDuration(timedelta(hours=1))
            ),
            "closest": ocp.CheckpointManagerOptions(preservation_policy=keep.EveryNStepsClosest(4)),
        }
        found = {}
        for name, chosen in options.items():
            with ocp.CheckpointManager(root / name, options=chosen) as manager:
                for step in range(9):
                    metrics = {"loss": abs(step - 7.5)}
                    manager.save(step, args=ocp.args.StandardSave({"x": step}), metrics=metrics)
                    manager.wait_until_finished()
                found[name] = list(manager.all_steps()), manager.best_step(), manager.metrics(8)
            with ocp.CheckpointManager(root / name, options=chosen) as manager:
                found[f"{name}, opened again"] = (
                    list(manager.all_steps()),
                    manager.best_step(),
                    manager.metrics(8),
                )
        return found

    assert run_both(program, tmp_path)["best"] == ([7, 8], 8, {"loss": 0.5})


def test_what_does_not_fit_is_a_valueerror(tmp_path: Path) -> None:
    """Missing steps and items, other trees and shapes raise what callers of Orbax's catch."""

    def program(ocp: Any, root: Path) -> Any:
        with ocp.CheckpointManager(root / "one") as manager:
            nothing = outcome(lambda: manager.restore(None))
            manager.save(1, args=ocp.args.StandardSave({"w": jnp.ones(2)}))
            manager.wait_until_finished()

            def restore(target: Any) -> Any:
                return outcome(lambda: manager.restore(1, args=ocp.args.StandardRestore(target)))

            targets = (
                restore({"x": jnp.ones(2)}),
                restore({"w": jnp.ones(3)}),
                restore({"w": jnp.ones(2, jnp.bfloat16)}),
            )
            rest = (
                outcome(lambda: manager.restore(7)),
                outcome(lambda: manager.delete(9)),
                outcome(lambda: manager.save(2)),
            )
        with ocp.CheckpointManager(root / "several") as manager:
            manager.save(1, args=ocp.args.Composite(state=ocp.args.StandardSave({"w": 1})))
            manager.wait_until_finished()
            rest += (
                outcome(
                    lambda: manager.restore(
                        1, args=ocp.args.Composite(no=ocp.args.StandardRestore())
                    )
                ),
            )
            rest += (outcome(lambda: manager.save(2, args=ocp.args.StandardSave({"w": 1}))),)
        return nothing, targets, rest

    found = run_both(program, tmp_path)
    assert found[0] == "FileNotFoundError" and found[1][:2] == ("ValueError", "ValueError")


def test_a_partial_restore_and_restore_arguments(tmp_path: Path) -> None:
    """PyTreeRestore: dtypes and types by leaf, parts of a tree, placeholders; SaveArgs cast."""

    def program(ocp: Any, root: Path) -> Any:
        tree = {"w": jnp.arange(4.0), "opt": {"mu": jnp.ones(2), "count": 3}}
        handler = {"item_handlers": ocp.PyTreeCheckpointHandler()}
        with ocp.CheckpointManager(root, **handler) as manager:
            casts = jax.tree.map(lambda _: ocp.SaveArgs(), tree)
            casts["w"] = ocp.SaveArgs(dtype=jnp.dtype("bfloat16"))
            manager.save(1, args=ocp.args.PyTreeSave(tree, save_args=casts))
            manager.wait_until_finished()
            restore = lambda **options: manager.restore(1, args=ocp.args.PyTreeRestore(**options))  # noqa: E731
            args = ocp.checkpoint_utils.construct_restore_args(tree)
            args["opt"]["mu"] = ocp.RestoreArgs(restore_type=np.ndarray, dtype=np.float16)
            only_w = {"w": tree["w"]}
            partial = restore(
                item=only_w,
                restore_args=ocp.checkpoint_utils.construct_restore_args(only_w),
                partial_restore=True,
            )
            placeholder = restore(item=tree | {"w": ocp.PLACEHOLDER}, restore_args=args)
            assert placeholder.pop("w") is ...
            return restore(), restore(item=tree, restore_args=args), partial, placeholder

    run_both(program, tmp_path)


def test_flax_nnx_with_optax_trains_on(tmp_path: Path) -> None:
    """An NNX model and its optimiser: two steps, saved, restored into a fresh model's abstract
    state, two more steps.
    """

    def program(ocp: Any, root: Path) -> Any:
        def made(seed: int) -> Any:
            model = nnx.Linear(3, 2, rngs=nnx.Rngs(seed))
            return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

        def train(model: Any, optimizer: Any) -> None:
            for _ in range(2):
                optimizer.update(
                    model, nnx.grad(lambda model: (model(jnp.ones((4, 3))) ** 2).mean())(model)
                )

        model, optimizer = made(0)
        train(model, optimizer)
        with ocp.CheckpointManager(
            root, options=ocp.CheckpointManagerOptions(max_to_keep=1)
        ) as manager:
            manager.save(
                2,
                args=ocp.args.Composite(
                    model=ocp.args.StandardSave(nnx.state(model)),
                    opt=ocp.args.StandardSave(nnx.state(optimizer)),
                ),
            )
            manager.wait_until_finished()
            other, other_optimizer = made(1)
            like = lambda node: jax.tree.map(ocp.utils.to_shape_dtype_struct, nnx.state(node))  # noqa: E731
            targets = ocp.args.Composite(
                model=ocp.args.StandardRestore(like(other)),
                opt=ocp.args.StandardRestore(like(other_optimizer)),
            )
            restored = manager.restore(2, args=targets)
        nnx.update(other, restored["model"])
        nnx.update(other_optimizer, restored["opt"])
        train(other, other_optimizer)
        train(model, optimizer)
        assert_equal(nnx.to_pure_dict(nnx.state(other)), nnx.to_pure_dict(nnx.state(model)))
        return nnx.to_pure_dict(nnx.state(other))

    run_both(program, tmp_path)


def test_equinox_trains_on(tmp_path: Path) -> None:
    """The arrays of an Equinox model come back into another one of the same architecture."""

    def program(ocp: Any, root: Path) -> Any:
        model, other = (eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(seed)) for seed in (0, 1))
        with ocp.CheckpointManager(root) as manager:
            manager.save(0, args=ocp.args.StandardSave(eqx.filter(model, eqx.is_array)))
            manager.wait_until_finished()
            arrays, static = eqx.partition(other, eqx.is_array)
            restored = eqx.combine(
                manager.restore(0, args=ocp.args.StandardRestore(arrays)), static
            )
        return restored(jnp.ones(2)), jax.tree.leaves(eqx.filter(restored, eqx.is_array))

    run_both(program, tmp_path)


def test_roots_of_orbax_are_read_and_continued(tmp_path: Path) -> None:
    """What Orbax saved restores here, with its metrics; the next step is ours, beside it, and
    native code reads it.
    """
    options = {"best_fn": lambda metrics: metrics["loss"], "best_mode": "min"}
    with real.CheckpointManager(
        tmp_path, options=real.CheckpointManagerOptions(**options)
    ) as manager:
        manager.save(1, args=real.args.StandardSave(state()), metrics={"loss": 2.0})
        manager.wait_until_finished()
        expected = manager.restore(1)
    with ours.CheckpointManager(
        tmp_path, options=ours.CheckpointManagerOptions(**options)
    ) as manager:
        assert_equal(manager.restore(None), expected)
        assert (
            manager.metrics(1) == {"loss": 2.0}
            and manager.best_step() == 1
            and not manager.should_save(1)
        )
        assert manager.save(
            2, args=ours.args.StandardSave({"w": jnp.ones(2)}), metrics={"loss": 3.0}
        )
        manager.wait_until_finished()
        assert list(manager.all_steps()) == [1, 2] and manager.best_step() == 1
    with NativeManager(tmp_path) as native:
        assert native.restore(2, item="default")["w"].tolist() == [1, 1] and native.metrics(2) == {
            "loss": 3.0
        }


def test_the_newest_step_stays_though_not_best(tmp_path: Path) -> None:
    """Unlike with Orbax: a job can always go on from its last step."""
    options = ours.CheckpointManagerOptions(max_to_keep=1, best_fn=lambda metrics: metrics["loss"])
    with ours.CheckpointManager(tmp_path, options=options) as manager:
        for step, loss in ((1, 2.0), (2, 1.0)):
            manager.save(step, args=ours.args.StandardSave({"x": 1}), metrics={"loss": loss})
        manager.wait_until_finished()
        assert list(manager.all_steps()) == [1, 2] and manager.best_step() == 1


def test_what_is_not_covered_says_what_to_do(tmp_path: Path) -> None:
    """Each refusal names the call, what is nearest, and the page."""
    trash = ours.CheckpointManagerOptions(todelete_full_path="trash", max_to_keep=1)
    refused = {
        r"todelete_full_path='trash'": lambda: ours.CheckpointManager(tmp_path, options=trash),
        r"legacy_transform_fn=.*rename=": lambda: ours.args.PyTreeRestore(legacy_transform_fn=dict),
        r"orbax.checkpoint.CompositeOptions .*register_with_handler": lambda: (
            ours.CompositeOptions()
        ),
    }
    for message, call in refused.items():
        with pytest.raises(NotImplementedError, match=rf"{message}.*docs/from-orbax\.md"):
            call()
    with ours.CheckpointManager(
        tmp_path, options=ours.CheckpointManagerOptions(best_fn=lambda _: 0.0)
    ) as manager:
        with pytest.raises(NotImplementedError, match="flat dict of numbers"):
            manager.save(1, args=ours.args.StandardSave({"x": 1}), metrics={"text": "x"})

        class MyArgs(ours.args.CheckpointArgs):  # type: ignore[misc, name-defined]
            pass

        with pytest.raises(ValueError, match=r"MyArgs.*StandardSave.*register_with_handler"):
            manager.save(1, args=MyArgs())
        assert manager.all_steps() == [] and manager.latest_step() is None


def test_a_step_committed_during_the_listing_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that is in flight when the folder is looked at, and is not a moment later, is in none
    of two gaps.
    """
    committing = threading.Event()
    commit = LocalStorage.commit

    def held(storage: LocalStorage, *given: Any, **more: Any) -> None:
        assert committing.wait(60)
        commit(storage, *given, **more)

    monkeypatch.setattr(LocalStorage, "commit", held)
    with ours.CheckpointManager(tmp_path) as manager:
        listing = manager.native.all_steps

        def slow() -> list[int]:
            found = listing()
            committing.set()
            manager.wait_until_finished()
            return found

        manager.save(1, args=ours.args.StandardSave({"x": 1}))
        monkeypatch.setattr(manager.native, "all_steps", slow)
        assert manager.all_steps() == [1]


def test_steps_are_called_alike(tmp_path: Path) -> None:
    """Prefix and fixed length name the same folders; what goes on in a root of Orbax's keeps the
    names that it has.
    """

    def program(ocp: Any, root: Path) -> Any:
        options = ocp.CheckpointManagerOptions(step_prefix="ckpt", step_format_fixed_length=6)
        with ocp.CheckpointManager(root, options=options) as manager:
            for step in (3, 12):
                manager.save(step, args=ocp.args.StandardSave({"x": step}))
            manager.wait_until_finished()
            return sorted(path.name for path in root.iterdir() if path.name != ".holdfast"), list(
                manager.all_steps()
            )

    assert run_both(program, tmp_path)[0] == ["ckpt_000003", "ckpt_000012"]
    program(real, tmp_path / "more")
    options = ours.CheckpointManagerOptions(step_prefix="ckpt", step_format_fixed_length=6)
    with ours.CheckpointManager(tmp_path / "more", options=options) as manager:
        manager.save(20, args=ours.args.StandardSave({"x": 20}))
        manager.wait_until_finished()
        assert (
            manager.all_steps() == [3, 12, 20]
            and manager.restore(12)["x"] == 12
            and manager.restore(20)["x"] == 20
        )
        assert (tmp_path / "more" / "ckpt_000020").is_dir()


def _refused(*given: Any, **more: Any) -> None:
    raise PermissionError("not here")


def test_a_manager_goes_on_after_a_save_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its step counts for decisions, since not all processes have heard of the failure, until
    `reload`, which keeps the error for later.
    """
    policy = ours.checkpoint_managers.save_decision_policy.InitialSavePolicy()
    options = ours.CheckpointManagerOptions(save_decision_policy=policy)
    args = ours.args.StandardSave({"x": jnp.ones(2)})
    with ours.CheckpointManager(tmp_path, options=options) as manager:
        with monkeypatch.context() as patched:
            patched.setattr(LocalStorage, "write", _refused)
            assert manager.save(1, args=args)
            assert not manager.should_save(2)
            while manager.is_saving_in_progress():
                pass
        assert not manager.should_save(2) and manager.all_steps() == []
        manager.reload()
        with pytest.raises(SaveFailed, match="not here"):
            manager.check_for_errors()
        assert manager.save(2, args=args)
        manager.wait_until_finished()
        assert manager.all_steps() == [2]


def test_metrics_stay_beside_a_policy_that_asks_for_none(tmp_path: Path) -> None:
    """`best_fn` is asked for the best step, whatever says which ones stay."""

    def program(ocp: Any, root: Path) -> Any:
        keep = ocp.checkpoint_managers.preservation_policy
        options = ocp.CheckpointManagerOptions(
            best_fn=lambda metrics: metrics["loss"],
            best_mode="min",
            preservation_policy=keep.LatestN(3),
        )
        found = []
        for _ in range(2):
            with ocp.CheckpointManager(root, options=options) as manager:
                for step, loss in ((1, 2.0), (2, 1.0), (3, 3.0)):
                    item = ocp.args.StandardSave({"x": step})
                    manager.save(step, args=item, metrics={"loss": loss})
                manager.wait_until_finished()
                found.append((manager.best_step(), manager.metrics(2)))
        return found

    assert run_both(program, tmp_path) == [(2, {"loss": 1.0})] * 2


def test_a_step_that_is_not_wanted_is_not_prepared(tmp_path: Path) -> None:
    """Neither its items nor its metrics are looked at, in a manager that only reads too."""

    def program(ocp: Any, root: Path) -> Any:
        options = ocp.CheckpointManagerOptions(
            save_interval_steps=10, best_fn=lambda metrics: metrics["loss"]
        )
        reader = ocp.CheckpointManagerOptions(read_only=True)
        bad = {"args": ocp.args.StandardSave(None), "metrics": {"loss": object()}}
        with ocp.CheckpointManager(root, options=options) as manager:
            manager.save(0, args=ocp.args.StandardSave({"x": 1}), metrics={"loss": 1.0})
            found = [manager.save(step, **bad) for step in (0, 1)]
            manager.wait_until_finished()
        with ocp.CheckpointManager(root, options=reader) as manager:
            return [*found, manager.save(20, **bad)]

    assert run_both(program, tmp_path) == [False] * 3


def test_metrics_of_a_step_that_is_not_there(tmp_path: Path) -> None:
    """They are None, of the one that was saved last too."""

    def program(ocp: Any, root: Path) -> Any:
        options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
        with ocp.CheckpointManager(root, options=options) as manager:
            manager.save(1, args=ocp.args.StandardSave({"x": 1}), metrics={"loss": 1.0})
            manager.wait_until_finished()
            before = manager.metrics(1), manager.metrics(7)
            manager.delete(1)
            return before, manager.metrics(1), manager.best_step(), manager.should_save(1)

    assert run_both(program, tmp_path) == (({"loss": 1.0}, None), None, None, True)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_decision_by_the_time_reads_the_newest_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    """Each training step asks. Where its record is damaged the time counts from the question on."""
    args = ours.args.StandardSave({"x": 1})
    with ours.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=args)
    if damaged:
        (tmp_path / "1" / "checkpoint.json").write_text("{")
    policies = ours.checkpoint_managers.save_decision_policy
    policy = policies.ContinuousCheckpointingPolicy(minimum_interval_secs=3600)
    options = ours.CheckpointManagerOptions(save_decision_policy=policy)
    read: list[int] = []
    with ours.CheckpointManager(tmp_path, options=options) as manager:
        structure = manager.native.structure

        def counted(step: int) -> Any:
            read.append(step)
            return structure(step)

        monkeypatch.setattr(manager.native, "structure", counted)
        assert [manager.save(step, args=args) for step in (2, 3, 4)] == [False] * 3
    assert read == [1]


def test_a_save_that_tells_of_an_earlier_one_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its step counts for decisions, as on the processes that have not heard of the failure. One
    that is refused does not.
    """
    args = ours.args.StandardSave({"x": jnp.ones(2)})
    with ours.CheckpointManager(tmp_path) as manager:
        with pytest.raises(ValueError, match="object"):
            manager.save(1, args=ours.args.StandardSave({"x": object()}))
        assert manager.should_save(1)
        with monkeypatch.context() as patched:
            patched.setattr(LocalStorage, "write", _refused)
            assert manager.save(1, args=args)
            while manager.is_saving_in_progress():
                pass
        with pytest.raises(SaveFailed, match="not here"):
            manager.save(2, args=args)
        assert manager.steps_to_decide_by() == [2] and not manager.should_save(2)
        manager.wait_until_finished()
        assert manager.all_steps() == [2]
