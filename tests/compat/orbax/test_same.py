"""What docs/from-orbax.md calls the same takes the same parameters, and gives the same."""

from __future__ import annotations

import datetime
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.orbax_programs import assert_equal, outcome
from tests.support.paths import ROOT

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

KINDS = inspect.Parameter
TREE = {"a": [1, (2, {"b": 3})], "c": {}, "d": None}
KEYS = [path for path, _ in jax.tree_util.tree_leaves_with_path(TREE)]
NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def _script() -> ModuleType:
    path = ROOT / "scripts" / "list_orbax_names.py"
    spec = importlib.util.spec_from_file_location("list_orbax_names", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NAMES = _script()


def _names(*kinds: str) -> Iterator[tuple[str, Any, Any]]:
    """Yields the names of these kinds, with what Orbax and holdfast have under them."""
    for prefix, module in NAMES.real_modules():
        for name in NAMES.own_names(prefix, module):
            if NAMES.row(prefix + name)[0] in kinds:
                yield prefix + name, vars(module)[name], NAMES.counterpart(prefix + name)


def _parameters(call: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(call).parameters
    except (TypeError, ValueError):
        return {}


def test_parameters_are_the_same() -> None:
    """Each parameter of Orbax's is taken, by its name and by its place."""
    wrong = []
    for name, theirs, ours in _names("same", "translated"):
        if not callable(theirs):
            continue
        expected = _parameters(theirs)
        found = _parameters(ours)
        takes_any = any(each.kind is KINDS.VAR_KEYWORD for each in found.values())
        for each in expected.values():
            is_one = each.kind not in (KINDS.VAR_KEYWORD, KINDS.VAR_POSITIONAL)
            if is_one and each.name not in found and not takes_any:
                wrong.append(f"{name} lacks {each.name}")
        if any(each.kind is KINDS.VAR_POSITIONAL for each in found.values()):
            continue
        places = [each.name for each in expected.values() if _has_place(each)]
        given = [each.name for each in found.values() if _has_place(each)]
        if given[: len(places)] != places:
            wrong.append(f"{name} has the places {given}, not {places}")
    assert not wrong


def _has_place(parameter: inspect.Parameter) -> bool:
    return parameter.kind is KINDS.POSITIONAL_OR_KEYWORD


def _saved(ocp: Any, root: Path) -> Path:
    """Makes a root with the steps 2 and 3, once."""
    if not (root / "steps").exists():
        with ocp.CheckpointManager(root / "steps") as manager:
            for step in (2, 3):
                manager.save(step, args=ocp.args.StandardSave({"w": jnp.arange(4.0)}))
    return root / "steps"


# By the name of what is called: a call, of (what is called, the library, a folder).
Call = Callable[[Any, Any, Path], Any]
CALLS: dict[str, Call] = {
    "ArrayRestoreArgs": lambda f, o, r: f(dtype=np.float32, global_shape=(4,)).global_shape,
    "RestoreArgs": lambda f, o, r: f(int, np.int32).restore_type,
    "Transform": lambda f, o, r: f(original_key="a", use_fallback=False).original_key,
    "RestoreTransform": lambda f, o, r: f(multi_value_fn=len).multi_value_fn is len,
    "apply_transformations": lambda f, o, r: f(
        {"a": 1, "b": 2}, {"c": o.transform_utils.Transform(original_key="a")}, {"c": 0, "b": 0}
    ),
    "merge_trees": lambda f, o, r: f({"a": 1}, {"b": {"c": 2}}),
    "tree.merge_trees": lambda f, o, r: [
        f({"a": 1, "x": {"y": 1}}, {"b": {"c": 2}, "x": {"z": 2}}),
        f({"a": 1}, {"a": 2}, overwrite=True),
        outcome(lambda: f({"a": 1}, {"a": 2})),
        f(),
    ],
    "transform_utils.intersect_trees": lambda f, o, r: f({"a": 1, "b": 2}, {"b": 3}),
    "arrays.to_shape_dtype_struct": lambda f, o, r: [
        (f(np.ones(3)).shape, f(jnp.ones(2), dtype=jnp.bfloat16).dtype, f(3, scalar_dtype=float))
    ],
    "arrays.construct_maximal_shardings": lambda f, o, r: f(
        [jax.ShapeDtypeStruct((8, 4), np.int8)]
    ),
    "utils.from_flattened_with_keypath": lambda f, o, r: f(
        jax.tree_util.tree_leaves_with_path(TREE)
    ),
    "tree.from_flat_dict": lambda f, o, r: f({("a", "b"): 1, ("c",): 2}),
    "tree.to_flat_dict": lambda f, o, r: f(TREE, sep="/", keep_empty_nodes=True),
    "tree.is_flat_dict": lambda f, o, r: [f({"a": 1}), f(TREE)],
    "tree.get_param_names": lambda f, o, r: f({"a": [1, 2]}),
    "tree.str_keypath": lambda f, o, r: [f(path) for path in KEYS],
    "utils.tuple_path_from_keypath": lambda f, o, r: [f(path) for path in KEYS],
    "utils.get_key_name": lambda f, o, r: [f(path[-1]) for path in KEYS],
    "utils.is_dict_key": lambda f, o, r: [f(path[-1]) for path in KEYS],
    "utils.is_sequence_key": lambda f, o, r: [f(path[-1]) for path in KEYS],
    "utils.is_empty_node": lambda f, o, r: [f({}), f(None), f([1]), f(2)],
    "utils.is_empty_or_leaf": lambda f, o, r: [f({}), f(None), f([1]), f(2)],
    "tree.serialize_tree": lambda f, o, r: f(TREE, keep_empty_nodes=True),
    "tree.deserialize_tree": lambda f, o, r: f({"a": {"b": 1}}, {"a": {"b": 0}}),
    "args.get_registered_args_cls": lambda f, o, r: outcome(lambda: f(object())),
    "args.get_registered_handler_cls": lambda f, o, r: outcome(lambda: f(object())),
    "args.has_registered_args": lambda f, o, r: f(object()),
    "args.register_with_handler": lambda f, o, r: outcome(lambda: f(object)),
    "args.Composite": lambda f, o, r: sorted(f(a=1, b=2).items()),
    "args.CheckpointArgs": lambda f, o, r: isinstance(o.args.StandardSave(1), f),
    "checkpoint_manager.StepAlreadyExistsError": lambda f, o, r: issubclass(f, ValueError),
    "checkpoint_manager.StepMetadata": lambda f, o, r: f(metrics={"a": 1}).metrics,
    "metadata.StepMetadata": lambda f, o, r: f(custom_metadata={"a": 1}).custom_metadata,
    "metadata.RootMetadata": lambda f, o, r: f({"i": 1}, {"c": 2}).custom_metadata,
    "metadata.ArrayMetadata": lambda f, o, r: f("a", None, (2,), None, np.dtype("f4")).shape,
    "metadata.Metadata": lambda f, o, r: f(name="a", directory=None).name,
    "metadata.ScalarMetadata": lambda f, o, r: f(name="a", directory=None).shape,
    "metadata.StorageMetadata": lambda f, o, r: f((2,), (2,)).chunk_shape,
    "metadata.ShardingMetadata": lambda f, o, r: issubclass(o.metadata.NamedShardingMetadata, f),
    "metadata.NamedShardingMetadata": lambda f, o, r: f(
        np.array([jax.device_count()]), ["x"], ("x",)
    ).to_jax_sharding(),
    "metadata.SingleDeviceShardingMetadata": lambda f, o, r: (
        f(str(jax.devices()[0])).to_jax_sharding().device_set
    ),
    "metadata.StringMetadata": lambda f, o, r: f(name="a", directory=None).name,
    "checkpoint_utils.construct_restore_args": lambda f, o, r: [
        (each.restore_type, each.dtype) for each in jax.tree.leaves(f({"n": 3, "x": np.ones(2)}))
    ],
    "checkpoint_utils.checkpoints_iterator": lambda f, o, r: list(f(_saved(o, r), timeout=0)),
    "checkpoint_utils.wait_for_new_checkpoint": lambda f, o, r: _entered(
        f(_saved(o, r), timeout=1)
    ),
    "step.any_checkpoint_step": lambda f, o, r: f(_saved(o, r)) in (2, 3),
    "step.checkpoint_steps": lambda f, o, r: sorted(f(_saved(o, r))),
    "step.checkpoint_steps_paths": lambda f, o, r: sorted(each.name for each in f(_saved(o, r))),
    "step.Metadata": lambda f, o, r: f(step=3, path=r).step,
    "step.is_path_finalized": lambda f, o, r: f(_saved(o, r) / "2"),
    "step.is_path_temporary": lambda f, o, r: f(_saved(o, r) / "2"),
    "step.tmp_checkpoints": lambda f, o, r: f(_saved(o, r)),
    "step.step_from_checkpoint_name": lambda f, o, r: f("a_7"),
    "step.step_prefix_with_underscore": lambda f, o, r: [f(None), f("a")],
    "step.standard_name_format": lambda f, o, r: f(step_prefix="a").build_name(3),
    "step.is_standard_name_format": lambda f, o, r: f(o.step.standard_name_format()),
    "step.single_host_load_and_broadcast_name_format": lambda f, o, r: f(
        o.step.standard_name_format()
    ).build_name(3),
    "step.composite_name_format": lambda f, o, r: f(_names_of(o), [_names_of(o)]).build_name(3),
    "step.build_step_path": lambda f, o, r: f(r, _names_of(o), 3).name,
    "step.get_save_directory": lambda f, o, r: f(3, r, "state").relative_to(r).as_posix(),
    "step.find_step_path": lambda f, o, r: f(_saved(o, r), _names_of(o), step=3).name,
    "step.latest_step_metadata": lambda f, o, r: f(_saved(o, r), _names_of(o)).step,
    "step.maybe_find_step_metadata": lambda f, o, r: f(_saved(o, r), _names_of(o), step=9),
    "step.step_metadata_of_checkpoint_path": lambda f, o, r: (
        f(_saved(o, r) / "2", _names_of(o)).step
    ),
    "test_utils.empty_directory": lambda f, o, r: f(r / "nothing"),
    "test_utils.erase_and_create_empty": lambda f, o, r: f(r / "empty").name,
    "type_handlers.get_type_handler": lambda f, o, r: type(f(int)).__name__,
    "type_handlers.has_type_handler": lambda f, o, r: [f(int), f(dict)],
    "type_handlers.is_ocdbt_checkpoint": lambda f, o, r: f(r),
    "type_handlers.is_supported_type": lambda f, o, r: [f(3), f(object())],
    "type_handlers.supported_types": lambda f, o, r: sorted(str(each) for each in f())[:3],
    "utils.fully_replicated_host_local_array_to_global_array": lambda f, o, r: f(
        jax.device_put(jnp.arange(3), _everywhere())
    ),
    "utils.tmp_checkpoints": lambda f, o, r: list(f(_saved(o, r))),
    "utils.record_saved_duration": lambda f, o, r: f(0.0),
    "future.ChainedFuture": lambda f, o, r: f([o.future.NoopFuture()], lambda: None).result(1),
    "future.NoopFuture": lambda f, o, r: f().result(),
}


def _everywhere() -> jax.sharding.Sharding:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), "x")
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def _entered(context: Any) -> Any:
    with context as value:
        return value


