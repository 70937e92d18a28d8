"""Programs of the shape of Orbax's guides, cell by cell: the same on Orbax and on holdfast."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.support.orbax_programs import outcome, run_both

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Sharding info not provided"),  # Orbax's own
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    # A load of Orbax's that fails leaves coroutines behind.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

Cells = dict[str, Callable[[], Any]]
Mesh = jax.sharding.Mesh
NamedSharding = jax.sharding.NamedSharding
Spec = jax.sharding.PartitionSpec


def _run(cells: Cells) -> dict[str, Any]:
    """Runs cells in order; a cell that raises a built-in error has its name for a result."""
    return {name: outcome(cell) for name, cell in cells.items()}


def _mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:4]), "x")


def _on(mesh: Mesh, *spec: Any) -> NamedSharding:
    return NamedSharding(mesh, Spec(*spec))


def _state(sharding: Any) -> dict[str, Any]:
    return {
        "params": {
            "kernel": jax.device_put(jnp.arange(32.0).reshape(8, 4), sharding),
            "bias": jax.device_put(jnp.ones(8, jnp.bfloat16), sharding),
        },
        "counts": [jax.device_put(jnp.arange(8), sharding), np.arange(3, dtype=np.int16)],
        "step": 7,
        "rate": 0.25,
    }


def test_trees_in_folders(tmp_path: Path) -> None:
    """As the guide to trees: with and without a target, in another sharding or dtype, as numpy,
    with arguments for each leaf.
    """
    rows = _on(_mesh(), "x")
    everywhere = _on(_mesh())
    arrays = {"a": jax.device_put(jnp.arange(8.0), rows), "b": np.arange(4), "n": 3, "f": 2.5}

    def program(ocp: Any, root: Path) -> Any:
        checkpointer = ocp.StandardCheckpointer()
        plain = ocp.PyTreeCheckpointer()
        on_devices = jax.tree.map(jnp.asarray, arrays)

        def save() -> None:
            checkpointer.save(root / "state", _state(rows))
            checkpointer.save(root / "arrays", arrays)
            checkpointer.wait_until_finished()

        def save_forced() -> Any:
            checkpointer.save(root / "state", _state(everywhere), force=True)
            checkpointer.wait_until_finished()
            return checkpointer.restore(root / "state")

        def described() -> Any:
            found = checkpointer.metadata(root / "arrays").item_metadata
            return {
                name: (leaf.shape, np.dtype(leaf.dtype).name)
                for name, leaf in found.tree.items()
                if name in ("a", "b")
            }

        def abstract(sharding: Any, dtype: Any = None) -> Any:
            return jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(
                    leaf.shape, dtype or leaf.dtype, sharding=sharding
                ),
                {"a": on_devices["a"]},
            )

        def by_args(target: Any, how: Any) -> Any:
            return plain.restore(root / "arrays", item=target, restore_args=how)

        everything = {name: ocp.RestoreArgs() for name in arrays}
        as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in arrays}
        as_halves = everything | {
            "a": ocp.ArrayRestoreArgs(sharding=everywhere, dtype=jnp.bfloat16)
        }
        as_ints = everything | {
            "f": ocp.RestoreArgs(restore_type=float),
            "n": ocp.RestoreArgs(restore_type=int),
        }
        rest = {"b": np.zeros(4), "n": 0, "f": 0.0}
        return _run(
            {
                "save": save,
                "no target": lambda: checkpointer.restore(root / "state"),
                "like itself": lambda: checkpointer.restore(root / "state", _state(rows)),
                "like zeros": lambda: checkpointer.restore(
                    root / "state", jax.tree.map(lambda x: x * 0, _state(everywhere))
                ),
                "abstract": lambda: checkpointer.restore(
                    root / "arrays", {**abstract(rows), **rest}
                ),
                "resharded": lambda: checkpointer.restore(
                    root / "arrays", {**abstract(everywhere), **rest}
                ),
                "cast": lambda: checkpointer.restore(
                    root / "arrays", {**abstract(rows, jnp.bfloat16), **rest}
                ),
                "numpy cast": lambda: checkpointer.restore(
                    root / "arrays", {**arrays, "b": np.zeros(4, np.float32)}
                ),
                "numpy for an array": lambda: checkpointer.restore(
                    root / "arrays", {**arrays, "a": np.zeros(8, np.float32)}
                ),
                "an array for numpy": lambda: checkpointer.restore(
                    root / "arrays",
                    {**arrays, "b": jax.device_put(jnp.zeros(4, jnp.int32), everywhere)},
                ),
                "another shape": lambda: checkpointer.restore(
                    root / "arrays", {**arrays, "a": jax.device_put(jnp.zeros(4), rows)}
                ),
                "another tree": lambda: checkpointer.restore(root / "arrays", {"z": 1}),
                "a part": lambda: checkpointer.restore(root / "arrays", {"a": arrays["a"]}),
                "again": lambda: checkpointer.save(root / "arrays", arrays),
                "forced": save_forced,
                "nothing there": lambda: checkpointer.restore(root / "none"),
                "metadata": described,
                "plain": lambda: plain.restore(root / "arrays"),
                "plain like": lambda: plain.restore(root / "arrays", item=arrays),
                "as they were": lambda: by_args(arrays, everything),
                "as numpy": lambda: by_args(arrays, as_numpy),
                "as halves": lambda: by_args(arrays, as_halves),
                "as numbers": lambda: by_args(arrays, as_ints),
                "made arguments": lambda: by_args(
                    arrays, ocp.checkpoint_utils.construct_restore_args(arrays)
                ),
                "made of shardings": lambda: by_args(
                    {"a": arrays["a"], **rest},
                    ocp.checkpoint_utils.construct_restore_args(
                        arrays, {"a": everywhere, "b": None, "n": None, "f": None}
                    ),
                ),
                "arguments alone": lambda: plain.restore(root / "arrays", restore_args=as_numpy),
                "as a number": lambda: plain.save(root / "one", 5) or plain.restore(root / "one"),
                "cast at save": lambda: (
                    plain.save(
                        root / "cast",
                        on_devices,
                        save_args=jax.tree.map(
                            lambda _: ocp.SaveArgs(dtype=np.dtype(np.float16)), on_devices
                        ),
                    )
                    or plain.restore(root / "cast")
                ),
                "empty inside": lambda: (
                    plain.save(root / "inside", {"a": {}, "b": [], "c": None, "d": 1})
                    or plain.restore(root / "inside")
                ),
            }
        )

    run_both(program, tmp_path)


def test_containers(tmp_path: Path) -> None:
    """As the guide's trees of own classes: named tuples, dataclasses, tuples, None and keys that
    are numbers, with and without a target.
    """
    Point = collections.namedtuple("Point", ["x", "y"])

    @jax.tree_util.register_dataclass
    @dataclass
    class Pair:
        one: Any
        two: Any

    tree = {
        "point": Point(jnp.arange(3), np.full(2, 2.0)),
        "pair": Pair(jnp.ones(2), {"deep": [1, (2, 3.5)]}),
        "tuple": (jnp.zeros(1), None, 4),
        "numbers": {0: jnp.ones(1), 1: jnp.zeros(1)},
        "flags": [True, False],
    }

    def shown(found: Any) -> Any:
        leaves, treedef = jax.tree.flatten(found)
        return leaves, str(treedef)

    def program(ocp: Any, root: Path) -> Any:
        checkpointer = ocp.PyTreeCheckpointer()
        standard = ocp.StandardCheckpointer()
        return _run(
            {
                "save": lambda: checkpointer.save(root / "a", tree),
                "like": lambda: shown(checkpointer.restore(root / "a", item=tree)),
                "plain": lambda: shown(checkpointer.restore(root / "a")),
                "standard": lambda: shown(standard.restore(root / "a", tree)),
                "types": lambda: [
                    type(checkpointer.restore(root / "a", item=tree)[name]).__name__
                    for name in sorted(tree)
                ],
            }
        )

    run_both(program, tmp_path)


def test_a_manager_of_steps(tmp_path: Path) -> None:
    """As the guide to the manager: steps, intervals, the best, metadata, items, the end."""

    def program(ocp: Any, root: Path) -> Any:
        args = ocp.args
        rows = _on(_mesh(), "x")
        state = {"w": jax.device_put(jnp.arange(8.0), rows), "n": 1}
        make = ocp.CheckpointManager
        options = ocp.CheckpointManagerOptions
        kept: dict[str, Any] = {}

        def basic() -> Any:
            with make(root / "basic", options=options(max_to_keep=3, save_interval_steps=2)) as it:
                saved = [it.save(step, args=args.StandardSave(state)) for step in range(9)]
                it.wait_until_finished()
                kept["w"] = it.restore(it.latest_step(), args=args.StandardRestore(state))
                return saved, list(it.all_steps()), it.latest_step(), it.should_save(9)

        def best() -> Any:
            best = options(max_to_keep=2, best_fn=lambda metrics: metrics["loss"], best_mode="min")
            with make(root / "best", options=best) as it:
                for step, loss in enumerate([4.0, 1.0, 3.0, 2.0]):
                    it.save(step, metrics={"loss": loss}, args=args.StandardSave(state))
                it.wait_until_finished()
                return it.best_step(), list(it.all_steps()), it.metrics(1)

        def periods() -> Any:
            with make(root / "periods", options=options(max_to_keep=1, keep_period=3)) as it:
                for step in range(8):
                    it.save(step, args=args.StandardSave(state))
                it.wait_until_finished()
                return list(it.all_steps())

        def items() -> Any:
            with make(root / "items", item_names=("state", "extra", "data")) as it:
                it.save(
                    0,
                    args=args.Composite(
                        state=args.StandardSave(state), extra=args.JsonSave({"lr": [1, 2.5, None]})
                    ),
                )
                it.wait_until_finished()
                found = it.restore(
                    0,
                    args=args.Composite(
                        state=args.StandardRestore(state), extra=args.JsonRestore()
                    ),
                )
                everything = it.restore(0)
                some = it.restore(0, args=args.Composite(extra=args.JsonRestore()))
                about = it.item_metadata(0)
                return (
                    dict(found.items()),
                    sorted(name for name, value in everything.items() if value is not None),
                    dict(some.items()),
                    about["state"]["w"].shape,
                )

        def metadata() -> Any:
            with make(root / "meta", metadata={"model": "m", "v": 1}) as it:
                it.save(4, args=args.StandardSave(state), custom_metadata={"tokens": 12})
                it.wait_until_finished()
                step = it.metadata(4)
                return (
                    it.metadata().custom_metadata,
                    step.custom_metadata,
                    step.item_metadata["w"].shape,
                    step.init_timestamp_nsecs is not None,
                )

        def after() -> Any:
            with make(root / "basic") as it:
                deleted = it.delete(4)
                return deleted, list(it.all_steps()), outcome(lambda: it.restore(4))

        def others() -> Any:
            with make(root / "basic") as one, make(root / "basic") as two:
                one.save(20, args=args.StandardSave(state))
                one.wait_until_finished()
                two.reload()
                return two.latest_step(), outcome(
                    lambda: one.save(20, args=args.StandardSave(state), force=True)
                )

        def elsewhere() -> Any:
            with make(root / "other") as it:
                return (
                    it.latest_step(),
                    outcome(lambda: it.restore(None)),
                    it.restore(20, directory=root / "basic"),
                )

        def functions() -> Any:
            chosen = options(should_save_fn=lambda step, latest: step in (1, 4), max_to_keep=None)
            with make(root / "functions", options=chosen) as it:
                saved = [it.save(step, args=args.StandardSave(state)) for step in range(6)]
                it.wait_until_finished()
                return saved, list(it.all_steps())

        def steps() -> Any:
            chosen = options(save_on_steps={1, 5}, save_interval_steps=100)
            with make(root / "steps", options=chosen) as it:
                saved = [it.save(step, args=args.StandardSave(state)) for step in range(7)]
                it.wait_until_finished()
                return saved, list(it.all_steps())

        def names() -> Any:
            chosen = options(step_prefix="ckpt", step_format_fixed_length=5)
            with make(root / "names", options=chosen) as it:
                it.save(3, args=args.StandardSave(state))
                it.wait_until_finished()
                return sorted(
                    path.name for path in (root / "names").iterdir() if "ckpt" in path.name
                )

        def wrong() -> Any:
            with make(root / "wrong") as it:
                return [
                    outcome(lambda: it.save(0, args=args.StandardSave(None))),
                    outcome(lambda: it.save(0)),
                    outcome(lambda: it.save(0, args=state)),
                    outcome(lambda: it.restore(0)),
                    outcome(lambda: it.item_metadata(0)),
                    outcome(lambda: it.delete(0)),
                ]

        def sync() -> Any:
            chosen = options(enable_async_checkpointing=False)
            with make(root / "sync", options=chosen) as it:
                it.save(0, args=args.StandardSave(state))
                return it.is_saving_in_progress(), list(it.all_steps())

        def keys() -> Any:
            with make(root / "keys", item_names=("key", "keys", "numpy", "state")) as it:
                it.save(
                    0,
                    args=args.Composite(
                        key=args.JaxRandomKeySave(jax.random.PRNGKey(1)),
                        keys=args.JaxRandomKeySave(jax.random.split(jax.random.key(2), 3)),
                        numpy=args.NumpyRandomKeySave(np.random.RandomState(3).get_state()),
                        state=args.StandardSave({"rng": jax.random.key(4), "w": jnp.ones(2)}),
                    ),
                )
                it.wait_until_finished()
                found = it.restore(
                    0,
                    args=args.Composite(
                        key=args.JaxRandomKeyRestore(),
                        keys=args.JaxRandomKeyRestore(),
                        numpy=args.NumpyRandomKeyRestore(),
                        state=args.StandardRestore({"rng": jax.random.key(0), "w": jnp.zeros(2)}),
                    ),
                )
                again = it.restore(0, args=args.Composite(state=args.StandardRestore()))
                return dict(found.items()), dict(again.items())

        return _run(
            {
                "basic": basic,
                "best": best,
                "periods": periods,
                "items": items,
                "metadata": metadata,
                "after": after,
                "others": others,
                "elsewhere": elsewhere,
                "functions": functions,
                "steps": steps,
                "names": names,
                "wrong": wrong,
                "sync": sync,
                "keys": keys,
                "kept": lambda: kept,
            }
        )

    run_both(program, tmp_path)


def test_parts_and_transforms(tmp_path: Path) -> None:
    """As the guides to partial restores and transforms."""

    def program(ocp: Any, root: Path) -> Any:
        tree = {
            "params": {"a": jnp.arange(4.0), "b": jnp.arange(6).reshape(2, 3)},
            "opt": [jnp.ones(2), {"mu": jnp.zeros(3)}],
            "step": 5,
        }
        checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
        checkpointer.save(root / "t", args=ocp.args.PyTreeSave(tree))
        skip = ocp.PLACEHOLDER
        transform = ocp.Transform

        def restore(item: Any, **options: Any) -> Any:
            return checkpointer.restore(root / "t", args=ocp.args.PyTreeRestore(item, **options))

        def how(item: Any) -> Any:
            return ocp.checkpoint_utils.construct_restore_args(item)

        params = {"params": tree["params"]}
        renamed = {"weights": {"a": jnp.zeros(4), "c": jnp.zeros((2, 3))}, "step": 0}
        nested = {"params": {"a": jnp.zeros(4), "new": jnp.full(2, 9.0)}}
        moved = {
            r"weights/a": transform(original_key="params/a"),
            r"weights/c": transform(original_key="params/b", value_fn=lambda x: x * 2),
        }
        several = {
            r"sum": ocp.RestoreTransform(
                multi_value_fn=lambda path, tree, args: tree["params"]["a"] + 1,
                multi_value_fn_input_args={"params/a": ocp.RestoreArgs()},
            )
        }
        return _run(
            {
                "partial": lambda: restore(params, partial_restore=True),
                "partial with args": lambda: restore(
                    params, restore_args=how(params), partial_restore=True
                ),
                "not partial": lambda: restore(params),
                "no transforms": lambda: restore(params, transforms={}, restore_args=how(params)),
                "placeholders": lambda: restore(
                    {
                        "params": {"a": jnp.zeros(4), "b": skip},
                        "opt": [skip, {"mu": skip}],
                        "step": skip,
                    }
                ),
                "placeholders of too few": lambda: restore(
                    {"params": {"a": jnp.zeros(4), "b": skip}}
                ),
                "missing": lambda: restore({**tree, "more": jnp.zeros(2)}),
                "partial missing": lambda: restore(
                    {"params": {"z": jnp.zeros(4)}}, partial_restore=True
                ),
                "partial missing beside": lambda: restore(
                    {"params": {"a": jnp.zeros(4), "z": jnp.ones(4)}, "new": 3},
                    partial_restore=True,
                ),
                "partial missing with args": lambda: restore(
                    nested, restore_args=how(nested), partial_restore=True
                ),
                "moved": lambda: restore(renamed, transforms=moved, restore_args=how(renamed)),
                "fallback": lambda: restore(
                    nested,
                    transforms={r"params/new": transform(use_fallback=True)},
                    restore_args=how(nested),
                ),
                "no fallback": lambda: restore(nested, transforms={}, restore_args=how(nested)),
                "defaults to new": lambda: restore(
                    nested,
                    transforms={r"params/a": transform(original_key="params/a")},
                    transforms_default_to_original=False,
                    restore_args=how(nested),
                ),
                "several": lambda: restore(
                    {"sum": jnp.zeros(4)},
                    transforms=several,
                    restore_args={"sum": ocp.RestoreArgs()},
                ),
                "unknown key": lambda: restore(
                    {"w": jnp.zeros(4)},
                    transforms={"w": transform(original_key="nowhere")},
                    restore_args={"w": ocp.RestoreArgs()},
                ),
                "apply": lambda: ocp.apply_transformations(
                    {"a": 1, "b": {"c": 2}},
                    {
                        "x": transform(original_key="a"),
                        "y": transform(original_key="b/c", value_fn=lambda v: v + 1),
                    },
                    {"x": 0, "y": 0},
                ),
            }
        )

    run_both(program, tmp_path)


def test_saves_in_the_background(tmp_path: Path) -> None:
    """As the guide to asynchronous saves: arrays that change at once, several saves, errors."""

    def program(ocp: Any, root: Path) -> Any:
        handler = ocp.StandardCheckpointHandler()
        with ocp.AsyncCheckpointer(handler, timeout_secs=60) as checkpointer:
            args = ocp.args

            def overwritten() -> Any:
                state = {"w": np.arange(1000.0), "j": jnp.ones(3)}
                checkpointer.save(root / "one", args=args.StandardSave(state))
                state["w"] += 1
                checkpointer.wait_until_finished()
                return checkpointer.restore(root / "one")

            def in_turn() -> Any:
                for step in range(3):
                    checkpointer.save(root / str(step), args=args.StandardSave({"s": step}))
                checkpointer.wait_until_finished()
                checkpointer.check_for_errors()
                return [checkpointer.restore(root / str(step)) for step in range(3)]

            def at_once() -> Any:
                checkpointer.save(root / "at", args=args.StandardSave({"s": jnp.ones(2)}))
                checkpointer.wait_until_finished()
                return checkpointer.restore(
                    root / "at", args=args.StandardRestore({"s": jnp.zeros(2)})
                )

            def there() -> Any:
                checkpointer.save(root / "one", args=args.StandardSave({"w": 1}))

            def forced() -> Any:
                checkpointer.save(root / "one", args=args.StandardSave({"w": 1}), force=True)
                checkpointer.wait_until_finished()
                return checkpointer.restore(root / "one")

            return _run(
                {
                    "overwritten": overwritten,
                    "in turn": in_turn,
                    "at once": at_once,
                    "there": there,
                    "forced": forced,
                }
            )

    run_both(program, tmp_path)


def test_trees_of_v1(tmp_path: Path) -> None:
    """As v1's guides to trees: save, load, targets, metadata, parts, the background."""
    rows = _on(_mesh(), "x")
    everywhere = _on(_mesh())

    def program(ocp: Any, root: Path) -> Any:
        state = {
            "w": jax.device_put(jnp.arange(8.0), rows),
            "m": {"b": jax.device_put(jnp.ones(4, jnp.bfloat16), everywhere)},
            "np": np.arange(3),
            "n": 2,
            "f": 0.5,
            "t": "text",
        }

        def target(sharding: Any, **others: Any) -> Any:
            like = {
                "w": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding),
                "m": {"b": jax.ShapeDtypeStruct((4,), jnp.bfloat16, sharding=sharding)},
                "np": np.zeros(3, np.int64),
                "n": 0,
                "f": 0.0,
                "t": "",
            }
            return like | others

        def metadata() -> Any:
            found = ocp.metadata(root / "a").metadata
            return {
                "w": (found["w"].shape, np.dtype(found["w"].dtype).name, found["w"].sharding),
                "b": found["m"]["b"].shape,
                "keys": sorted(found),
            }

        def by_metadata() -> Any:
            return ocp.load(root / "a", ocp.metadata(root / "a"))

        def changed_metadata() -> Any:
            found = ocp.metadata(root / "a").metadata
            like = jax.tree.map(
                lambda leaf: (
                    jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere)
                    if getattr(leaf, "shape", ()) and leaf.shape == (8,)
                    else leaf
                ),
                found,
            )
            return ocp.load(root / "a", like)

        def background() -> Any:
            response = ocp.save_async(root / "async", state)
            response.result()
            return ocp.load(root / "async")["w"]

        def custom() -> Any:
            ocp.save(root / "custom", {"x": 1}, custom_metadata={"lang": ["en", "de"]})
            return ocp.metadata(root / "custom").custom_metadata

        def partial(like: Any) -> Any:
            options = ocp.options.PyTreeOptions(
                loading=ocp.options.PyTreeOptions.Loading(partial_load=True)
            )
            with ocp.Context(pytree_options=options):
                return ocp.load(root / "a", like)

        skip = ocp.PLACEHOLDER
        return _run(
            {
                "save": lambda: ocp.save(root / "a", state),
                "load": lambda: ocp.load(root / "a"),
                "like": lambda: ocp.load(root / "a", target(rows)),
                "resharded": lambda: ocp.load(root / "a", target(everywhere)),
                "like itself": lambda: ocp.load(root / "a", state),
                "cast": lambda: ocp.load(
                    root / "a",
                    target(rows, w=jax.ShapeDtypeStruct((8,), jnp.bfloat16, sharding=rows)),
                ),
                "wrong shape": lambda: ocp.load(
                    root / "a", target(rows, w=jax.ShapeDtypeStruct((9,), jnp.float32))
                ),
                "numpy": lambda: ocp.load(root / "a", target(rows, w=np.zeros(8, np.float32))),
                "types": lambda: ocp.load(root / "a", target(rows, n=int, f=float, t=str)),
                "number as float": lambda: ocp.load(root / "a", target(rows, n=0.0)),
                "part": lambda: ocp.load(root / "a", {"w": target(rows)["w"]}),
                "placeholder": lambda: ocp.load(root / "a", target(rows, np=skip, m={"b": skip})),
                "partial": lambda: partial({"w": target(rows)["w"]}),
                "again": lambda: ocp.save(root / "a", state),
                "overwrite": lambda: (
                    ocp.save(root / "custom2", {"a": 1})
                    or ocp.save(root / "custom2", {"a": 2}, overwrite=True)
                    or ocp.load(root / "custom2")
                ),
                "metadata": metadata,
                "by metadata": by_metadata,
                "changed metadata": changed_metadata,
                "background": background,
                "custom": custom,
                "none": lambda: ocp.load(root / "none"),
                "is one": lambda: [
                    ocp.is_orbax_checkpoint(root / "a"),
                    ocp.is_orbax_checkpoint(root),
                ],
                "list": lambda: (
                    ocp.save(root / "list", [1, (2.0, jnp.ones(1))]) or ocp.load(root / "list")
                ),
                "numbers": lambda: (
                    ocp.save(root / "numbers", {0: np.ones(1), 1: {10: 2}})
                    or ocp.load(root / "numbers")
                ),
                "like numbers": lambda: ocp.load(root / "numbers", {0: np.zeros(1), 1: {10: 0}}),
                "by metadata of numbers": lambda: ocp.load(
                    root / "numbers", ocp.metadata(root / "numbers").metadata
                ),
                "partial missing": lambda: partial({"w": target(rows)["w"], "z": jnp.ones(2)}),
                "keys": lambda: (
                    ocp.save(root / "keys", {"k": jax.random.key(3)}) or ocp.load(root / "keys")
                ),
            }
        )

    run_both(program, tmp_path, v1=True)


