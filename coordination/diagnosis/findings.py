"""Why a job does not get on: each finding names processes, hosts and, where it can be known, a line
of code, in one sentence. Pure.

What stands first explains what stands after it: a process that has failed, one that cannot answer,
processes that wait for each other, the one that is elsewhere in the program while all others wait,
a save that failed, a process that all others always wait for.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any
from urllib.parse import unquote

from holdfast.proto import coordination_pb2, session_pb2

from ..vitals import ENDS_WITH
from .stacks import Frame, Thread, parse
from .summary import fastest, show_rate, usually_fastest

STALLED_S = 8.0
"""No step of any process for so long, and for three usual steps: the job does not get on."""
_UNPACED_S = 60.0  # for three steps of a job whose pace is not known yet
BARRIER_S = 5.0
"""Who is at a barrier for so long waits, and somebody is missed."""
LOST = " is lost: "
"""In what the coordinator says of a process that fell silent."""
_GATHERING_S = 10.0
_NOBODY_S = 60.0  # without any process: a program may import for long before it joins
_SLACK_S = 2.0  # a sign of life may be so late, and come half as often
_MAX_NAMED = 8
_WAITS_SHARE = 0.35
_WORKS_SHARE = 0.15  # of its time that a process waits which keeps the others waiting
_MAX_GROUPS = 3
_NOWHERE = Thread("", ())
_OURS = re.compile(r"holdfast/[^/]+/([^/]+)(?:/\d+)?")


@dataclass(frozen=True)
class Look:
    """What a look from outside has shown of a process on this host. `held_s`: for how long a thread
    has held its interpreter.
    """

    stopped: bool = False
    held_s: float | None = None
    stacks: str = ""

    @property
    def runs(self) -> bool:
        """Whether its interpreter runs."""
        return not self.stopped and self.held_s is None


@dataclass(frozen=True)
class Evidence:
    """All that a diagnosis goes by. `stacks` are samples by process, none for one that was asked
    and did not answer.
    """

    status: session_pb2.StatusResponse
    stacks: Mapping[int, Sequence[str]] = field(default_factory=dict)
    looks: Mapping[int, Look] = field(default_factory=dict)
    hangs: bool = False  # whoever asks knows that the job does not get on


def at_later(evidence: Evidence, status: session_pb2.StatusResponse) -> Evidence:
    """Returns the evidence at a later status, with stacks and looks of before while they matter:
    whoever is asked every ten seconds is where it was, and the seconds go on.
    """
    if not wants_stacks(status) or status.service_life != evidence.status.service_life:
        return Evidence(status)
    passed_s = status.up_s - evidence.status.up_s
    looks = {
        process: found if found.held_s is None else replace(found, held_s=found.held_s + passed_s)
        for process, found in evidence.looks.items()
    }
    return replace(evidence, status=status, looks=looks)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: a sentence, and its parts for a program. `line` is 0 where the place
    is not known.
    """

    kind: str
    text: str
    processes: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    function: str = ""
    file: str = ""
    line: int = 0

    def as_json(self) -> dict[str, Any]:
        """Returns the fields as JSON holds them."""
        return asdict(self)


def diagnose(evidence: Evidence) -> list[Finding]:
    """Returns what is wrong, the cause of the rest first; nothing where the job gets on."""
    findings: list[Finding] = []
    explained: set[int] = set()
    # In a job that hangs, processes that failed did so because it hangs.
    for rule in (*_WHERE_IT_HANGS, *_RULES) if evidence.hangs else _RULES:
        for finding in rule(evidence):
            if not finding.processes or not explained.issuperset(finding.processes):
                explained.update(finding.processes)
                findings.append(finding)
    return findings or list(_together(evidence))


def stalled_s(status: session_pb2.StatusResponse) -> float | None:
    """Returns for how long no process has made a step, None where steps come as they should, or
    none was ever reported.
    """
    ages = [
        task.step_age_s
        for task in status.tasks
        if task.step_age_s >= 0
        and task.state == coordination_pb2.CONNECTED
        and not task.progress.values.get("done", 0.0)
    ]
    age_s = min(ages, default=-1.0)
    return age_s if age_s > max(STALLED_S, _three_steps_s(status)) else None


def _three_steps_s(status: session_pb2.StatusResponse) -> float:
    """Returns how long three usual steps take, or may take where no pace is known yet."""
    if usual := usually_fastest(status):
        return 3 / usual
    # The first steps of a loop: their mean since, which falls while none comes.
    pace = fastest(status)
    return min(_UNPACED_S, 3 / pace) if pace else _UNPACED_S


