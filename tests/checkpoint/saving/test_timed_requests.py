"""Every request of a save ends with the save's time: a store that falls silent holds up nobody for
longer.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

from holdfast.checkpoint import (
    CheckpointManager,
    EveryNSteps,
    KeepLast,
    Local,
    Options,
    SaveFailed,
    register_storage,
    save,
)
from holdfast.checkpoint.storage.bucket import BucketStorage

_numbers = itertools.count()
STATE = {"w": np.arange(1000.0)}


class _Told(BucketStorage):
    """A bucket in memory that notes each request that has no end while it `is_watched`, and where
    it `is_silent` does not answer.
    """

    is_watched = False
    is_silent = False
    silent_from = "\0"  # it falls silent at the first request of a name that contains this
    endless: ClassVar[list[str]] = []

    def _tried(self, name: str, make: Callable[[], Awaitable[Any]]) -> Any:
        if self.silent_from in name:
            type(self).is_silent = type(self).is_watched = True
        if self.is_watched and self._patience.end_s == math.inf:
            self.endless.append(f"{threading.current_thread().name}: {name}")
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), name)
        if self.is_silent:
            time.sleep(max(0.0, self._patience.end_s - time.monotonic()))
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), name)
        return super()._tried(name, make)


@pytest.fixture
def url() -> Iterator[str]:
    register_storage("endless", lambda url, _: _Told(url.replace("endless:", "memory:")))
    yield f"endless://root/{next(_numbers)}"
    _Told.is_watched = _Told.is_silent = False
    _Told.silent_from = "\0"
    _Told.endless.clear()


def test_each_request_of_a_save_has_its_end(url: str, tmp_path: Any) -> None:
    """New steps, one that goes back and one that replaces another; with steps that go, and with
    local ones; and a save without a manager.
    """
    local = Local(tmp_path / "host", save_policy=EveryNSteps(1), replicas=0)
    settings = {"save_policy": EveryNSteps(2), "keep_policy": KeepLast(2), "local": local}
    with CheckpointManager(url, **settings) as manager:  # type: ignore[arg-type]
        for step in range(2, 9):
            manager.save(step, STATE)
            manager.wait_until_finished()
    with CheckpointManager(url, **settings) as manager:  # type: ignore[arg-type]
        manager.restore(6)
        _Told.is_watched = True
        for step in (7, 8, 9, 10):
            manager.save(step, STATE)
            manager.wait_until_finished()
        manager.save(10, STATE, overwrite=True).wait()
        manager.delete(10)
        manager.close()
    assert _Told.endless == []


def test_a_store_that_falls_silent_ends_all_in_time(url: str) -> None:
    """The save fails with its time, and what it has written is left to a sweep: `close` waits for
    nothing that has no end.
    """
    manager = CheckpointManager(url, options=Options(save_timeout_s=1))
    manager.save(1, STATE).wait()
    _Told.silent_from = ".safetensors"
    with pytest.raises(SaveFailed):
        manager.save(2, STATE).wait()
    manager.close()
    assert _Told.is_silent and _Told.endless == []


def test_a_save_without_a_manager_ends_in_time(url: str) -> None:
    """So does what gives its claim up, and sweeps."""
    _Told.silent_from = ".safetensors"
    with pytest.raises(SaveFailed):
        save(url, STATE, timeout_s=1)
    assert _Told.is_silent and _Told.endless == []
