"""`orbax.checkpoint.checkpoint_utils`, and what of `utils` is asked for."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from holdfast.checkpoint import iterate_steps
from holdfast.checkpoint.agreement.exchange import ask_primary
from holdfast.checkpoint.layouts.detect import find_steps
from holdfast.checkpoint.storage.path import absolute, open_storage
from holdfast.coordination.deadline import Deadline
from holdfast.multihost import coordination_timeout, default_group, sync_global_processes

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

    It is -1 when `timeout` seconds have passed (and `timeout_fn` says so). Every process of a job
    calls it, and gets what the primary finds.
    """
    check_options("wait_for_new_checkpoint", names, NAMES)
    after = None if until_step is None else until_step - 1
    yield next(_steps(absolute(checkpoint_dir), after, timeout, timeout_fn, hold_s=0.0), NONE_CAME)


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

    Ends when `timeout` seconds have passed without one (and `timeout_fn` says so). Every process of
    a job goes through it, and gets what the primary finds.
    """
    check_options("checkpoints_iterator", names, NAMES)
    # Not in the generator, which begins with the loop: the path is that of this call.
    folder = absolute(checkpoint_dir)
    return _at_least_apart(min_interval_secs, _steps(folder, None, timeout, timeout_fn))


def _at_least_apart(interval_s: float, steps: Iterator[int]) -> Iterator[int]:
    for step in steps:
        began = time.monotonic()
        yield step
        time.sleep(max(0.0, interval_s - (time.monotonic() - began)))


NONE_CAME = -1


def _steps(
    folder: str,
    after: int | None,
    timeout: float | None,
    timeout_fn: Callable[[], bool] | None,
    **options: Any,
) -> Iterator[int]:
    """Yields on every process the steps that the primary finds."""
    found = _found(folder, after, math.inf if timeout is None else timeout, timeout_fn, options)
    name = f"holdfast.compat.orbax/steps/{folder}"
    while True:
        step = ask_primary(default_group(), name, lambda: next(found), coordination_timeout())
        if step == NONE_CAME:
            return
        if step is not None:
            yield step
            sync_global_processes(name)  # the primary holds the step for all of them


def _found(
    folder: str,
    after: int | None,
    timeout_s: float,
    timeout_fn: Callable[[], bool] | None,
    options: Mapping[str, Any],
) -> Iterator[int | None]:
    """Yields the newest step as it comes, NONE_CAME at the end, and meanwhile None: the others hear
    of the primary before they give it up.
    """
    deadline = Deadline(timeout_s)
    while True:
        slice_s = min(deadline.remaining_s(), coordination_timeout() / 4)
        for step in iterate_steps(folder, after=after, timeout_s=slice_s, **options):
            yield step
            after = step
            deadline = Deadline(timeout_s)
        if not deadline.passed():
            yield None
        elif timeout_fn is None or timeout_fn():
            yield NONE_CAME
        else:
            deadline = Deadline(timeout_s)


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