def wants_stacks(status: session_pb2.StatusResponse) -> bool:
    """Returns whether a diagnosis needs stacks: no step moves, somebody is missed or silent, or one
    keeps the others waiting.
    """
    return (
        stalled_s(status) is not None
        or any(each.missing and _waited_s(each) > BARRIER_S for each in status.barriers)
        or any(silent(status, task) for task in status.tasks)
        or bool(_stragglers(status))
    )


def _waited_s(barrier: session_pb2.BarrierStatus) -> float:
    """Returns for how long the first process has waited at a barrier."""
    return max((each.since_s for each in barrier.waiting), default=0.0)


def silent(status: session_pb2.StatusResponse, task: session_pb2.TaskStatus) -> bool:
    """Returns whether a process that should live has not been heard of when it should have been."""
    connected = task.state == coordination_pb2.CONNECTED
    return connected and task.heartbeat_age_s > 2 * expected_s(status, task) + _SLACK_S


def expected_s(status: session_pb2.StatusResponse, task: session_pb2.TaskStatus) -> float:
    """Returns how often a process that lives is heard of, in seconds."""
    return task.progress.values.get("report_interval_s", status.heartbeat_interval_s)


# --- Rules, in the order in which one explains the next


def _failed(evidence: Evidence) -> Iterator[Finding]:
    """Processes that have failed: those that said why come before those that fell silent."""
    failed = [task for task in evidence.status.tasks if task.state == coordination_pb2.ERROR]
    for task in sorted(failed, key=lambda task: LOST in task.error):
        why = own_words(task.task_id, task.error) or task.error
        is_sentence = why.startswith(f"process {task.task_id}")
        text = why if is_sentence else f"{who([task])} has failed: {why}"
        yield _finding("failed", text, [task])


def _raised(evidence: Evidence) -> Iterator[Finding]:
    """Processes that an exception ends, and that other threads or hooks keep."""
    for task in evidence.status.tasks:
        if raised := raised_by(task):
            yield _finding(
                "failed", f"{who([task])} has failed, and does not end: {raised}", [task]
            )


def raised_by(task: session_pb2.TaskStatus) -> str:
    """Returns the exception that has left the main thread of a process, "" where none has."""
    trouble = task.progress.trouble
    return trouble.removeprefix(ENDS_WITH) if trouble.startswith(ENDS_WITH) else ""


def own_words(process: int, error: str) -> str:
    """Returns what a process has said of its own failure, "" where others said it."""
    said = f"process {process} reported: "
    return error.removeprefix(said) if error.startswith(said) else ""


def _unheard(evidence: Evidence) -> Iterator[Finding]:
    """Processes that are stopped, cut off, or cannot run Python."""
    status = evidence.status
    asked = {process for process, samples in evidence.stacks.items() if not samples}
    for task in status.tasks:
        if task.state == coordination_pb2.CONNECTED and (
            task.task_id in asked or silent(status, task)
        ):
            look = evidence.looks.get(task.task_id)
            if look is not None and look.runs and not silent(status, task):
                continue  # merely slow to answer
            text, place = _about_silence(status, task, look)
            yield _finding("unheard", f"{who([task])} {text}", [task], place)


def _stuck(evidence: Evidence) -> Iterator[Finding]:
    """Processes of which a look from outside has shown that they cannot run Python."""
    for finding in _unheard(evidence):
        look = evidence.looks.get(finding.processes[0])
        if look is not None and not look.runs:
            yield finding


def _about_silence(
    status: session_pb2.StatusResponse, task: session_pb2.TaskStatus, look: Look | None
) -> tuple[str, Frame | None]:
    heard = (
        f"last heard of {task.heartbeat_age_s:.0f} s ago, expected every"
        f" {expected_s(status, task):.0f} s"
    )
    if look is None:
        elsewhere = (
            "stopped, cut off, or held by C code: `holdfast status` on its own host tells which"
        )
        return f"does not answer ({heard}): {elsewhere}", None
    if look.stopped:
        return (
            f"is stopped, by a signal or a debugger ({heard}): kill -CONT {task.pid} lets it go on",
            None,
        )
    place = _main(look.stacks).place
    where = f"is in {place.place}" if place else "runs"
    if look.held_s is not None:
        return f"{where}, in C code that holds its interpreter for {look.held_s:.0f} s", place
    cut_off = f"is cut off from the coordinator ({heard}): look at the network between the two"
    return f"{where}, but {cut_off}", place