def test_checkpointables_of_v1(tmp_path: Path) -> None:
    """As v1's guide to checkpointables: several at once, a stateful one, a part of them."""

    class Numbers:
        """As an iterator over data: it saves its place by itself."""

        def __init__(self, at: int = 0) -> None:
            self.at = at

        async def save(self, directory: Any) -> Any:
            async def write() -> None:
                path = await directory.await_creation()
                (path / "at.txt").write_text(str(self.at))

            return write()

        async def load(self, directory: Any) -> Any:
            async def read() -> None:
                self.at = int((directory / "at.txt").read_text())

            return read()

    def program(ocp: Any, root: Path) -> Any:
        state = {"w": jnp.arange(4.0), "s": 1}
        data = Numbers(5)

        def save() -> None:
            ocp.save_checkpointables(
                root / "a", {"state": state, "data": data, "more": {"x": np.arange(2)}}
            )

        def stateful() -> Any:
            fresh = Numbers()
            found = ocp.load_checkpointables(root / "a", {"state": state, "data": fresh})
            return found["state"], fresh.at, sorted(found)

        def metadata() -> Any:
            found = ocp.checkpointables_metadata(root / "a").metadata
            return sorted(found), found["state"]["w"].shape

        def background() -> Any:
            ocp.save_checkpointables_async(root / "b", {"one": state, "two": [1]}).result()
            return ocp.load_checkpointables(root / "b")

        return _run(
            {
                "save": save,
                "stateful": stateful,
                "by names": lambda: ocp.load_checkpointables(root / "a", {"more": None}),
                "metadata": metadata,
                "background": background,
                "unknown": lambda: ocp.load_checkpointables(root / "a", {"nothing": None}),
                "tree": lambda: ocp.load(root / "a"),
                "named tree": lambda: ocp.load(root / "a", checkpointable_name="more"),
            }
        )

    run_both(program, tmp_path, v1=True)


