"""Has a process that outlives its attempt come out of the attempt, or make room for another.

When the attempt is over, a call of jax may wait for a process that is dead: by way of a neighbour,
which keeps its sockets, or in a message of gloo's that was half here, for which gloo wakes nobody.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time

import jax

from holdfast.coordination import CoordinationClient, StatusClient
from holdfast.coordination.diagnosis.stacks import Thread, parse
from holdfast.coordination.vitals import stacks
from holdfast.proto.session_pb2 import NextAttempt

from ..group.group import SaveStage
from ..spec import ProcessSpec
from . import gloo

_log = logging.getLogger(__name__)

STUCK_EXIT_CODE = 94
"""A process that cannot outlive its attempt ends with this. Its launcher starts it anew."""

_LOOK_S = 0.1
_STUCK_S = 1.0  # in one place
_SURELY_STUCK_S = 0.2  # where a collective is known not to end
_ANSWER_S = 1.0
_COMPILER = os.path.join("jax", "_src", "compiler.py")


def ends_collectives() -> bool:
    """Returns whether a collective of this process ends when its attempt is over. The backend has
    to be up.
    """
    config = jax.config
    if jax.default_backend() == "cpu":
        return getattr(config, "jax_cpu_collectives_implementation", "") == "gloo"
    aborts = os.environ.get("XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE", "0") == "1"
    recovers = bool(getattr(config, "jax_enable_recoverability", False))
    return jax.default_backend() == "gpu" and aborts and recovers


class Departure:
    """The way of the main thread out of an attempt that it outlives."""

    def __init__(self, spec: ProcessSpec, client: CoordinationClient) -> None:
        self._spec = spec
        self._client = client
        self._patience_s = _STUCK_S if ends_collectives() else _SURELY_STUCK_S
        self._lock = threading.Lock()
        self._left = threading.Event()

    def leave(self) -> None:
        """Says that the thread is out. From here on a socket may be the next attempt's."""
        with self._lock:
            self._left.set()

    def see_off(self, following: NextAttempt) -> None:
        """Ends what the thread waits for, until it is out; ends this process where it sits in one
        place, unless a save needs it. Raises CoordinationError where the coordinator is gone.
        """
        before = Thread("", ())
        since = 0.0
        while not self._left.is_set():
            self._end_collectives()
            now = time.monotonic()
            main = _main_thread()
            if main.frames != before.frames:
                before = main
                since = now
            elif now - since >= self._patience_s and self._may_end(main, following):
                self._end(main)
            self._left.wait(_LOOK_S)

    def _end_collectives(self) -> None:
        """Ends those that wait, by what gloo has published in this attempt."""
        entries = self._client.key_value_dir_get_bytes(gloo.KEYS)
        found = (gloo.published(value) for _, value in entries)
        addresses = {address for address in found if address is not None}
        with self._lock:
            if not self._left.is_set():
                gloo.shut_down(addresses)

    def _may_end(self, main: Thread, following: NextAttempt) -> bool:
        """Returns whether the thread sits in what does not end, and nobody needs this process."""
        if any(frame.file.endswith(_COMPILER) for frame in main.frames):
            return False  # it ends by itself, and the next attempt finds in the cache what came out
        if _unwinds() and not main.waits:
            return False  # code of the program's own, which has `rejoin_timeout_s`
        return self._spec.process_id not in following.saving or self._is_saved()

    def _is_saved(self) -> bool:
        """Returns whether the save that could be committed has ended."""
        with StatusClient(
            self._spec.coordinator, self._spec.new_credentials(), timeout_s=_ANSWER_S
        ) as client:
            tasks = client.status().tasks
        return all(
            task.progress.values.get("save_stage", SaveStage.SETTLED) == SaveStage.SETTLED
            for task in tasks
            if task.task_id == self._spec.process_id
        )

    def _end(self, main: Thread) -> None:
        with self._lock:
            if self._left.is_set() or _main_thread().frames != main.frames:
                return
            where = "" if main.place is None else f": it is in {main.place.place}"
            _log.warning("this process cannot stay%s", where)
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            os._exit(STUCK_EXIT_CODE)


def _main_thread() -> Thread:
    """Returns where the main thread is, which outlives attempts."""
    return parse(stacks())[0]


def _unwinds() -> bool:
    """Returns whether the main thread handles an error, in a `finally` or the like."""
    # An exception, or before 3.12 a triple.
    handled: object = sys._current_exceptions().get(threading.main_thread().ident or 0)
    return handled not in (None, (None, None, None))
