"""A save that is called off: of one folder, and of a root of steps."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from holdfast.checkpoint import SaveCancelled, SaveHandle
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.compat import orbax as ours
from holdfast.compat.orbax import v1 as ours_v1

TREE = {"w": jnp.arange(4.0)}


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Holds the bytes of saves until one is called off, or the event is set."""
    opened = threading.Event()
    write = LocalStorage.write
    cancel = SaveHandle.cancel

    def write_later(self: LocalStorage, name: str, *args: Any) -> None:
        if name.endswith(".safetensors"):
            assert opened.wait(60)
        write(self, name, *args)

    def cancel_and_open(self: SaveHandle) -> bool:
        in_time = cancel(self)
        opened.set()
        return in_time

    monkeypatch.setattr(LocalStorage, "write", write_later)
    monkeypatch.setattr(SaveHandle, "cancel", cancel_and_open)
    return opened


def test_a_checkpointer_calls_its_save_off(tmp_path: Path, held: threading.Event) -> None:
    """Nothing of it stays, no later call raises, and the next save goes on. A call that comes too
    late changes nothing.
    """
    with ours.StandardCheckpointer() as checkpointer:
        checkpointer.cancel()
        checkpointer.save(tmp_path / "a", TREE)
        checkpointer.cancel()
        checkpointer.check_for_errors()
        checkpointer.wait_until_finished()
        assert not list(tmp_path.glob("a/**/*.*"))
        checkpointer.save(tmp_path / "a", TREE)
        checkpointer.wait_until_finished()
        checkpointer.cancel()
        assert checkpointer.restore(tmp_path / "a")["w"].shape == (4,)


def test_a_late_call_leaves_the_checkpoint(tmp_path: Path, held: threading.Event) -> None:
    """The folder is marked as a checkpointer's, as after any save."""
    held.set()
    with ours.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", TREE)
        handle = checkpointer._in_flight
        assert handle is not None
        handle.wait()
        checkpointer.cancel()
    assert (tmp_path / "a" / "checkpoint").is_file()


def test_a_step_is_called_off(tmp_path: Path, held: threading.Event) -> None:
    """`cancel` of v1 ends the save in flight; with a step it deletes that step too, where it is
    there.
    """
    with ours_v1.training.Checkpointer(tmp_path) as checkpointer:
        response = checkpointer.save_async(0, TREE)
        checkpointer.cancel()
        assert response is not None
        with pytest.raises(SaveCancelled):
            response.result()
        assert list(checkpointer.checkpoints) == []
        checkpointer.save(1, TREE)
        checkpointer.save(2, TREE)
        checkpointer.cancel()
        checkpointer.cancel(1)
        checkpointer.cancel(7)
        assert [each.step for each in checkpointer.checkpoints] == [2]
        held.clear()
        checkpointer.save_async(3, TREE)
        checkpointer.cancel(3)
        assert [each.step for each in checkpointer.checkpoints] == [2]
