"""Kinds of leaves and storage: the same on Orbax and on holdfast, or refused at the call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holdfast.compat import orbax as ours
from tests.support.orbax_programs import outcome, run_both

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")  # Orbax's own
TREE = {"w": jnp.arange(8.0).reshape(2, 4), "x": np.arange(3), "n": 3}


def test_the_handlers_of_orbax(tmp_path: Path) -> None:
    """They are made and registered, to no effect on what is saved."""

    def program(ocp: Any, root: Path) -> Any:
        module = ocp.type_handlers
        kinds = [jax.Array, np.ndarray, int, float, str, bytes, np.float32, dict]
        single = module.SingleReplicaArrayHandler(replica_axis_index=0, primary_replica_id=0)
        module.register_type_handler(jax.Array, single, override=True)
        found = [
            [module.has_type_handler(kind) for kind in kinds],
            [
                type(outcome(lambda k=kind: module.get_type_handler(k))).__name__
                for kind in kinds[1:]
            ],
            outcome(lambda: module.register_type_handler(jax.Array, module.ArrayHandler())),
            single.replica_axis_index,
        ]
        module.register_type_handler(jax.Array, module.ArrayHandler(), override=True)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(root / "a", TREE)
            checkpointer.wait_until_finished()
            return [*found, checkpointer.restore(root / "a", TREE)]

    run_both(program, tmp_path)


def test_a_handler_of_ones_own_is_refused() -> None:
    """At the call, with the nearest thing."""

    class Point:
        pass

    class Handler(ours.type_handlers.TypeHandler):  # type: ignore[misc]
        pass

    class Arrays(ours.type_handlers.ArrayHandler):
        async def serialize(self, *args: Any) -> list[Any]:
            raise AssertionError("never called")

    numpy_handler = ours.type_handlers.NumpyHandler()
    for kind, handler in ((Point, Handler()), (Point, numpy_handler), (jax.Array, Arrays())):
        with pytest.raises(NotImplementedError, match=r"(Point|Array).*register_leaf_type"):
            ours.type_handlers.register_type_handler(kind, handler, override=True)


def test_the_storage_of_an_array(tmp_path: Path) -> None:
    """Metadata says by which shape an array is divided."""

    def program(ocp: Any, root: Path) -> Any:
        with ocp.CheckpointManager(root) as manager:
            manager.save(0, args=ocp.args.StandardSave(TREE))
            manager.wait_until_finished()
            storage = manager.item_metadata(0)["w"].storage
        made = ocp.metadata.StorageMetadata(chunk_shape=(2, 4))
        return storage == made, made == ocp.metadata.StorageMetadata((2, 4), None, object())

    assert run_both(program, tmp_path) == (True, True)


def test_folders_that_are_emptied(tmp_path: Path) -> None:
    """`erase_and_create_empty` makes an empty folder of any."""

    def program(ocp: Any, root: Path) -> Any:
        (root / "a" / "b").mkdir(parents=True)
        made = [ocp.test_utils.erase_and_create_empty(root / name) for name in ("a", "c")]
        (root / "a" / "b").mkdir()
        emptied = [ocp.test_utils.empty_directory(root / name) for name in ("a", "d")]
        return [path.name for path in made], emptied, [list(path.iterdir()) for path in made]

    run_both(program, tmp_path)


def test_trees_as_dicts_and_lists(tmp_path: Path) -> None:
    """`serialize_tree` and `deserialize_tree` are each other's inverse."""

    def program(ocp: Any, root: Path) -> Any:
        tree = {"a": [1, (2, {"b": 3})], "c": {}, "d": None}
        return [
            ocp.utils.serialize_tree(tree),
            ocp.tree.serialize_tree(tree, keep_empty_nodes=True),
            ocp.utils.serialize_tree(5),
            outcome(lambda: ocp.utils.serialize_tree({})),
            ocp.utils.deserialize_tree(ocp.utils.serialize_tree(tree), tree),
            ocp.tree.deserialize_tree(
                ocp.tree.serialize_tree(tree, keep_empty_nodes=True), tree, keep_empty_nodes=True
            ),
        ]

    run_both(program, tmp_path)
