"""Orbax's own handlers, called and subclassed: the same programs on Orbax and on holdfast."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from holdfast.compat import orbax as ours
from tests.support.orbax_programs import run_both

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sharding info not provided"),  # Orbax's own
    pytest.mark.filterwarnings("ignore:.*asyncio.*:DeprecationWarning"),  # Orbax's own
]
TREE = {"w": jnp.arange(4.0), "n": 3}


def made(path: Path) -> Any:
    path.mkdir()
    return epath.Path(path)


def test_handlers_are_called_by_themselves(tmp_path: Path) -> None:
    """Each saves into a folder and restores from it, with arguments in both of their forms."""

    def program(ocp: Any, root: Path) -> Any:
        found = []
        for name in ("Standard", "PyTree"):
            handler = getattr(ocp, f"{name}CheckpointHandler")()
            folder = made(root / name)
            args = getattr(ocp.args, f"{name}Save")(TREE)
            handler.save(folder, args=args)
            handler.finalize(folder)
            found += [
                handler.restore(folder, args=getattr(ocp.args, f"{name}Restore")(TREE)),
                handler.restore(folder),
                handler.metadata(folder)["w"].shape,
            ]
            handler.close()
        handler = ocp.JsonCheckpointHandler()
        folder = made(root / "json")
        handler.save(folder, {"a": [1, 2]})
        found.append(handler.restore(folder))
        handler = ocp.ArrayCheckpointHandler()
        folder = made(root / "array")
        handler.save(folder, args=ocp.args.ArraySave(np.arange(3)))
        handler.finalize(folder)
        found.append(handler.restore(folder, args=ocp.args.ArrayRestore(np.zeros(3, int))))
        handler = ocp.NumpyRandomKeyCheckpointHandler()
        state = np.random.RandomState(3).get_state()
        folder = made(root / "numpy")
        handler.save(folder, args=ocp.args.NumpyRandomKeySave(state))
        handler.finalize(folder)
        found.append(handler.restore(folder, args=ocp.args.NumpyRandomKeyRestore())[1][:3])
        handler = ocp.JaxRandomKeyCheckpointHandler()
        folder = made(root / "jax")
        handler.save(folder, args=ocp.args.JaxRandomKeySave(jax.random.key(3)))
        handler.finalize(folder)
        found.append(handler.restore(folder, args=ocp.args.JaxRandomKeyRestore()))
        return found

    run_both(program, tmp_path)


def test_handlers_save_in_the_background(tmp_path: Path) -> None:
    """`async_save` returns futures; the checkpoint is there once they are done."""

    def program(ocp: Any, root: Path) -> Any:
        handler = ocp.StandardCheckpointHandler()
        folder = made(root / "a")
        for future in asyncio.run(handler.async_save(folder, args=ocp.args.StandardSave(TREE))):
            future.result()
        handler.finalize(folder)
        return handler.restore(folder)

    run_both(program, tmp_path)


def test_a_composite_is_called_by_itself(tmp_path: Path) -> None:
    """Its items are those of its arguments."""

    def program(ocp: Any, root: Path) -> Any:
        handler = ocp.CompositeCheckpointHandler("state", "about")
        folder = made(root / "a")
        args = ocp.args
        items = args.Composite(state=args.StandardSave(TREE), about=args.JsonSave({"a": 1}))
        handler.save(folder, items)
        handler.finalize(folder)
        wanted = args.Composite(state=args.StandardRestore(TREE), about=args.JsonRestore())
        restored = handler.restore(folder, wanted)
        return [restored["state"], restored.about]

    run_both(program, tmp_path)


def make_doubling(ocp: Any) -> Any:
    """Returns a handler that saves half of the numbers, and doubles them again, and its
    arguments.
    """

    class Doubling(ocp.StandardCheckpointHandler):  # type: ignore[misc]
        calls: ClassVar[list[str]] = []

        async def async_save(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls.append("async_save")
            given = kwargs.pop("args")
            halves = jax.tree.map(lambda leaf: leaf / 2, given.item)
            return await super().async_save(
                directory, *args, args=ocp.args.StandardSave(halves), **kwargs
            )

        def restore(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls.append("restore")
            assert directory.name in ("default", "state", "alone")
            halves = super().restore(directory, *args, **kwargs)
            return jax.tree.map(lambda leaf: leaf * 2, halves)

    @ocp.args.register_with_handler(Doubling, for_save=True)
    class DoublingSave(ocp.args.StandardSave):  # type: ignore[misc]
        pass

    @ocp.args.register_with_handler(Doubling, for_restore=True)
    class DoublingRestore(ocp.args.StandardRestore):  # type: ignore[misc]
        pass

    return Doubling, DoublingSave, DoublingRestore


def test_overridden_methods_are_called(tmp_path: Path) -> None:
    """By a manager, for one item and for several, by a checkpointer, and by themselves."""

    def program(ocp: Any, root: Path) -> Any:
        doubling, doubling_save, doubling_restore = make_doubling(ocp)
        tree = {"w": np.arange(4.0)}
        save = doubling_save(tree)
        restore = doubling_restore(tree)
        found = []
        with ocp.CheckpointManager(root / "one", item_handlers=doubling()) as manager:
            manager.save(0, args=save)
            manager.wait_until_finished()
            found.append(manager.restore(0, args=restore))
        handlers = {"state": doubling()}
        with ocp.CheckpointManager(root / "several", item_handlers=handlers) as manager:
            manager.save(0, args=ocp.args.Composite(state=save))
            manager.wait_until_finished()
            found.append(manager.restore(0, args=ocp.args.Composite(state=restore))["state"])
        with ocp.CheckpointManager(root / "several") as manager:
            wanted = ocp.args.Composite(state=ocp.args.StandardRestore(tree))
            found.append(manager.restore(0, args=wanted)["state"])
        with ocp.AsyncCheckpointer(doubling()) as checkpointer:
            checkpointer.save(root / "alone", args=save)
            checkpointer.wait_until_finished()
            found.append(checkpointer.restore(root / "alone"))
        assert doubling.calls.count("restore") == 3
        return found

    found = run_both(program, tmp_path)
    assert [each["w"][3] for each in found] == [3.0, 3.0, 1.5, 3.0]


def test_a_subclass_is_registered_with_its_arguments(tmp_path: Path) -> None:
    """Its `save` and `restore` run around those of the base, which take the base's arguments."""

    def program(ocp: Any, root: Path) -> Any:
        class Named(ocp.JsonCheckpointHandler):  # type: ignore[misc]
            def save(self, directory: Any, item: Any = None, args: Any = None) -> None:
                super().save(directory, {"named": args.item})

            async def async_save(self, directory: Any, item: Any = None, args: Any = None) -> Any:
                return await super().async_save(directory, {"named": args.item})

            def restore(self, directory: Any, item: Any = None, args: Any = None) -> Any:
                return super().restore(directory)["named"]

        @ocp.args.register_with_handler(Named, for_save=True, for_restore=True)
        class NamedArgs(ocp.args.CheckpointArgs):  # type: ignore[misc]
            def __init__(self, item: Any = None) -> None:
                self.item = item

        with ocp.CheckpointManager(root) as manager:
            manager.save(0, args=ocp.args.Composite(name=NamedArgs("x")))
            manager.wait_until_finished()
            return manager.restore(0, args=ocp.args.Composite(name=NamedArgs()))["name"]

    assert run_both(program, tmp_path) == "x"