def test_training_of_v1(tmp_path: Path) -> None:
    """As v1's guide to a Checkpointer: steps, policies, metrics, loads, metadata."""

    def program(ocp: Any, root: Path) -> Any:
        training = ocp.training
        state = {"w": jnp.arange(4.0), "n": 0}

        def steps() -> Any:
            with training.Checkpointer(root / "steps") as it:
                saved = [it.save(step, state | {"n": step}) for step in range(4)]
                return (
                    saved,
                    [each.step for each in it.checkpoints],
                    it.latest.step,
                    it.load(),
                    it.load(1, state),
                    outcome(lambda: it.load(9)),
                    outcome(lambda: it.save(2, state)),
                )

        def policies() -> Any:
            with training.Checkpointer(
                root / "policies",
                save_decision_policy=training.save_decision_policies.AnySavePolicy(
                    [
                        training.save_decision_policies.FixedIntervalPolicy(3),
                        training.save_decision_policies.SpecificStepsPolicy([4]),
                    ]
                ),
                preservation_policy=training.preservation_policies.LatestN(2),
            ) as it:
                saved = [it.save(step, state) for step in range(8)]
                return saved, [each.step for each in it.checkpoints]

        def best() -> Any:
            with training.Checkpointer(
                root / "best",
                preservation_policy=training.preservation_policies.BestN(
                    get_metric_fn=lambda metrics: metrics["acc"], n=2
                ),
            ) as it:
                for step, value in enumerate([0.1, 0.9, 0.3, 0.5]):
                    it.save(step, state, metrics={"acc": value})
                return [each.step for each in it.checkpoints], it.checkpoints[-1].metrics

        def background() -> Any:
            with training.Checkpointer(root / "bg", custom_metadata={"who": "me"}) as it:
                first = it.save_async(1, state)
                assert first.result()
                second = it.save_async(2, state)
                return (
                    second.result(),
                    it.metadata(2).metadata["w"].shape,
                    it.root_metadata().custom_metadata,
                )

        def items() -> Any:
            with training.Checkpointer(root / "items") as it:
                it.save_checkpointables(
                    1, {"state": state, "config": {"a": 1}}, custom_metadata={"k": 1}
                )
                about = it.checkpointables_metadata(1)
                return (
                    it.load_checkpointables(1),
                    it.load_checkpointables(1, {"config": None}),
                    it.load(1),
                    sorted(about.metadata),
                    about.custom_metadata,
                    about.step,
                )

        def forced() -> Any:
            with training.Checkpointer(root / "steps") as it:
                it.save(3, state | {"n": 77}, overwrite=True)
                return it.load(3), [each.step for each in it.checkpoints], it.should_save(9)

        def again() -> Any:
            with training.Checkpointer(root / "steps") as it:
                return it.load(it.latest), it.load(it.checkpoints[0])

        def empty() -> Any:
            with training.Checkpointer(root / "empty") as it:
                return it.latest, list(it.checkpoints), outcome(it.load)

        return _run(
            {
                "steps": steps,
                "policies": policies,
                "best": best,
                "background": background,
                "items": items,
                "forced": forced,
                "again": again,
                "empty": empty,
            }
        )

    run_both(program, tmp_path, v1=True)


