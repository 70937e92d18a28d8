"""Rules of `decide` taken back, each of which a promise misses."""

from __future__ import annotations

import inspect
import types
from typing import NamedTuple

from holdfast.launch.supervisor import decide as real

from .promises import Decide


class Mutation(NamedTuple):
    """A rule that is taken back: `text` becomes `instead`, and the promise `breaks` is broken."""

    name: str
    text: str
    instead: str
    breaks: str

    def applied(self) -> Decide:
        """Returns the decision function without the rule."""
        source = inspect.getsource(real)
        assert source.count(self.text) == 1, f"{self.name}: decide.py reads otherwise now"
        module = types.ModuleType(real.__name__)
        module.__package__ = real.__package__
        exec(compile(source.replace(self.text, self.instead), self.name, "exec"), module.__dict__)
        decide: Decide = module.decide
        return decide


MUTATIONS = [
    Mutation(
        "a final state is final",
        "_TABLE.get(job.state, {})",
        "_TABLE.get(job.state, _AT_ANY_TIME)",
        "FINAL",
    ),
    Mutation("a budget ends", "    if tries > limit:\n", "    if tries > limit + 1:\n", "BUDGET"),
    Mutation(
        "a stop is the end",
        "    if job.stopping:\n        if not isinstance(error, Preempted):",
        "    if False:\n        if not isinstance(error, Preempted):",
        "STOPPED",
    ),
    Mutation(
        "zero after a notice is not done",
        "    if job.reported_done and not any(job.exit_codes.values()):\n",
        "    if not any(job.exit_codes.values()):\n",
        "DONE",
    ),
    Mutation(
        "a commit goes on",
        "    free = job.alive - job.leaving - _committing(job)\n",
        "    free = job.alive - job.leaving\n",
        "COMMIT",
    ),
    Mutation(
        "leaving has a deadline",
        "    job = replace(job, state=State.PREEMPTING, wake_at=deadline)\n",
        "    job = replace(job, state=State.PREEMPTING, wake_at=None)\n",
        "WAY OUT",
    ),
    Mutation(
        "only who can stays",
        "    able = alive & (job.restartable | job.rejoining) - job.leaving - job.going\n",
        "    able = alive - job.leaving - job.going\n",
        "REJOIN",
    ),
    Mutation(
        "those without room are gone",
        "    left = job.alive - event.processes\n",
        "    left = job.alive\n",
        "REJOIN",
    ),
    Mutation(
        "whose machine is given back goes",
        "    staying = waiting - job.noticed\n",
        "    staying = waiting\n",
        "NOTICE",
    ),
    Mutation(
        "to grow, those stay that can",
        "    if stay:\n        return _preempt(",
        "    if False:\n        return _preempt(",
        "SIZE",
    ),
    Mutation(
        "to shrink, those stay that have a number",
        "            if stay:\n                leaving",
        "            if False:\n                leaving",
        "SIZE",
    ),
    Mutation(
        "those that wait are told",
        "    return _decision(replace(job, dismissed=True), why, *decision.actions, Dismiss())\n",
        "    return decision\n",
        "HELD",
    ),
    Mutation(
        "the processes hear of a notice",
        "    return _preempt(job, following, now, source, Notify(event.source, alone or None))\n",
        "    return _preempt(job, following, now, source)\n",
        "NOTICE",
    ),
    Mutation(
        "the rest is ended with the job",
        "    cleared = (Kill(),) if job.killed else _clear(job)[1]\n",
        "    cleared = ()\n",
        "NOBODY LEFT",
    ),
    Mutation(
        "a death after a notice is a preemption",
        "    kind = Preempted if is_preempted else WorkerFailed\n",
        "    kind = WorkerFailed\n",
        "NOTICE",
    ),
    Mutation(
        "a signal is no exit code",
        "    return code if code >= 0 else 128 - code\n",
        "    return 0\n",
        "EXIT CODE",
    ),
]
