"""Registries of v1's handlers: the same on Orbax and on holdfast."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from holdfast.compat.orbax import v1 as ours_v1
from holdfast.compat.orbax.v1 import options as v1_options
from tests.support.orbax_programs import outcome, run_both

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sharding info not provided"),  # Orbax's own
    pytest.mark.filterwarnings("ignore:.*asyncio.*:DeprecationWarning"),  # Orbax's own
]


class Point:
    def __init__(self, x: int) -> None:
        self.x = x


def _handler(ocp: Any) -> Any:
    class PointHandler(ocp.handlers.CheckpointableHandler[Point, None]):  # type: ignore[misc]
        async def save(self, directory: Any, value: Any) -> Any:
            async def later() -> None:
                folder = await directory.await_creation()
                (folder / "x.txt").write_text(str(value.x))

            return later()

        async def load(self, directory: Any, abstract: Any = None) -> Any:
            async def later() -> Point:
                return Point(int((directory / "x.txt").read_text()))

            return later()

        async def metadata(self, directory: Any) -> Any:
            return None

        def is_handleable(self, value: Any) -> bool:
            return isinstance(value, Point)

        def is_abstract_handleable(self, abstract: Any) -> bool:
            return isinstance(abstract, Point)

    return PointHandler


def test_a_local_registry(tmp_path: Path) -> None:
    """It holds in its context alone, for functions and for a Checkpointer that is given it."""

    def program(ocp: Any, root: Path) -> Any:
        handler = _handler(ocp)
        registry = ocp.handlers.local_registry()
        registry.add(handler).add(ocp.handlers.JsonHandler, checkpointable_name="about")
        items = {"state": {"w": jnp.ones(2)}, "point": Point(7), "about": {"a": [1, None]}}
        context = ocp.Context()
        context.checkpointables.registry = registry
        with context:
            ocp.save_checkpointables(root / "a", items)
            alone = ocp.load_checkpointables(root / "a", {"point": Point(0), "about": None})
        with ocp.training.Checkpointer(root / "b", context=context) as checkpointer:
            checkpointer.save_checkpointables(3, items)
            step = checkpointer.load_checkpointables(3, {"point": Point(0), "state": None})
        assert not ocp.handlers.global_registry().has("about")
        return alone["point"].x, alone["about"], step["point"].x, step["state"]

    run_both(program, tmp_path, v1=True)


def test_entries(tmp_path: Path) -> None:
    """An item, or a class without one, has one entry; a registry may begin with those of others."""

    def program(ocp: Any, root: Path) -> Any:
        handler = _handler(ocp)
        new = ocp.handlers.local_registry
        first = new(include_global_registry=False)
        first.add(handler, checkpointable_name="a", secondary_typestrs=["old"])
        second = new(first)
        return [
            len(first.get_all_entries()),
            first.get("a") is handler,
            [first.has(name) for name in ("a", "b", "state")],
            [second.has(name) for name in ("a", "b", "state")],
            second.get_secondary_typestrs(handler),
            outcome(lambda: first.get("b")),
            outcome(lambda: first.add(handler)),
            outcome(lambda: first.add(ocp.handlers.JsonHandler, checkpointable_name="a")),
            outcome(lambda: first.add("handler")),
        ]

    run_both(program, tmp_path, v1=True)


class Size(Point):
    """Another value than a Point."""


def _handlers(ocp: Any) -> list[Any]:
    point = _handler(ocp)

    class SizeHandler(point):  # type: ignore[misc]
        async def load(self, directory: Any, abstract: Any = None) -> Any:
            async def later() -> Size:
                names = {path.name for path in directory.iterdir()}
                assert names - {"commit_success.txt"} == {"x.txt"}  # the former is Orbax's
                return Size(int((directory / "x.txt").read_text()))

            return later()

        def is_handleable(self, value: Any) -> bool:
            return isinstance(value, Size)

    return [point, SizeHandler]


def test_a_step_knows_its_handlers(tmp_path: Path) -> None:
    """Items are loaded without targets by the handlers that saved them, of several that hold."""

    def program(ocp: Any, root: Path) -> Any:
        context = ocp.Context()
        context.checkpointables.registry = ocp.handlers.local_registry()
        for handler in _handlers(ocp):
            context.checkpointables.registry.add(handler)
        items = {"state": {"w": jnp.ones(2)}, "point": Point(7), "size": Size(8)}
        with ocp.training.Checkpointer(root / "a", context=context) as checkpointer:
            checkpointer.save_checkpointables(3, items)
            found = [
                checkpointer.load_checkpointables(3),
                checkpointer.load_checkpointables(3, dict.fromkeys(items)),
                checkpointer.load_checkpointables(3, {"size": None, "point": None}),
            ]
        return [
            (type(each["point"]).__name__, each["point"].x, type(each["size"]).__name__)
            for each in found
        ]

    assert run_both(program, tmp_path, v1=True) == [("Point", 7, "Size")] * 3


def test_a_handler_that_is_not_there(tmp_path: Path) -> None:
    """The error names the handler that saved the item."""
    registry = ours_v1.handlers.local_registry()
    for handler in _handlers(ours_v1):
        registry.add(handler)
    options = ours_v1.options.CheckpointablesOptions(registry=registry)
    with ours_v1.Context(checkpointables_options=options):
        ours_v1.save_checkpointables(tmp_path / "a", {"point": Point(7)})
    with pytest.raises(ValueError, match=r"'point' is of files.*register_handler"):
        ours_v1.load_checkpointables(tmp_path / "a")
    other = ours_v1.handlers.local_registry()
    other.add(_handlers(ours_v1)[1]).add(type("Third", (registry.get_all_entries()[-1][0],), {}))
    options = ours_v1.options.CheckpointablesOptions(registry=other)
    with (
        ours_v1.Context(checkpointables_options=options),
        pytest.raises(ValueError, match=r"'point' was saved by .*PointHandler.*register_handler"),
    ):
        ours_v1.load_checkpointables(tmp_path / "a")


def test_a_context_inherits_what_its_options_hold() -> None:
    """The very registry, with handlers that no copy could be: they have locks. What is set in the
    context that inherits holds there alone.
    """
    handler = SimpleNamespace(lock=threading.Lock())
    outer = ours_v1.Context(
        checkpointables_options=v1_options.CheckpointablesOptions(registry=handler),
        async_options=v1_options.AsyncOptions(timeout_secs=7),
    )
    inner = ours_v1.Context(outer)
    assert inner.options["checkpointables_options"].registry is handler
    inner.options["async_options"].timeout_secs = 9
    inner.options["pytree_options"].saving.use_ocdbt = False
    assert outer.timeout_s == 7 and inner.timeout_s == 9
    assert not hasattr(outer.options["pytree_options"].saving, "use_ocdbt")
