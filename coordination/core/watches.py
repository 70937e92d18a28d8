"""Calls that wait for a version of the tasks newer than the one that they know. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .status import Code, Completions, Status
from .task_table import TaskTable


class TaskWatches:
    """Holds the waiting calls. Call `notify` after each change of the task table."""

    def __init__(self, task_table: TaskTable, completions: Completions) -> None:
        self._task_table = task_table
        self._completions = completions
        self._versions: dict[Any, int] = {}  # call: the version that it knows
        self._shared: dict[object, tuple[int, bytes]] = {}

    def watch(self, call: Any, version: int) -> None:
        """Answers as soon as the tasks are newer than `version`."""
        latest = self._task_table.version
        if version > latest:
            sentence = f"version {version} of the tasks is not yet; the latest is {latest}"
            self._completions.fail(call, Status(Code.INVALID_ARGUMENT, sentence))
        elif version < latest:
            self._completions.succeed(call, latest)
        else:
            self._versions[call] = version

    def notify(self) -> None:
        """Answers all calls that know an older version than the latest."""
        latest = self._task_table.version
        for call in [call for call, version in self._versions.items() if latest > version]:
            del self._versions[call]
            self._completions.succeed(call, latest)

    def shared(self, kind: object, encode: Callable[[], bytes]) -> bytes:
        """Returns the answer of one kind, which `encode` makes once for each version of the
        tasks.
        """
        version, answer = self._shared.get(kind, (-1, b""))
        if version != self._task_table.version:
            answer = encode()
            self._shared[kind] = (self._task_table.version, answer)
        return answer

    def drop(self, call: Any) -> bool:
        """Forgets a call whose client has gone away; returns whether it waited here."""
        return self._versions.pop(call, None) is not None