def _names_of(ocp: Any) -> Any:
    return ocp.step.standard_name_format()


def _library(name: str) -> tuple[Any, Any]:
    import orbax.checkpoint as theirs

    from holdfast.compat import orbax as ours

    return theirs, ours


@pytest.mark.parametrize("name", CALLS)
def test_a_call_gives_the_same(tmp_path: Path, name: str) -> None:
    """One of each function and value: the same result on both libraries."""
    results = []
    for number, library in enumerate(_library(name)):
        found = library
        for word in name.split("."):
            found = getattr(found, word)
        folder = tmp_path / str(number)
        folder.mkdir()
        results.append(CALLS[name](found, library, folder))
    assert_equal(results[1], results[0])


# Called by other tests, on both libraries: policies by test_checkpoint_manager, handlers and their
# arguments by test_standard, processes by the tests of multihost, v1 by those in v1.
ELSEWHERE = ("checkpoint_managers.", "handlers.", "multihost.", "v1.", "args.", "checkpoint_args.")
WITHOUT = ("Handler", "Abstract", "Future", "BarrierSyncFn", "NameFormat")


def test_every_name_is_called() -> None:
    """Each function or class that is called the same is called above, or by the tests that say so;
    what is no function is equal.
    """
    import orbax.checkpoint as theirs

    called = set()
    for name in CALLS:
        found: Any = theirs
        for word in name.split("."):
            found = getattr(found, word)
        called.add(id(found))
    left = []
    for name, real, ours in _names("same"):
        if isinstance(real, ModuleType) or name.startswith(ELSEWHERE):
            continue
        if any(word in name for word in WITHOUT) or id(real) in called:
            continue
        if not callable(real):
            assert ours == real, name
        elif getattr(real, "__module__", "").startswith("orbax.checkpoint._src.multihost"):
            continue
        else:
            left.append(name)
    assert left == []
