"""Restores end alike on all processes of a group: one small message of each to the primary, and its
verdict to all.

Whoever fails says so instead of leaving the others to train on. Every process of a group calls the
same, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from holdfast.multihost import Group
from holdfast.multihost.instruments import Phase

from ..errors import (
    CheckpointError,
    NotEnoughMemory,
    StepNotFound,
    TreeMismatch,
    is_shortage,
    naming_path,
)
from ..format.limits import check_items
from ..memory.need import MemoryNeed, find_shortage
from .exchange import exchange, first_failed
from .messages import AgreedError, Message, SentError

T = TypeVar("T")
# Items for which no agreement is worth its messages, and how many processes may share a machine.
SMALL_BYTES = 256 << 20
MOST_SHARERS = 16


def is_small(nbytes: int, count: int) -> bool:
    """Says whether so many bytes on each of `count` processes are worth no question."""
    return nbytes * min(count, MOST_SHARERS) <= SMALL_BYTES


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
    return check_items("restore", items)


def name_items(wanted: Mapping[str, Any]) -> str:
    """Returns what is restored, for a sentence."""
    names = [repr(name) for name in wanted]
    return f"the item {names[0]}" if len(names) == 1 else f"the items {', '.join(names)}"


@dataclass(frozen=True)
class RestoreReport(Message):
    """What one process reports: what it restores, of which save, up to where, and its error.

    `is_mistake`: the caller is mistaken, or this process lacks descriptors or memory, and no other
    step would do better. `need` is what it needs of its host's memory, where nothing has been read
    yet. `shared` is what all others are to hear of this process.
    """

    process: int
    call: str
    save_id: str
    error: SentError | None = None
    is_mistake: bool = False
    need: MemoryNeed | None = None
    shared: Any = None


@dataclass(frozen=True)
class RestoreAnswer(Message):
    """What the primary makes of all reports: the error that all raise, or that all is well.

    `shared` is what the processes told each other, by rank; empty where they told nothing.
    """

    agreed: AgreedError | None = None
    is_mistake: bool = False
    shared: Sequence[Any] = ()


class Verdict(NamedTuple):
    """How a restore ended: None or the error to raise here, of one kind on all processes;
    `is_mistake` as in RestoreReport.
    """

    error: Exception | None = None
    is_mistake: bool = False


class RestoreAgreement:
    """The agreements of one restore of a group: one at its end, of each tree one before it is read,
    and one before iterators get their states. For one thread.

    `call` says what is restored. Each blocks for at most `timeout_s` and costs one message of each
    process, and one answer.
    """

    def __init__(self, group: Group, name: str, call: str, timeout_s: float) -> None:
        self.group = group
        self._name = name
        self._call = call
        self._timeout_s = timeout_s
        self._verdict: Verdict | None = None  # once it is final
        self._is_open = False
        self._has_room = False
        self._save_id = ""
        self._read: set[str] = set()
        self._shares = 0

    def opened(self, save_id: str) -> None:
        """Takes note that the checkpoint is there, and of which save it is; "" where its layout has
        no such id.
        """
        self._is_open = True
        self._save_id = save_id

    def found_room(self) -> None:
        """Takes note that the primary has found room for what all processes read, and told all."""
        self._has_room = True

    def run(self, restore: Callable[[], T], path: str) -> tuple[T | None, Verdict]:
        """Returns what `restore` returns, and the verdict. The store's errors name a file, or
        `path`.
        """
        try:
            with Phase("restore/read"), naming_path(path):
                value = restore()
        except Exception as error:
            return None, self._agree("at its end", error)
        return value, self._agree("at its end")

    def before_reading(self, need: MemoryNeed) -> None:
        """Raises NotEnoughMemory, on every process, if the hosts of some have no room for an item,
        and the error of one that has failed.

        An item that is read again has its room, and so has a small one, or one for which the
        primary has found it: alike on all processes.
        """
        if self._has_room or need.item in self._read or is_small(need.item_bytes, self.group.count):
            return
        self._read.add(need.item)
        self._go_on(self._agree(f"before {need.item!r} is read", need=need))

    def before_giving(self) -> None:
        """Raises, on every process, the error of one that has failed: what no error undoes is still
        to come.
        """
        self._go_on(self._agree("before iterators get their states"))

    def _go_on(self, verdict: Verdict) -> None:
        if verdict.error is not None:
            self._verdict = verdict
            raise verdict.error

    def share(self, what: Any) -> Sequence[Any]:
        """Returns what all processes share, by rank, in JSON types (of a dataclass its fields by
        name); raises, on every process, if one has failed.

        Every process calls it, in turn with the other agreements.
        """
        self._shares += 1
        verdict, shared = self._exchange(self._report(f"share {self._shares}", shared=what))
        self._go_on(verdict)
        return shared

    def _agree(
        self, place: str, error: Exception | None = None, *, need: MemoryNeed | None = None
    ) -> Verdict:
        if self._verdict is not None:
            return self._verdict
        if self.group.count == 1:
            shortage = None if need is None else find_shortage([need])
            error = error if shortage is None else shortage.error
            return Verdict(error, self._is_mistake(error))
        return self._exchange(self._report(place, error, need=need), error)[0]

    def _report(self, place: str, error: Exception | None = None, **told: Any) -> RestoreReport:
        return RestoreReport(
            self.group.index,
            f"{self._call}, {place}",
            self._save_id,
            None if error is None else SentError.of(error),
            self._is_mistake(error),
            **told,
        )

    def _exchange(
        self, report: RestoreReport, error: Exception | None = None
    ) -> tuple[Verdict, Sequence[Any]]:
        """Returns the verdict here, and what all share; `error` is that of the report."""
        try:
            answer = exchange(
                self.group, self._name, report, judge, RestoreAnswer, timeout_s=self._timeout_s
            )
        except Exception as failed:
            if error is None:
                failed.add_note(f"it came up while all processes were to agree on {report.call}")
            else:
                error.add_note(
                    f"besides, it could not be agreed on with the other processes: {failed}"
                )
            return Verdict(error or failed, is_mistake=True), ()
        if answer.agreed is None:
            return Verdict(), answer.shared
        return Verdict(answer.agreed.here(report.process, error), answer.is_mistake), ()

    def _is_mistake(self, error: Exception | None) -> bool:
        """Says whether no other step would do better: another tree, more than the host's memory
        holds, an item that a step which was opened does not have, any error that is not ours, and
        what says nothing of the step.
        """
        if error is None:
            return False
        return (
            isinstance(error, TreeMismatch | NotEnoughMemory)
            or is_shortage(error.__cause__)
            or not isinstance(error, CheckpointError)
            or (isinstance(error, StepNotFound) and self._is_open)
        )


def judge(reports: Sequence[RestoreReport]) -> RestoreAnswer:
    """Returns the error that all raise, if there is one.

    A mistaken caller comes before damage, the lower process before the higher.
    """
    failed = first_failed(reports, lambda report: not report.is_mistake)
    if failed is not None:
        assert failed.error is not None
        return RestoreAnswer(AgreedError(failed.process, failed.error), failed.is_mistake)
    differs = _difference(reports)
    if differs is not None:
        return differs
    shortage = find_shortage([report.need for report in reports if report.need is not None])
    if shortage is not None:
        agreed = AgreedError(shortage.process, SentError.of(shortage.error))
        return RestoreAnswer(agreed, is_mistake=True)
    if not any(report.shared for report in reports):
        return RestoreAnswer()
    return RestoreAnswer(shared=tuple(report.shared for report in reports))


def _difference(reports: Sequence[RestoreReport]) -> RestoreAnswer | None:
    """Returns the error where a process restores something else than the primary, or of another
    save.
    """
    first = reports[0]
    for report in reports:
        if report.call != first.call:
            message = (
                f"it restores {report.call}, and the primary {first.call}; every process has to"
                " restore the same item of the same step, in the same order and by the same"
                " arguments"
            )
            error = SentError("CheckpointError", message)
            return RestoreAnswer(AgreedError(report.process, error), is_mistake=True)
    for report in reports:
        if report.save_id != first.save_id:
            message = (
                f"it has read another save than the primary ({first.call}): the step was"
                " overwritten meanwhile; restore it again"
            )
            return RestoreAnswer(AgreedError(report.process, SentError("StepGone", message)))
    return None
