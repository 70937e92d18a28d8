"""Says which processes keep a save of a group waiting, and where in the program each of them is.

Only a coordinator of ours can tell: processes report there which save they are at, and answer with
their stacks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from holdfast.coordination import CoordinationError, StatusClient
from holdfast.coordination.diagnosis.stacks import parse
from holdfast.proto import coordination_pb2, session_pb2

from .group import Group, SaveStage, runtime_indices
from .group_client import Deadline, GroupClient, named
from .runtime import current_group_client, current_spec

_FOLDER = "holdfast/late/"
_ANSWER_S = 3.0
# Whose stacks are asked for, and who is named.
_MOST_PLACES = 4
_MOST_NAMED = 8
# For what another process finds out.
_FOUND_S = 15.0
# The folder of each kind in which this process has told last, by client.
_told: WeakKeyDictionary[GroupClient, dict[str, str]] = WeakKeyDictionary()


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
    with (
        suppress(CoordinationError),
        StatusClient(spec.coordinator, spec.new_credentials()) as status,
    ):
        group_client = current_group_client()
        folder = f"{_FOLDER}{name}"
        return tell_once(
            group_client, folder, lambda: _find(status, group_client, group, save), _FOUND_S
        )
    return ""


def tell_once(
    group_client: GroupClient, folder: str, find: Callable[[], str], timeout_s: float
) -> str:
    """Returns what `find` returns in the first process that asks for this folder of keys; "" where
    its answer does not come in time. Raises CoordinationError, of `find` too.
    """
    if not group_client.insert(f"{folder}/asked", b""):
        answer = group_client.wait(f"{folder}/why", Deadline(timeout_s))
        return "" if answer is None else answer.decode()
    why = find()
    group_client.set(f"{folder}/why", why.encode())
    # Nobody asks any more in the folder of the same kind that this process told in before.
    kind = folder.rpartition("/")[0]
    told = _told.setdefault(group_client, {})
    if kind in told:
        group_client.delete(told[kind])
    told[kind] = folder
    return why


def _find(client: StatusClient, group_client: GroupClient, group: Group, save: AwaitedSave) -> str:
    tasks = client.status().tasks
    everybody = {process: tasks[group_client.task(process)] for process in runtime_indices(group)}
    late = {process: task for process, task in everybody.items() if save.waits_for(task)}
    absent = [process for process, task in late.items() if not save.has_begun(task)]
    chosen = absent or list(late)
    if not chosen:
        return ""
    what = f"not called {save.call}" if absent else f"not written what {save.call} saves"
    has = "has" if len(chosen) == 1 else "have"
    asked = {process: late[process].task_id for process in chosen[:_MOST_PLACES]}
    return f"{named(chosen, _MOST_NAMED)} {has} {what}{_places(client, asked)}"


def _places(client: StatusClient, asked: Mapping[int, int]) -> str:
    """Returns where processes are, by their task ids, each as a part of the sentence."""
    said = ""
    answers = client.stacks(list(asked.values()), timeout_s=_ANSWER_S)
    for process, answer in zip(asked, answers, strict=True):
        threads = parse(answer) if isinstance(answer, str) else ()
        if threads and threads[0].place is not None:
            who = "it" if len(asked) == 1 else f"process {process}"
            said += f"; {who} is in {threads[0].place.place.removeprefix('<module>, ')}"
    return said
