"""`orbax.checkpoint.checkpoint_utils`, and what of `utils` is asked for."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from holdfast.checkpoint import iterate_steps, wait_for_new_step
from holdfast.checkpoint.layouts.detect import find_steps
from holdfast.checkpoint.storage.path import absolute, open_storage

from .args import ArrayRestoreArgs, RestoreArgs
from .handling.items import PLACEHOLDER  # noqa: F401
from .metadata import ScalarMetadata, StringMetadata
from .refusals import PATHS, check_options, refuse, refusing

# How steps are called, and where snapshots go: of no effect, steps are found by their numbers.
NAMES = (
    "ignore_snapshot_errors set_immutable snapshot_dir step_format_fixed_length step_name_format"
    " step_prefix"
)


class _Durations:
    """When the last checkpoint was begun: at first, when the program was."""

    last_s = time.time()

    def record(self, began_s: float) -> None:
        jax.monitoring.record_event_duration_secs(
            "/jax/checkpoint/write/duration_since_last_checkpoint_secs", began_s - self.last_s
        )
        self.last_s = began_s


_durations = _Durations()


def record_saved_duration(checkpoint_start_time: float) -> None:
    """Tells jax's listeners how much of a program a checkpoint saves: since the one before it."""
    _durations.record(checkpoint_start_time)


def construct_restore_args(
    target: Any,
    sharding_tree: Any = None,
    set_global_shape: bool = True,
    support_layout: bool = False,
    strict: bool = True,
) -> Any:
    """Returns the arguments that restore each leaf as `target` (or its metadata) is.

    Shardings are those of `sharding_tree` where given.
    """
    refuse("construct_restore_args", "pass shardings", support_layout=support_layout)

    def of_leaf(leaf: Any, sharding: Any) -> RestoreArgs:
        if isinstance(leaf, ScalarMetadata):
            return RestoreArgs(type(leaf.dtype.type(0).item()), leaf.dtype)
        if isinstance(leaf, StringMetadata):
            return RestoreArgs(str)
        if isinstance(leaf, np.ndarray):
            return RestoreArgs(np.ndarray, leaf.dtype)
        if not hasattr(leaf, "shape") or isinstance(leaf, np.generic):
            return RestoreArgs(type(leaf))
        sharding = sharding or leaf.sharding
        if sharding is None:
            return RestoreArgs(np.ndarray, leaf.dtype)
        shape = tuple(leaf.shape) if set_global_shape else None
        return ArrayRestoreArgs(
            dtype=leaf.dtype,
            sharding=sharding,
            global_shape=shape,
            shape=shape,
            strict=strict,
        )

    if sharding_tree is None:
        return jax.tree.map(lambda leaf: of_leaf(leaf, None), target)
    return jax.tree.map(of_leaf, target, sharding_tree)


@contextlib.contextmanager
def wait_for_new_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    *,
    until_step: int | None = None,
    seconds_to_sleep: int = 1,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
    **names: Any,
) -> Iterator[int]:
    """Blocks until there is a step (of at least `until_step`); is a context of the newest.

    It is -1 when `timeout` seconds have passed.
    """
    check_options("wait_for_new_checkpoint", names, NAMES)
    refuse("wait_for_new_checkpoint", "pass timeout, in seconds", timeout_fn=timeout_fn)
    after = None if until_step is None else until_step - 1
    timeout_s = math.inf if timeout is None else timeout
    step = wait_for_new_step(checkpoint_dir, after, timeout_s=timeout_s)
    yield -1 if step is None else step


def checkpoints_iterator(
    checkpoint_dir: str | os.PathLike[str],
    *,
    min_interval_secs: int = 0,
    seconds_to_sleep: int = 1,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
    **names: Any,
) -> Iterator[int]:
    """Yields each newest step as it appears.

    Ends when `timeout` seconds have passed without one (and `timeout_fn` says so).
    """
    check_options("checkpoints_iterator", names, NAMES)
    # Not in the generator, which begins with the loop: the path is that of this call.
    folder = absolute(checkpoint_dir)
    return _checkpoints(folder, min_interval_secs, timeout, timeout_fn)


def _checkpoints(
    folder: str,
    min_interval_s: float,
    timeout: float | None,
    timeout_fn: Callable[[], bool] | None,
) -> Iterator[int]:
    last: int | None = None
    timeout_s = math.inf if timeout is None else timeout
    while True:
        began = time.monotonic()
        for step in iterate_steps(folder, after=last, timeout_s=timeout_s):
            last = step
            yield step
            time.sleep(max(0.0, min_interval_s - (time.monotonic() - began)))
            began = time.monotonic()
        if timeout_fn is None or timeout_fn():
            return


def checkpoint_steps(
    checkpoint_dir: str | os.PathLike[str], single_host_load_and_broadcast: bool = False
) -> list[int]:
    """Returns the finished steps of a root, ascending."""
    return list(find_steps(open_storage(checkpoint_dir)))


def any_checkpoint_step(checkpoint_dir: str | os.PathLike[str]) -> int | None:
    """Returns a finished step of a root, None where there is none."""
    return next(iter(checkpoint_steps(checkpoint_dir)), None)


REFUSED = "STANDARD_ARRAY_TYPES get_snapshot_dir_from_step_dir restore_args_from_target"
__getattr__ = refusing(__name__, PATHS, REFUSED)
