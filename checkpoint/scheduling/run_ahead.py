"""Keeps a program that makes steps close to its devices.

jax takes computations before their devices have done the ones before: 32 on CPU, more elsewhere. A
job that is preempted agrees on a step that no process has passed, and what is saved there has to be
computed first. With steps of a second that is half a minute, which a notice may not give.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from holdfast.multihost.group.group import clear_with_attempt

from ..format.tree import is_there

# Arrays that are looked at from either end of a state. A step may leave some as they are.
MOST_LOOKS = 4
# What is gone through for them: a state of NumPy's may have 100,000 leaves, and no array of jax's.
MOST_LEAVES = 256


class RunAhead:
    """Waits for the devices, where a program has made more than `max_steps` steps that they have
    not. For one thread. None: never.

    What it waits for is a small computation that reads an array of the step's state: the array
    itself may be donated to the next step. Of a step without a state it is one on this process's
    first device, which comes after all that the device was given before. Of a process with several
    CPU devices it does not.
    """

    def __init__(self, max_steps: int | None) -> None:
        self._max_steps = max_steps
        self._step: Any = None
        self._has_state = True
        self._marks: deque[Any] = deque()  # of the last steps, each once

    def made(self, step: Any, state: Any = None) -> None:
        """Notes that a step is made, whose computations jax has; may be told of it again, with a
        state. Blocks until the devices have computed the state of `max_steps` steps before.
        """
        if self._max_steps is None:
            return
        has_state = state is not None
        if step != self._step:
            # Whoever makes one step alone needs no mark.
            if self._step is not None:
                self._marks.append(_mark(state))
            self._step = step
        elif has_state and not self._has_state and self._marks:
            self._marks[-1] = _mark(state)
        else:
            return
        self._has_state = has_state
        while len(self._marks) > self._max_steps:
            # The program's own use of what has failed says so.
            mark = self._marks.popleft()
            if mark is not None:
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    mark.block_until_ready()


def _mark(state: Any) -> jax.Array | None:
    """Returns what is there once a state is computed, None where no part of it is seen to be
    computed still.
    """
    # What is wrong with a tree, or with an array, is said by what saves it.
    with contextlib.suppress(Exception):
        pending: Any = _first_on_device() if state is None else _find_pending(state)
        if pending is not None:
            # A mesh that the program has set is of other devices than a shard.
            with jax.set_mesh(None):
                mark: jax.Array = _peek(pending.addressable_data(0))
            return mark
    return None


def _find_pending(state: Any) -> Any:
    for backwards in (False, True):
        leaves = itertools.islice(_leaves(state, backwards=backwards), MOST_LEAVES)
        arrays = (leaf for leaf in leaves if isinstance(leaf, jax.Array))
        for array in itertools.islice(arrays, MOST_LOOKS):
            if not is_there(array):
                return getattr(array, "_base_array", array)  # an array of keys wraps one
    return None


def _leaves(tree: Any, *, backwards: bool) -> Iterator[Any]:
    """Yields the leaves of a tree one by one: flattening a large one may outlast a step."""
    in_order = reversed if backwards else iter
    open_nodes: list[Iterator[Any]] = [iter((tree,))]
    while open_nodes:
        for node in open_nodes[-1]:
            if children := _children(node):
                open_nodes.append(in_order(children))
                break
            yield node
        else:
            open_nodes.pop()


def _children(node: Any) -> Any:
    """Returns what can be gone through either way; nothing for a leaf."""
    if type(node) is dict:  # which jax would sort
        return node.values()
    if type(node) in (list, tuple):
        return node
    known: Any = jax.tree_util.default_registry  # jax does not type it
    flat = known.flatten_one_level(node)
    return () if flat is None else tuple(flat[0])


# The answer is no number: a setting that looks for NaNs would wait for it.
_peek = jax.jit(lambda array: array[(slice(0, 1),) * array.ndim] == 0)


@clear_with_attempt
@functools.cache
def _first_on_device() -> jax.Array:
    with jax.transfer_guard("allow"):
        zero: jax.Array = jax.device_put(np.zeros((), np.int32), jax.local_devices()[0])
    return zero
