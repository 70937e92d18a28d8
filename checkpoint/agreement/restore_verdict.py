"""Restores end alike on all processes of a group: one small message of each to the primary, and its
verdict to all.

Whoever fails says so instead of leaving the others to train on, or to wait in a collective that it
never enters. Every process of a group calls the same, in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from holdfast.coordination import HoldfastError
from holdfast.multihost import Group

from ..errors import (
    CheckpointError,
    Corrupt,
    HostileCheckpoint,
    StepGone,
    StepNotFound,
    TreeMismatch,
    error_to_message,
    naming_path,
)

T = TypeVar("T")
_KINDS = {
    kind.__name__: kind
    for kind in (CheckpointError, Corrupt, HostileCheckpoint, StepGone, StepNotFound, TreeMismatch)
}


def wanted_items(item: str, like: Any, items: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns what a restore wants: each item with its `like`. Raises ValueError where one and
    several are named.
    """
    if items is None:
        return {item: like}
    if like is not None or item != "state":
        raise ValueError(
            "restore: give either `item` and `like`, or `items`, a dict of each item's name and its"
            " `like`"
        )
    return dict(items)


def name_items(wanted: Mapping[str, Any]) -> str:
    """Returns what is restored, for a sentence."""
    names = [repr(name) for name in wanted]
    return f"the item {names[0]}" if len(names) == 1 else f"the items {', '.join(names)}"


class RestoreReport(NamedTuple):
    """What one process reports: what it restores, of which save, up to where, and its error, if it
    has one, as a message.

    `is_mistake`: the caller is mistaken, and no other step would do better.
    """

    call: str
    save_id: str
    error: list[Any] | None = None
    is_mistake: bool = False


class Verdict(NamedTuple):
    """How a restore ended: None or the error to raise here, of one kind on all processes;
    `is_mistake` as in RestoreReport.
    """

    error: Exception | None = None
    is_mistake: bool = False


class RestoreAgreement:
    """The agreements of one restore of a group: one at its end, and one before its collective, if
    it has one. For one thread.

    `call` says what is restored. Each blocks for at most `timeout_s` and costs one message of each
    process, and one answer.
    """

    def __init__(self, group: Group, name: str, call: str, timeout_s: float) -> None:
        self._group = group
        self._name = name
        self._call = call
        self._timeout_s = timeout_s
        self._verdict: Verdict | None = None  # once it is final
        self._is_open = False
        self._save_id = ""

    def opened(self, save_id: str) -> None:
        """Takes note that the checkpoint is there, and of which save it is; "" where its layout has
        no such id.
        """
        self._is_open = True
        self._save_id = save_id

    def run(self, restore: Callable[[], T], path: str) -> tuple[T | None, Verdict]:
        """Returns what `restore` returns, and the verdict. The store's errors name a file, or
        `path`.
        """
        try:
            with naming_path(path):
                value = restore()
        except Exception as error:
            return None, self._end(error)
        return value, self._end(None)

    def before_collective(self) -> None:
        """Raises, on every process, if one of them has failed: nobody enters a collective that
        another does not.
        """
        verdict = self._settle("before a collective", None)
        if verdict.error is not None:
            self._verdict = verdict
            raise verdict.error

    def _end(self, error: Exception | None) -> Verdict:
        return self._verdict or self._settle("at its end", error)

    def _settle(self, place: str, error: Exception | None) -> Verdict:
        is_mistake = error is not None and _is_mistake(error, is_open=self._is_open)
        if self._group.count == 1:
            return Verdict(error, is_mistake)
        call = f"{self._call}, {place}"
        report = RestoreReport(
            call, self._save_id, None if error is None else _to_message(error), is_mistake
        )
        try:
            found = self._exchange(report)
        except Exception as failed:
            if error is None:
                failed.add_note(f"it came up while all processes were to agree on {call}")
            else:
                error.add_note(
                    f"besides, it could not be agreed on with the other processes: {failed}"
                )
            return Verdict(error or failed, is_mistake=True)
        if found is None:
            return Verdict()
        process, message, is_mistake = found
        return Verdict(_error_here(process, message, error, self._group.index), is_mistake)

    def _exchange(self, report: RestoreReport) -> tuple[int, list[Any], bool] | None:
        gathered = self._group.gather(
            f"{self._name}/report", json.dumps(report).encode(), timeout_s=self._timeout_s
        )
        found = None
        if gathered is not None:
            found = json.dumps(
                judge([RestoreReport(*json.loads(data)) for data in gathered])
            ).encode()
        verdict: tuple[int, list[Any], bool] | None
        verdict = json.loads(
            self._group.broadcast(f"{self._name}/verdict", found, timeout_s=self._timeout_s)
        )
        return verdict


