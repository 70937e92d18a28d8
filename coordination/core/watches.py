"""Calls that wait for news of the tasks: a newer version of them, or an error that is everyone's.
Pure.
"""

from __future__ import annotations

from ..limits import Config
from .calls import Call, Line
from .status import TASK, Changes, Code, Status
from .task_table import Task, TaskState, TaskTable


class TaskWatches:
    """Holds the calls that wait for a newer version than the one that they know. Call `notify`
    after changes of the task table.
    """

    def __init__(self, task_table: TaskTable) -> None:
        self._task_table = task_table
        self._line = Line()
        self._known = -1  # the newest version that one of them knows

    def watch(self, call: Call, version: int) -> None:
        """Answers as soon as the tasks are newer than `version`."""
        latest = self._task_table.version
        if version > latest:
            sentence = f"version {version} of the tasks is not yet; the latest is {latest}"
            call.refuse(Code.INVALID_ARGUMENT, sentence)
        elif version < latest:
            call.succeed(latest)
        else:
            self.notify()
            self._known = latest
            self._line.enter(call)

    def notify(self) -> None:
        """Answers all calls where there is a newer version than the one that they know."""
        if self._task_table.version > self._known:
            self._line.succeed(self._task_table.version)


class Polls:
    """Holds the calls that wait for an error, and the first `error` that is everyone's."""

    def __init__(self, config: Config, task_table: TaskTable, changes: Changes) -> None:
        self._config = config
        self._task_table = task_table
        self._changes = changes
        self._line = Line()
        self.error: Status | None = None

    def load(self, error: Status | None) -> None:
        """Puts in what a journal holds."""
        self.error = error

    def propagate(self, error: Status) -> None:
        """Makes an error everyone's, unless the job is recoverable."""
        if self._config.recoverable:
            return
        if self.error is None:
            self.error = error
            # the journal writes the job's error when it writes a task
            self._changes.mark(TASK, error.source_task or 0)
        self._line.fail(error)

    def end(self, task: Task) -> None:
        """Ends the call of a task that is gone."""
        if (poll := self._line.get(task.task_id)) is not None:
            over = Status(Code.CANCELLED, f"process {task.task_id} has shut down")
            poll.fail(task.error or over)

    def poll(self, call: Call) -> None:
        """Answers with the first error that is everyone's; never with success, which would crash
        jaxlib's client.
        """
        task = self._task_table.tasks[call.task_id]
        if (error := task.error or self.error) is not None:
            call.fail(error)
        elif task.state is not TaskState.CONNECTED:
            sentence = (
                f"process {call.task_id} is not registered; expected a registration before a poll"
            )
            call.refuse(Code.FAILED_PRECONDITION, sentence)
        elif self._config.survivable:
            sentence = "errors are reported at the next call: the service may be restarted"
            call.refuse(Code.CANCELLED, sentence)
        else:
            self._line.replace(call)