class _Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.one = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.two = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.two(self.drop(nnx.relu(self.norm(self.one(x)))))


def _pure(state: Any) -> Any:
    """Returns a state as dicts and lists of arrays."""
    return nnx.to_pure_dict(state)


def test_modules_of_nnx(tmp_path: Path) -> None:
    """As Flax's guides: states split and merged, abstract ones, pure dicts, random numbers,
    optimizers, sharded models.
    """
    import optax

    def program(ocp: Any, root: Path) -> Any:
        checkpointer = ocp.StandardCheckpointer()
        model = _Net(nnx.Rngs(0, dropout=1))
        model(jnp.ones((3, 4)))
        state = nnx.state(model)
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        everywhere = _on(_mesh())

        def save() -> Any:
            checkpointer.save(root / "state", state)
            checkpointer.save(root / "pure", _pure(state))
            checkpointer.save(root / "optimizer", nnx.state(optimizer))
            checkpointer.wait_until_finished()

        def abstract() -> Any:
            return nnx.eval_shape(lambda: _Net(nnx.Rngs(0, dropout=1)))

        def merged() -> Any:
            graph, like = nnx.split(abstract())
            found = checkpointer.restore(root / "state", like)
            made = nnx.merge(graph, found)
            return _pure(found), made(jnp.ones((2, 4)))

        def concrete() -> Any:
            fresh = nnx.state(_Net(nnx.Rngs(7, dropout=8)))
            return _pure(checkpointer.restore(root / "state", fresh))

        def pure() -> Any:
            found = checkpointer.restore(root / "pure")
            graph, like = nnx.split(abstract())
            nnx.replace_by_pure_dict(like, found)
            return found, nnx.merge(graph, like)(jnp.ones((2, 4)))

        def without() -> Any:
            return checkpointer.restore(root / "state")

        def update() -> Any:
            fresh = _Net(nnx.Rngs(5, dropout=6))
            nnx.update(fresh, checkpointer.restore(root / "state", nnx.state(fresh)))
            return _pure(nnx.state(fresh)), fresh.drop.rngs.count[...]

        def optimizers() -> Any:
            fresh = nnx.Optimizer(_Net(nnx.Rngs(5)), optax.adam(1e-3), wrt=nnx.Param)
            return _pure(checkpointer.restore(root / "optimizer", nnx.state(fresh)))

        def sharded() -> Any:
            _, like = nnx.split(abstract())
            like = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere), like
            )
            return _pure(checkpointer.restore(root / "state", like))

        def filtered() -> Any:
            params = nnx.state(model, nnx.Param)
            rest = nnx.state(model, nnx.BatchStat)
            with ocp.CheckpointManager(root / "run", item_names=("params", "rest")) as manager:
                args = ocp.args
                manager.save(
                    1,
                    args=args.Composite(
                        params=args.StandardSave(params), rest=args.PyTreeSave(rest)
                    ),
                )
                manager.wait_until_finished()
                found = manager.restore(
                    1,
                    args=args.Composite(
                        params=args.StandardRestore(params), rest=args.PyTreeRestore(rest)
                    ),
                )
                return _pure(found.params), _pure(found.rest)

        def random() -> Any:
            rngs = nnx.Rngs(params=3, noise=jax.random.key(9))
            rngs.noise()
            values = nnx.state(rngs)
            checkpointer.save(root / "rngs", values)
            checkpointer.wait_until_finished()
            fresh = nnx.Rngs(params=0, noise=0)
            nnx.update(fresh, checkpointer.restore(root / "rngs", nnx.state(fresh)))
            return jax.random.key_data(fresh.noise()), _pure(nnx.state(fresh))

        def partial() -> Any:
            handler = ocp.PyTreeCheckpointHandler()
            like = {"one": _pure(state)["one"]}
            return ocp.Checkpointer(handler).restore(
                root / "pure", args=ocp.args.PyTreeRestore(like, partial_restore=True)
            )

        def known() -> Any:
            found = checkpointer.metadata(root / "state").item_metadata.tree
            return found["one"]["kernel"]["value"].shape

        return _run(
            {
                "save": save,
                "merged": merged,
                "concrete": concrete,
                "pure": pure,
                "without": without,
                "update": update,
                "optimizers": optimizers,
                "sharded": sharded,
                "filtered": filtered,
                "random": random,
                "partial": partial,
                "known": known,
            }
        )

    run_both(program, tmp_path)