def judge(reports: Sequence[RestoreReport]) -> tuple[int, list[Any], bool] | None:
    """Returns the process that failed, its error as a message and whether it is a mistake; None
    where all is well.

    A mistaken caller comes before damage, the lower process before the higher.
    """
    failed = [
        (not report.is_mistake, process, report)
        for process, report in enumerate(reports)
        if report.error is not None
    ]
    if failed:
        _, process, report = min(failed, key=lambda each: each[:2])
        assert report.error is not None
        return process, report.error, report.is_mistake
    first = reports[0]
    for process, report in enumerate(reports):
        if report.call != first.call:
            message = (
                f"it restores {report.call}, and the primary {first.call}; every process has to"
                " restore the same item of the same step, in the same order and by the same"
                " arguments"
            )
            return process, ["CheckpointError", message, {}], True
    for process, report in enumerate(reports):
        if report.save_id != first.save_id:
            message = (
                f"it has read another save than the primary ({first.call}): the step was"
                " overwritten meanwhile; restore it again"
            )
            return process, ["StepGone", message, {}], False
    return None


def ask_primary(group: Group, name: str, answer: Callable[[], Any], timeout_s: float) -> Any:
    """Returns what `answer` returns at the primary, in JSON types, on every process; raises on all
    what it raises there. Blocks.
    """
    if group.index:
        message = json.loads(group.broadcast(name, None, timeout_s=timeout_s))
        if "error" in message:
            raise _error_here(0, message["error"], None, group.index)
        return message["answer"]
    try:
        found = answer()
    except Exception as error:
        group.broadcast(
            name, json.dumps({"error": _to_message(error)}).encode(), timeout_s=timeout_s
        )
        raise
    group.broadcast(name, json.dumps({"answer": found}).encode(), timeout_s=timeout_s)
    return found


def _is_mistake(error: Exception, *, is_open: bool) -> bool:
    """Says whether the caller is mistaken: another tree, an item that a step which was opened does
    not have, any error that is not ours.
    """
    return (
        isinstance(error, TreeMismatch)
        or not isinstance(error, CheckpointError)
        or (isinstance(error, StepNotFound) and is_open)
    )


def _to_message(error: Exception) -> list[Any]:
    return (
        error_to_message(error)
        if isinstance(error, HoldfastError)
        else [type(error).__name__, str(error), {}]
    )


def _error_here(process: int, message: list[Any], own: Exception | None, index: int) -> Exception:
    """Returns what this process raises: its own error where it is of the kind that all raise, else
    that of `process`, which it names.
    """
    kind, text, facts = message
    if own is not None and (process == index or type(own).__name__ == kind):
        if isinstance(own, CheckpointError):
            own.process = index
        return own
    made = _KINDS.get(kind, CheckpointError)
    sentence = (
        f"process {process}: {text}" if kind in _KINDS else f"process {process}: {kind}: {text}"
    )
    error = made(
        sentence,
        **{name: value for name, value in facts.items() if hasattr(made, name)}
        | {"process": process},
    )
    error.__cause__ = own
    return error
