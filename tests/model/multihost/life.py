"""A life of a job as a value: the calls that its processes make, and what goes wrong meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from .calls import Call, Die, Notify, Return
from .network import Fault


@dataclass(frozen=True)
class Step:
    """A call, what happens as its processes begin it, and how late each of them is."""

    call: Call
    faults: tuple[Fault, ...] = ()
    late_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class Life:
    """A job of `processes`; its task ids are the runtime indices, moved on by `shift`. Where it
    `listens`, each process makes a call whenever it is told of a change of the processes.
    """

    processes: int = 2
    shift: int = 0
    listens: bool = False
    steps: tuple[Step, ...] = ()

    def first(self, kind: type[Call]) -> dict[int, int]:
        """Returns the processes that die, or return, and at which step."""
        return {
            process: number
            for number, step in enumerate(self.steps)
            if isinstance(step.call, kind)
            for process in step.call.members(self.processes)
        }

    def gone(self, number: int) -> frozenset[int]:
        """Returns the processes that are dead at a step."""
        returns = self.first(Return)
        deaths = self.first(Die).items()
        return frozenset(
            process
            for process, died in deaths
            if died < number <= returns.get(process, len(self.steps) + 9)
        )

    @property
    def survivors(self) -> tuple[int, ...]:
        """Returns the processes that live at the end."""
        gone = self.gone(len(self.steps))
        return tuple(process for process in range(self.processes) if process not in gone)

    @property
    def stands(self) -> bool:
        """Whether there is a notice of a process that never dies, and nobody withdraws one."""
        notices = [step.call for step in self.steps if isinstance(step.call, Notify)]
        noticed = {process for call in notices for process in call.members(self.processes)}
        withdrawn = any(call.withdrawal for call in notices)
        return not withdrawn and bool(noticed - self.first(Die).keys())

    @property
    def lacks_calls(self) -> bool:
        """Whether there is a call that a process does not make, or that cannot end well."""
        return any(isinstance(step.call, Die) or step.call.absent for step in self.steps)

    @property
    def leaves_none(self) -> tuple[str, ...]:
        """Where no key is left at the end. Who reads a broadcast last is known by an increment,
        which is not sent again where its answer was lost.
        """
        if any(step.faults for step in self.steps):
            return ("holdfast/gather",)
        return ("holdfast/gather", "holdfast/broadcast")

    def __str__(self) -> str:
        lines = [f"        {shown(step)}," for step in self.steps]
        head = f"    {self.processes}, shift={self.shift}, listens={self.listens},"
        return "\n".join(["Life(", head, "    steps=(", *lines, "    ),", ")"])


def shown(value: Any) -> str:
    """Returns a dataclass as its call, without the arguments that are their defaults."""
    if isinstance(value, tuple) and any(map(is_dataclass, value)):
        return f"({''.join(f'{shown(each)}, ' for each in value)})"
    if not is_dataclass(value):
        return repr(value)
    own = [
        f"{each.name}={shown(getattr(value, each.name))}"
        for each in fields(value)
        if getattr(value, each.name) != each.default
    ]
    return f"{type(value).__name__}({', '.join(own)})"
