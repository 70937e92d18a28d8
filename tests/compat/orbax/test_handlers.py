"""Handlers of one's own: the same classes save and restore on Orbax and on
holdfast.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as real
import pytest

from holdfast.checkpoint import SaveFailed, load, structure, verify
from holdfast.compat import orbax as ours
from tests.support.orbax_programs import run_both

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sharding info not provided"),  # Orbax's own
    pytest.mark.filterwarnings("ignore:.*asyncio.*:DeprecationWarning"),  # Orbax's own
]


def make_words(ocp: Any) -> tuple[Any, Any, Any]:
    """Returns a handler of lists of words, and the arguments that it is registered with."""

    class WordsHandler(ocp.CheckpointHandler):  # type: ignore[misc]
        def save(self, directory: Any, args: Any) -> None:
            if args.item == ["bad"]:
                raise OSError("no such words")
            (directory / "deep").mkdir()
            (directory / "deep" / "words.txt").write_text(args.separator.join(args.item))
            (directory / "about.json").write_text(json.dumps({"separator": args.separator}))

        def restore(self, directory: Any, args: Any) -> Any:
            separator = json.loads((directory / "about.json").read_text())["separator"]
            return (directory / "deep" / "words.txt").read_text().split(separator)[: args.most]

    @ocp.args.register_with_handler(WordsHandler, for_save=True)
    @dataclasses.dataclass
    class WordsSave(ocp.args.CheckpointArgs):  # type: ignore[misc]
        item: Any
        separator: str = " "

    @ocp.args.register_with_handler(WordsHandler, for_restore=True)
    @dataclasses.dataclass
    class WordsRestore(ocp.args.CheckpointArgs):  # type: ignore[misc]
        item: Any = None
        most: int | None = None

    return WordsHandler, WordsSave, WordsRestore


def test_registered_handlers_save_and_restore_items(tmp_path: Path) -> None:
    """By their arguments, by the item that they are given for, and alone in a folder."""

    def program(ocp: Any, root: Path) -> Any:
        handler, save, restore = make_words(ocp)
        args = ocp.args
        assert args.get_registered_handler_cls(save) is handler and args.get_registered_args_cls(
            handler
        ) == (save, restore)
        assert args.has_registered_args(handler) and not args.has_registered_args(
            ocp.CheckpointHandler
        )
        with ocp.CheckpointManager(root / "a") as manager:
            manager.save(
                1,
                args=args.Composite(
                    words=save(["a", "b", "c"], "-"), state=args.StandardSave({"w": jnp.ones(2)})
                ),
            )
            manager.wait_until_finished()
            found = [
                manager.restore(1, args=args.Composite(words=restore(most=most)))["words"]
                for most in (None, 2)
            ]
        with ocp.CheckpointManager(root / "b", item_handlers={"words": handler()}) as manager:
            manager.save(1, args=args.Composite(words=save(["x"])))
            manager.wait_until_finished()
            found += [
                manager.restore(1)["words"],
                manager.restore(1, args=args.Composite(words=restore()))["words"],
            ]
        with ocp.Checkpointer(handler()) as checkpointer:
            checkpointer.save(root / "c", args=save(["m", "n"]))
            found += [checkpointer.restore(root / "c", args=restore())]
        with ocp.CheckpointManager(
            root / "e", ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
        ) as manager:  # a checkpointer is no handler
            manager.save(1, {"w": jnp.ones(2)})
            manager.wait_until_finished()
            found += [manager.restore(1)]
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler(words=handler())) as checkpointer:
            checkpointer.save(root / "d", args.Composite(words=save(["p"])))
            found += [checkpointer.restore(root / "d", args.Composite(words=restore()))["words"]]
        return found

    assert run_both(program, tmp_path)[0] == ["a", "b", "c"]
    assert (
        verify(tmp_path / "holdfast/a").files == 3
        and structure(tmp_path / "holdfast/a").items["words"].kind == "files"
    )


def test_handlers_with_futures(tmp_path: Path) -> None:
    """What `async_save` returns is waited for."""

    def program(ocp: Any, root: Path) -> Any:
        class Later:
            def __init__(self, path: Any, text: str) -> None:
                self._path = path
                self._text = text

            def result(self, timeout: int | None = None) -> None:
                self._path.write_text(self._text)

        class Handler(ocp.AsyncCheckpointHandler):  # type: ignore[misc]
            async def async_save(self, directory: Any, args: Any) -> Any:
                await asyncio.sleep(0)
                return [Later(directory / "text", args.item)]

            def save(self, directory: Any, args: Any) -> None:
                raise AssertionError("it was called")

            def restore(self, directory: Any, args: Any) -> Any:
                return (directory / "text").read_text()

        @ocp.args.register_with_handler(Handler, for_save=True, for_restore=True)
        @dataclasses.dataclass
        class Text(ocp.args.CheckpointArgs):  # type: ignore[misc]
            item: Any = None

        with ocp.CheckpointManager(root) as manager:
            manager.save(1, args=ocp.args.Composite(text=Text("hello")))
            manager.wait_until_finished()
            return manager.restore(1, args=ocp.args.Composite(text=Text()))["text"]

    assert run_both(program, tmp_path) == "hello"


def test_a_handler_that_throws_leaves_no_step(tmp_path: Path) -> None:
    """The error names the item and the process."""
    _, save, _ = make_words(ours)
    with ours.CheckpointManager(tmp_path) as manager:
        with pytest.raises(
            SaveFailed,
            match=r"item 'words' was not written by its handler on process 0: .*no such words",
        ):
            manager.save(
                1,
                args=ours.args.Composite(
                    words=save(["bad"]), state=ours.args.StandardSave({"x": 1})
                ),
            )
        assert manager.all_steps() == []
        assert manager.save(2, args=ours.args.Composite(words=save(["good"])))


def test_items_of_orbaxs_handlers_are_read(tmp_path: Path) -> None:
    """What the handler wrote with Orbax, it reads here; without it the item is refused, or left to
    holdfast as files.
    """
    _, save, _ = make_words(real)
    with real.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=real.args.Composite(words=save(["a", "b"])))
        manager.wait_until_finished()
    handler, _, restore = make_words(ours)
    with ours.CheckpointManager(tmp_path, item_handlers={"words": handler()}) as manager:
        assert (
            manager.restore(1, args=ours.args.Composite(words=restore()))["words"]
            == ["a", "b"]
            == manager.restore(1)["words"]
        )
    with ours.CheckpointManager(tmp_path, item_names=("words",)) as manager:
        with pytest.raises(
            NotImplementedError,
            match=r"item 'words', of a handler.*item_handlers=\{'words': handler\}.*from-orbax",
        ):
            manager.restore(1, args=ours.args.Composite(words=ours.args.StandardRestore()))
    assert load(tmp_path, item="words")["deep/words.txt"] == b"a b"
