"""The last words of processes that an exception ends, and that their other threads or exit hooks
keep, and of those that leave as a notice asks them to.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from holdfast.coordination import CoordinationError, StatusClient
from holdfast.coordination.names import LAST_WORDS
from holdfast.coordination.vitals import ENDS_WITH, LEAVES_AS_ASKED
from holdfast.multihost.group.group import SaveStage
from holdfast.proto import session_pb2

from ..supervisor.job import DONE, NO_SAVE, PREEMPTED, SavePosition

RAISED = 1
"""The exit code of a Python program that an exception ends."""

_WAIT_S = 60.0  # at one call: a connection that has broken in silence is made anew
_AGAIN_S = 2.0
_LOOK_S = 0.5


class Grace:
    """How long such processes have: `grace_s`, after a save that is in flight for at most
    `commit_grace_s`.
    """

    def __init__(self, grace_s: float, commit_grace_s: float) -> None:
        self._grace_s = grace_s
        self._commit_grace_s = commit_grace_s
        self._raised_s: dict[int, float] = {}  # when each was first heard of
        self._saved_s: dict[int, float] = {}

    def is_over(self, process: int, position: SavePosition) -> bool:
        """Returns whether a process that has raised has had its time."""
        now_s = time.monotonic()
        raised_s = self._raised_s.setdefault(process, now_s)
        saves = position.stage is not SaveStage.SETTLED
        if saves and now_s - raised_s < self._commit_grace_s:
            self._saved_s[process] = now_s
            return False
        return now_s - self._saved_s.get(process, raised_s) >= self._grace_s

    def forget(self, process: int) -> None:
        """Takes back that a process has raised."""
        self._raised_s.pop(process, None)
        self._saved_s.pop(process, None)


def save_position(task: session_pb2.TaskStatus) -> SavePosition:
    """Returns how far a process says that it has come in saving."""
    values = task.progress.values
    if "save_stage" not in values:
        return NO_SAVE
    return SavePosition(int(values["save"]), SaveStage(int(values["save_stage"])))


class RaisedWatch:
    """Waits, until `close`, to hear from the coordinator that an exception ends one process, or
    that it leaves as a notice has asked it to.

    Calls `end` with what the process says where it has not ended by itself in its time. Only then
    is the status of the whole job asked for: a job may have thousands of such watches. What a
    former life of the process has said does not count once the coordinator has forgotten it.
    """

    def __init__(
        self, address: str, process: int, end: Callable[[str], None], grace: Grace
    ) -> None:
        self._process = process
        self._end = end
        self._grace = grace
        self._is_ended = False
        self._as_asked = False
        self._client = StatusClient(address, timeout_s=1.0)
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="holdfast-raised", daemon=True).start()

    def said(self) -> str:
        """Returns what the process says of the exception that ends it, "" where none does."""
        words = ""
        with contextlib.suppress(CoordinationError):  # gone: it has nothing to tell any more
            words = self._words()
        self._as_asked = self._as_asked or words == LEAVES_AS_ASKED
        said = words.partition("\n")[0]
        return said.removeprefix(ENDS_WITH) if said.startswith(ENDS_WITH) else ""

    def _words(self) -> str:
        told = dict(self._client.key_value_dir_get_bytes(LAST_WORDS))
        return told.get(f"{LAST_WORDS}/{self._process}", b"").decode()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._client.wait_for_key(f"{LAST_WORDS}/{self._process}", timeout_s=_WAIT_S)
            except CoordinationError:
                self._closed.wait(_AGAIN_S)
                continue
            said = self.said()
            if self._as_asked:
                return
            while not self._closed.wait(_LOOK_S):
                if self._is_forgotten():
                    self._grace.forget(self._process)
                    break
                if self._grace.is_over(self._process, self._position()):
                    self._is_ended = True
                    self._end(said)
                    return

    def _is_forgotten(self) -> bool:
        with contextlib.suppress(CoordinationError):
            return not self._words()
        return False  # whoever had said it is not taken back by a coordinator that is gone

    def _position(self) -> SavePosition:
        with contextlib.suppress(CoordinationError):  # gone: nothing can be committed any more
            return save_position(self._client.status().tasks[self._process])
        return NO_SAVE

    def code(self, code: int) -> int:
        """Returns what a command's exit code says of the process: a pipe ends with that of its last
        command, some shells with 0.
        """
        if self._is_ended or (code == DONE and self.said()):
            return RAISED
        return PREEMPTED if code == DONE and self._as_asked else code

    def close(self) -> None:
        """Stops waiting."""
        self._closed.set()
        self._client.close()