def _crossed(evidence: Evidence) -> Iterator[Finding]:
    """Processes that wait for each other at different barriers."""
    barriers = sorted(evidence.status.barriers, key=lambda barrier: len(barrier.waiting))
    for number, fewer in enumerate(barriers):
        at_fewer = {each.task_id for each in fewer.waiting}
        for more in barriers[number + 1 :]:
            at_more = {each.task_id for each in more.waiting}
            waited_for = at_fewer and at_fewer.issubset(more.missing)
            if waited_for and at_more.intersection(fewer.missing):
                tasks = _tasks(evidence, at_fewer)
                place = place_of(evidence, tasks)
                text = (
                    f"{who(tasks)} {_verb(tasks, 'waits', 'wait')} at barrier"
                    f" {_barrier(fewer)}{at(place)}, while {_others(len(at_more))}"
                    f" {_verb(at_more, 'waits', 'wait')} for it at {_barrier(more)}"
                )
                yield _finding("crossed", text, tasks, place)
                return


def _elsewhere(evidence: Evidence) -> Iterator[Finding]:
    """The few that are elsewhere in the program, or at another step, while no step moves."""
    idle_s = stalled_s(evidence.status)
    waits = any(_waited_s(each) > BARRIER_S for each in evidence.status.barriers)
    stands = idle_s is not None or evidence.hangs or waits
    if not stands or len(evidence.status.tasks) < 2:
        return
    groups = _groups(evidence)
    odd = _odd(groups) or _odd_by_step(evidence)
    if odd is None:
        return
    tasks = _tasks(evidence, odd.processes)
    since = _since(evidence, idle_s)
    text = f"{who(tasks)}{_is_in(odd)}{_step_difference(evidence, odd.processes)}{since}"
    text = "; ".join([text, *_rest(evidence, groups, odd)])
    yield _finding("elsewhere", text, tasks, odd.thread.place)


def _missed(evidence: Evidence) -> Iterator[Finding]:
    """Processes that others wait for at a barrier."""
    for barrier in evidence.status.barriers:
        waited_s = _waited_s(barrier)
        is_few = 0 < len(barrier.missing) <= len(barrier.waiting)
        if is_few and waited_s > BARRIER_S:
            tasks = _tasks(evidence, set(barrier.missing))
            place = place_of(evidence, tasks)
            text = (
                f"{who(tasks)} {_verb(tasks, 'has', 'have')} not come to barrier"
                f" {_barrier(barrier)}{at(place)}: {_others(len(barrier.waiting))} wait there for"
                f" {waited_s:.0f} s"
            )
            yield _finding("missed", text, tasks, place)


def _in_trouble(evidence: Evidence) -> Iterator[Finding]:
    """What processes have reported of themselves, and not taken back, and the coordinator's own."""
    for task in evidence.status.tasks:
        if task.progress.trouble:
            yield _finding("trouble", f"{who([task])}: {task.progress.trouble}", [task])
    for sentence in evidence.status.defects:
        yield Finding("trouble", sentence)


def _slow(evidence: Evidence) -> Iterator[Finding]:
    """The one that works while all others mostly wait."""
    stragglers = _stragglers(evidence.status)
    if not stragglers or stalled_s(evidence.status) is not None:
        return
    shares = [_share(task) for task in evidence.status.tasks if task not in stragglers]
    place = place_of(evidence, stragglers, working=True)
    pace = fastest(evidence.status)
    usual = usually_fastest(evidence.status)
    slower = ""
    if 0 < pace < 0.8 * usual:
        slower = f"; {show_rate(pace)} steps/s, {show_rate(usual)} at best"
    keep = _verb(stragglers, "keeps", "keep")
    text = (
        f"{who(stragglers)} {keep} the others waiting for {min(shares):.0%} of their"
        f" time{at(place)}{slower}"
    )
    yield _finding("slow", text, stragglers, place)