def test_files_beside_the_bases_are_refused(tmp_path: Path) -> None:
    """An override that writes files of its own, or does not call the base's, says so."""

    class Extra(ours.StandardCheckpointHandler):
        def save(self, directory: Any, *args: Any, **kwargs: Any) -> None:
            (directory / "mine.txt").write_text("mine")
            super().save(directory, *args, **kwargs)

    class Empty(ours.StandardCheckpointHandler):
        def save(self, directory: Any, *args: Any, **kwargs: Any) -> None:
            pass

    for handler, message in ((Extra(), r"Extra\.save.*mine\.txt"), (Empty(), r"Empty\.save")):
        with (
            ours.Checkpointer(handler) as checkpointer,
            pytest.raises(NotImplementedError, match=rf"{message}.*from-orbax"),
        ):
            checkpointer.save(tmp_path / "a", args=ours.args.StandardSave(TREE))


def test_a_dtype_alone_keeps_what_a_leaf_is(tmp_path: Path) -> None:
    """Host arrays stay on the host, numbers numbers, and texts as they are."""

    def program(ocp: Any, root: Path) -> Any:
        tree = {"np": np.arange(3.0), "f": 2.5, "i": 3, "s": "text", "jax": jnp.arange(3.0)}
        found = []
        with ocp.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(root / "a", tree)
            for item in (None, tree):
                args = dict.fromkeys(tree, ocp.RestoreArgs(dtype=np.float16))
                found.append(checkpointer.restore(root / "a", item=item, restore_args=args))
        return found

    run_both(program, tmp_path)


def test_save_args_are_for_the_leaves_of_their_paths(tmp_path: Path) -> None:
    """None is for one that is saved as it is."""

    def program(ocp: Any, root: Path) -> Any:
        tree = {"a": jnp.ones(2), "b": [jnp.ones(2), jnp.ones(2)], "n": None}
        half = ocp.SaveArgs(dtype=jnp.dtype("bfloat16"))
        with ocp.PyTreeCheckpointer() as checkpointer:
            save_args = {"a": None, "b": [None, half], "n": None}
            checkpointer.save(root / "a", tree, save_args=save_args)
            return checkpointer.restore(root / "a")

    run_both(program, tmp_path)
    args = ours.args.PyTreeSave({"a": jnp.ones(2)}, save_args={"c": ours.SaveArgs()})
    with (
        ours.PyTreeCheckpointer() as checkpointer,
        pytest.raises(ValueError, match=r"save_args .*'c'"),
    ):
        checkpointer.save(tmp_path / "c", args)
