"""Values of v1 that write their own files, and its handlers: the same on Orbax and on holdfast."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from holdfast.compat.orbax import v1 as ours_v1
from holdfast.compat.orbax.v1 import registry
from tests.support.orbax_programs import run_both

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sharding info not provided"),  # Orbax's own
    pytest.mark.filterwarnings("ignore:.*asyncio.*:DeprecationWarning"),  # Orbax's own
]


@pytest.fixture(autouse=True)
def unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins without v1's handlers of others."""
    monkeypatch.setattr(registry, "_global", registry._new_registry())


class Counter:
    """A stateful checkpointable: half of it is written at once, half in the background."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    async def save(self, directory: Any) -> Any:
        async def later() -> None:
            folder = await directory.await_creation()
            (folder / "count.txt").write_text(str(self.count))

        return later()

    async def load(self, directory: Any) -> Any:
        async def later() -> None:
            self.count = int((directory / "count.txt").read_text())

        return later()


def test_stateful_checkpointables(tmp_path: Path) -> None:
    """They write and read their own files, beside trees, in single checkpoints and in steps."""

    def program(ocp: Any, root: Path) -> Any:
        assert isinstance(Counter(), ocp.StatefulCheckpointable) and not isinstance(
            {}, ocp.StatefulCheckpointable
        )
        ocp.save_checkpointables(root / "a", {"state": {"w": jnp.ones(2)}, "counter": Counter(3)})
        fresh = Counter()
        found = ocp.load_checkpointables(root / "a", {"counter": fresh})
        assert found["counter"] is fresh
        counts = [fresh.count]
        with ocp.training.Checkpointer(root / "b") as checkpointer:
            for step in (1, 2):
                checkpointer.save_checkpointables(
                    step, {"state": {"n": step}, "counter": Counter(step * 10)}
                )
            for step in (1, None):
                fresh = Counter()
                checkpointer.load_checkpointables(step, {"state": None, "counter": fresh})
                counts.append(fresh.count)
        return counts

    assert run_both(program, tmp_path, v1=True) == [3, 10, 20]
    for target in ({"w": 1}, None):
        with pytest.raises(
            ValueError,
            match=(
                r"item 'counter' is of files, and .*expected the object that saved them, or a"
                r" handler"
            ),
        ):
            ours_v1.load_checkpointables(tmp_path / "holdfast/a", {"counter": target})


async def in_a_loop(path: Path) -> int:
    ours_v1.save_checkpointables(path, {"counter": Counter(4)})
    fresh = Counter()
    ours_v1.load_checkpointables(path, {"counter": fresh})
    return fresh.count


def test_a_caller_may_be_in_an_event_loop(tmp_path: Path) -> None:
    """As in a notebook."""
    assert asyncio.run(in_a_loop(tmp_path / "a")) == 4


def test_registered_v1_handlers(tmp_path: Path) -> None:
    """The last that can handle a value does; its `load` is told what is wanted."""

    def program(ocp: Any, root: Path) -> Any:
        class Point:
            def __init__(self, x: int) -> None:
                self.x = x

        class PointHandler(ocp.handlers.CheckpointableHandler):  # type: ignore[misc]
            async def save(self, directory: Any, checkpointable: Any) -> Any:
                async def later() -> None:
                    ((await directory.await_creation()) / "x").write_text(str(checkpointable.x))

                return later()

            async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Any:
                async def later() -> Any:
                    return Point(
                        int((directory / "x").read_text())
                        + (abstract_checkpointable.x if abstract_checkpointable else 0)
                    )

                return later()

            async def metadata(self, directory: Any) -> Any:
                return None

            def is_handleable(self, checkpointable: Any) -> bool:
                return isinstance(checkpointable, Point)

            def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
                return isinstance(abstract_checkpointable, Point)

        ocp.handlers.register_handler(PointHandler)
        ocp.save_checkpointables(root / "a", {"point": Point(5), "state": {"w": jnp.ones(2)}})
        return [
            ocp.load_checkpointables(root / "a", {"point": target})["point"].x
            for target in (Point(100), None)
        ]

    assert run_both(program, tmp_path, v1=True) == [105, 5]