def _gathering(evidence: Evidence) -> Iterator[Finding]:
    """Those that have not come yet."""
    status = evidence.status
    absent = [task for task in status.tasks if task.state == coordination_pb2.UNINITIALIZED]
    came = len(status.tasks) - len(absent)
    if not came and status.up_s > _NOBODY_S:
        text = (
            f"no process has joined for {status.up_s:.0f} s:"
            " each has to call holdfast.multihost.initialize()"
        )
        yield _finding("gathering", text, absent)
    elif status.phase == "gathering" and status.up_s > _GATHERING_S and absent and came:
        yield _finding(
            "gathering",
            f"{who(absent)} {_verb(absent, 'has', 'have')} not come yet; {came} of"
            f" {len(status.tasks)} have",
            absent,
        )


def _together(evidence: Evidence) -> Iterator[Finding]:
    """All of a job that stands, where they are at one place and nobody is missed."""
    idle_s = stalled_s(evidence.status)
    groups = _groups(evidence) if evidence.hangs or idle_s is not None else []
    if len(groups) == 1 and (place := groups[0].thread.place) is not None:
        tasks = _tasks(evidence, groups[0].processes)
        text = f"{who(tasks)}{_is_in(groups[0])}{_since(evidence, idle_s)}"
        yield _finding("together", text, tasks, place)


_WHERE_IT_HANGS = (_raised, _stuck, _elsewhere)
_RULES = (_failed, _raised, _unheard, _crossed, _elsewhere, _missed, _in_trouble, _slow, _gathering)


# --- Groups of processes at one place


@dataclass(frozen=True)
class _Group:
    processes: frozenset[int]
    thread: Thread  # the main thread of one of them


def _groups(evidence: Evidence) -> list[_Group]:
    """Returns the processes by where they are, the smallest group first: by function, or by line
    where all are in one function.
    """
    threads = {
        process: [_main(sample) for sample in samples]
        for process, samples in evidence.stacks.items()
        if samples
    }
    by_function = _grouped(threads, lambda thread: (_function(thread), thread.waits))
    return (
        by_function
        if len(by_function) > 1
        else _grouped(threads, lambda thread: (thread.place, thread.waits))
    )


def _grouped(
    threads: Mapping[int, Sequence[Thread]], key: Callable[[Thread], object]
) -> list[_Group]:
    found: dict[object, dict[int, Thread]] = {}
    for process, samples in threads.items():
        common, _ = Counter(map(key, samples)).most_common(1)[0]
        typical = next(thread for thread in samples if key(thread) == common)
        found.setdefault(common, {})[process] = typical
    groups = [_Group(frozenset(each), next(iter(each.values()))) for each in found.values()]
    return sorted(groups, key=lambda group: (len(group.processes), min(group.processes)))


def _odd(groups: Sequence[_Group]) -> _Group | None:
    """Returns the group that the others wait for: one that does not wait, or the smallest where all
    do, or where most do not; None where all are at one place.
    """
    if len(groups) < 2:
        return None
    working = [group for group in groups if not group.thread.waits]
    count = sum(len(group.processes) for group in groups)
    if working and len(working) < len(groups) and 2 * len(working[0].processes) <= count:
        return working[0]
    return groups[0] if len(groups[0].processes) < len(groups[-1].processes) else None


def _odd_by_step(evidence: Evidence) -> _Group | None:
    """Returns those at the step at which the fewest are; None where all are at one."""
    steps = _by_step(evidence)
    return _Group(min(steps.values(), key=len), _NOWHERE) if len(steps) > 1 else None


def _by_step(evidence: Evidence) -> dict[int, frozenset[int]]:
    steps: dict[int, set[int]] = {}
    for task in evidence.status.tasks:
        if task.progress.HasField("step") and task.state == coordination_pb2.CONNECTED:
            steps.setdefault(task.progress.step, set()).add(task.task_id)
    return {step: frozenset(processes) for step, processes in steps.items()}


def _step_difference(evidence: Evidence, odd: frozenset[int]) -> str:
    """Returns how far the odd ones are from the others, where all of each are at one step."""
    steps = _by_step(evidence)
    own = {step for step, processes in steps.items() if processes & odd}
    others = {step for step, processes in steps.items() if processes - odd}
    if len(own) != 1 or len(others) != 1 or own == others:
        return ""
    mine = own.pop()
    theirs = others.pop()
    where = "ahead of" if mine > theirs else "behind"
    return f", at step {mine}, {abs(mine - theirs)} {where} the others' {theirs}"