def test_a_scalar_on_a_mesh(tmp_path: Path) -> None:
    """As the guides to surgery and to checkpointables: all leaves have one sharding, P(None), also
    the step, which has no axis; parts are left out.
    """
    sharding = _on(_mesh(), None)

    def on_devices(array: Any) -> jax.Array:
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    tree = jax.tree.map(
        on_devices,
        {"params": {"w": np.ones((2, 2))}, "opt": [np.ones(2), np.zeros(2)], "step": np.asarray(7)},
    )
    any_shape = np.array([])
    left_out = {"params": {"w": any_shape}, "opt": [..., ...], "step": any_shape}

    def program(ocp: Any, root: Path) -> Any:
        def step() -> Any:
            with ocp.training.Checkpointer(root / "steps") as steps:
                steps.save(0, tree)
                return steps.metadata(0).metadata["step"].shape

        return _run(
            {
                "save": lambda: ocp.save(root / "c", tree, overwrite=True),
                "items": lambda: ocp.save_checkpointables(
                    root / "items", {"tree": tree, "data": {"index": 3}}
                ),
                "load": lambda: jax.tree.map(np.asarray, ocp.load(root / "c")),
                "like": lambda: jax.tree.map(np.asarray, ocp.load(root / "c", tree)),
                "left out": lambda: ocp.load(root / "c", left_out),
                "not a leaf": lambda: ocp.load(root / "c", left_out | {"opt": ...}),
                "of items": lambda: ocp.load_checkpointables(root / "items", {"data": None}),
                "step": step,
            }
        )

    run_both(program, tmp_path, v1=True)
