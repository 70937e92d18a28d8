"""Says which processes keep a save of a group waiting, and where in the program each of them is.

Only a coordinator of ours can tell: processes report there which save they are at, and answer with
their stacks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from holdfast.coordination import CoordinationError, StatusClient
from holdfast.coordination.diagnosis.stacks import parse
from holdfast.proto import coordination_pb2, session_pb2

from .group import Group, SaveStage, runtime_indices
from .group_client import group_client_of, named
from .runtime import current_client, current_spec

_FOLDER = "holdfast/late/"
_ANSWER_S = 3.0
# Whose stacks are asked for, and who is named.
_MOST_PLACES = 4
_MOST_NAMED = 8
# For what another process finds out.
_FOUND_MS = 15_000
# The folder of each kind in which this process has told last, by client.
_told: WeakKeyDictionary[Any, dict[str, str]] = WeakKeyDictionary()


@dataclass(frozen=True)
class AwaitedSave:
    """A save that others wait in: its call as the program writes it, and its number with the writer
    that counts it.
    """

    call: str
    writer: int
    number: int

    def has_begun(self, task: session_pb2.TaskStatus) -> bool:
        """Says whether a process may have called it, by what the process last reported.

        A process that saves with several managers has reported of the latest alone.
        """
        values = task.progress.values
        if "save" not in values:
            return False
        return values.get("save_writer") != self.writer or values["save"] >= self.number

    def waits_for(self, task: session_pb2.TaskStatus) -> bool:
        """Says whether the share of a process that lives has not been reported."""
        values = task.progress.values
        is_done = values.get("save_stage", SaveStage.WRITING) != SaveStage.WRITING
        is_here = values.get("save_writer") == self.writer and values.get("save") == self.number
        return task.state == coordination_pb2.CONNECTED and not (is_here and is_done)


def who_is_late(group: Group, save: AwaitedSave, name: str) -> str:
    """Returns who keeps a save waiting, as a sentence; "" where nobody does, or none can tell.

    The first process that asks by this `name` finds out, and the others read it: thousands at once
    must not ask. Blocks for at most 20 s.
    """
    spec = current_spec()
    if spec is None or group.count == 1:
        return ""
    with suppress(CoordinationError):
        client: Any = current_client()
        with StatusClient(spec.coordinator, spec.new_credentials()) as status:
            return tell_once(client, f"{_FOLDER}{name}", lambda: _find(status, group, save))
    return ""


def tell_once(
    client: Any, folder: str, find: Callable[[], str], timeout_ms: int = _FOUND_MS
) -> str:
    """Returns what `find` returns in the first process that asks for this folder of keys.

    Raises CoordinationError, of `find` too, and where its answer does not come in time.
    """
    if not group_client_of(client).insert(f"{folder}/asked", b""):
        return str(client.blocking_key_value_get(f"{folder}/why", timeout_ms))
    why = find()
    client.key_value_set(f"{folder}/why", why)
    _forget_earlier(client, folder)
    return why


def _forget_earlier(client: Any, folder: str) -> None:
    """Deletes the folder of the same kind that this process told in before: nobody asks there."""
    kind = folder.rpartition("/")[0]
    told = _told.setdefault(client, {})
    earlier = told.get(kind)
    told[kind] = folder
    if earlier is not None:
        client.key_value_delete(earlier)


def _find(client: StatusClient, group: Group, save: AwaitedSave) -> str:
    tasks = client.status().tasks
    group_client = group_client_of(current_client())
    late = {
        process: tasks[group_client.task(process)]
        for process in runtime_indices(group)
        if save.waits_for(tasks[group_client.task(process)])
    }
    absent = [process for process, task in late.items() if not save.has_begun(task)]
    chosen = absent or list(late)
    if not chosen:
        return ""
    what = f"not called {save.call}" if absent else f"not written what {save.call} saves"
    has = "has" if len(chosen) == 1 else "have"
    numbers = [late[process].task_id for process in chosen[:_MOST_PLACES]]
    places = _places(client, chosen[:_MOST_PLACES], numbers)
    return f"{_named(chosen)} {has} {what}{places}"


def _named(processes: Sequence[int]) -> str:
    more = len(processes) - _MOST_NAMED
    return named(processes[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _places(client: StatusClient, processes: Sequence[int], tasks: Sequence[int]) -> str:
    """Returns where processes are, each as a part of the sentence."""
    places = {}
    answers = client.stacks(tasks, timeout_s=_ANSWER_S)
    for process, answer in zip(processes, answers, strict=True):
        threads = parse(answer) if isinstance(answer, str) else ()
        if threads and threads[0].place is not None:
            places[process] = threads[0].place.place.removeprefix("<module>, ")
    if len(processes) == 1:
        return "".join(f"; it is in {place}" for place in places.values())
    return "".join(f"; process {process} is in {place}" for process, place in places.items())