def _stragglers(status: session_pb2.StatusResponse) -> list[session_pb2.TaskStatus]:
    """Returns the processes that hardly wait, where they are few and all others wait much."""
    shares = [(task, _share(task)) for task in status.tasks]
    if len(shares) < 2 or any(share is None for _, share in shares):
        return []
    working = [task for task, share in shares if share < _WORKS_SHARE]
    waiting = [task for task, share in shares if share > _WAITS_SHARE]
    if len(working) > len(shares) / 2 or len(working) + len(waiting) < len(shares):
        return []
    return working


def _share(task: session_pb2.TaskStatus) -> Any:
    return task.progress.values.get("waiting_share")


def place_of(
    evidence: Evidence, tasks: Sequence[session_pb2.TaskStatus], working: bool = False
) -> Frame | None:
    """Returns where the first of some processes mostly is."""
    threads = [_main(sample) for sample in evidence.stacks.get(tasks[0].task_id, ())]
    places = [
        thread.place
        for thread in threads
        if thread.place is not None and not (working and thread.waits)
    ]
    return Counter(places).most_common(1)[0][0] if places else None


def _main(stacks: str) -> Thread:
    return next(iter(parse(stacks)), _NOWHERE)


def _function(thread: Thread) -> tuple[str, str]:
    return (thread.place.file, thread.place.function) if thread.place else ("", "")


# --- Words


def _finding(
    kind: str, text: str, tasks: Sequence[session_pb2.TaskStatus], place: Frame | None = None
) -> Finding:
    processes = tuple(task.task_id for task in tasks)
    hosts = tuple(task.host for task in tasks)
    place = place or Frame("", 0, "")
    return Finding(
        kind,
        text,
        processes,
        hosts,
        function=place.function,
        file=place.file,
        line=place.line,
    )


def _tasks(
    evidence: Evidence, processes: frozenset[int] | set[int]
) -> list[session_pb2.TaskStatus]:
    return [task for task in evidence.status.tasks if task.task_id in processes]


def who(tasks: Sequence[session_pb2.TaskStatus]) -> str:
    """Returns "process 2 (host b7)", or "processes 2 (host b7), 5 (host b9) and 3 more"."""
    names = [f"{task.task_id} (host {task.host or 'unknown'})" for task in tasks[:_MAX_NAMED]]
    more = f" and {len(tasks) - _MAX_NAMED} more" if len(tasks) > _MAX_NAMED else ""
    return f"{_verb(tasks, 'process', 'processes')} {', '.join(names)}{more}"


def _since(evidence: Evidence, idle_s: float | None) -> str:
    """Returns since when no step comes, where whoever asks has not said so."""
    return "" if idle_s is None or evidence.hangs else f", no step for {idle_s:.0f} s"


def _barrier(barrier: session_pb2.BarrierStatus) -> str:
    """Returns a barrier's name as the program gave it; the groups of holdfast.multihost put their
    own before it, and quote it.
    """
    ours = _OURS.fullmatch(barrier.barrier_id)
    return repr(unquote(ours[1]) if ours else barrier.barrier_id)


def _others(count: int) -> str:
    return "the other" if count == 1 else f"the other {count}"


def _rest(evidence: Evidence, groups: Sequence[_Group], odd: _Group) -> list[str]:
    """Returns where the groups are that are not odd."""
    rest = [group for group in groups if not odd.processes.intersection(group.processes)]
    # Of a large job only some are asked where they are.
    asked = sum(len(group.processes) for group in groups)
    is_whole = 2 * asked > len(evidence.status.tasks)
    return [_describe(group, len(rest), is_whole) for group in rest[:_MAX_GROUPS]]


def _describe(group: _Group, groups: int, is_whole: bool) -> str:
    count = len(group.processes)
    if not is_whole:
        members = f"{count} others that were asked"
    elif groups == 1:
        members = _others(count)
    elif count == 1:
        members = f"process {min(group.processes)}"
    else:
        members = f"{count} others"
    return members + _is_in(group, "unknown code")


def _is_in(group: _Group, nowhere: str = "") -> str:
    """Returns what a group does, and where: "" where neither is known, unless `nowhere` says it."""
    place = group.thread.place
    where = place.place if place else nowhere
    if not where:
        return ""
    if waits := group.thread.waits:
        return f" {_verb(group.processes, 'waits', 'wait')} in {waits} at {where}"
    return f" {_verb(group.processes, 'is', 'are')} in {where}"


def at(place: Frame | None) -> str:
    return f" (in {place.place})" if place else ""


def _verb(tasks: Collection[object], one: str, several: str) -> str:
    return one if len(tasks) == 1 else several
