"""Who a request says that it is from: read off the fields that its message has."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

_NUMBERS = ("source_task_id", "requesting_task_id", "node_id", "process_id")
_TASKS = ("source_task", "requesting_task", "error_origin")


class Claim(NamedTuple):
    """A caller. The task is None where its incarnation alone names it, and -1 where nothing
    does.
    """

    task_id: int | None
    incarnation: int = 0
    service_incarnation: int | None = None


@functools.cache
def _fields_of(kind: Any) -> tuple[str, str]:
    """Returns the fields of a kind of message that name its caller by a number, or as a task."""
    empty = kind()
    number = next((name for name in _NUMBERS if hasattr(empty, name)), "")
    # A repeated field asks about tasks, in nobody's name.
    single = (name for name in _TASKS if hasattr(getattr(empty, name, None), "task_id"))
    return number, next(single, "")


def claim_of(request: Any) -> Claim:
    """Returns who a request says that it is from."""
    number, task = _fields_of(request.__class__)
    incarnations = getattr(request, "incarnations", None)
    task_id = -1 if incarnations is None else None
    if number:
        task_id = getattr(request, number)
    elif task:
        task_id = getattr(request, task).task_id
    if incarnations is None:
        return Claim(task_id, getattr(request, "incarnation", 0))
    return Claim(task_id, incarnations.task_incarnation, incarnations.service_incarnation)
