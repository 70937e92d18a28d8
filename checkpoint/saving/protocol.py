"""The one agreement of a save, as messages: what each process reports, and the result that the primary sends to all.

No I/O, threads or clocks. A report means durable: a process that dies after it does not stop the commit. Every process of the group
reports in every save, its error if it has one, so that the saves of all stay in step; the first process that failed is named to all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.coordination import Fenced, HoldfastError

from ..errors import SaveFailed, StepExists, error_from_message, error_text, error_to_message
from ..format.files import ItemReport


@dataclass(frozen=True)
class SaveReport:
    """What one process reports to the primary of its share in save number `counter` of a manager: items with their files, or its error."""

    process: int
    counter: int
    step: int
    items: Mapping[str, ItemReport] = field(default_factory=dict)
    error: str = ""
    kind: str = ""

    @classmethod
    def of_error(cls, process: int, counter: int, step: int, error: Exception) -> SaveReport:
        """Returns the report of a process that cannot save; of a step that exists, or a writer that was fenced, the message says it all."""
        text = error.message if isinstance(error, StepExists | Fenced) else error_text(error)
        return cls(process, counter, step, error=text, kind=type(error).__name__)

    def to_bytes(self) -> bytes:
        """Returns compact JSON."""
        items = {name: report.to_json() for name, report in self.items.items()}
        return json.dumps([self.process, self.counter, self.step, items, self.error, self.kind], separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> SaveReport:
        """Reads what `to_bytes` wrote."""
        process, counter, step, items, error, kind = json.loads(data)
        return cls(process, counter, step, {name: ItemReport.from_json(report) for name, report in items.items()}, error, kind)


def check_save_reports(reports: Sequence[SaveReport], counter: int, step: int) -> None:
    """Raises the save's error when a process failed, or is at another save, step or set of items than the primary (rank 0)."""
    for report in reports:
        if (report.counter, report.step) != (counter, step):
            raise SaveFailed(
                f"step {step} was not saved: process {report.process} is at its save {report.counter} of step {report.step}, the primary "
                f"at its save {counter} of step {step}; every process has to save the same steps in the same order",
                step=step,
                process=report.process,
            )
    for report in reports:
        if report.error and report.kind == "StepExists":
            raise StepExists(report.error, step=step)
        if report.error and report.kind == "Fenced":
            raise Fenced(report.error)
        if report.error:
            raise SaveFailed(
                f"step {step} was not saved: process {report.process} failed: {report.error}", step=step, process=report.process
            )
    for report in reports:
        if set(report.items) != set(reports[0].items):
            raise SaveFailed(
                f"step {step} was not saved: process {report.process} saves the items {sorted(report.items)}, the primary "
                f"{sorted(reports[0].items)}; expected the same items on every process",
                step=step,
                process=report.process,
            )


@dataclass(frozen=True)
class SaveResult:
    """How a save ended, alike on all processes: committed, with the steps that it makes superfluous, or the error."""

    step: int
    error: HoldfastError | None = None
    superfluous: tuple[int, ...] = ()

    def to_bytes(self) -> bytes:
        """Returns compact JSON."""
        body = [self.superfluous] if self.error is None else error_to_message(self.error)
        return json.dumps([self.step, *body]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> SaveResult:
        """Reads what `to_bytes` wrote."""
        step, *body = json.loads(data)
        if len(body) == 1:
            return cls(step, None, tuple(body[0]))
        return cls(step, error_from_message(*body))
