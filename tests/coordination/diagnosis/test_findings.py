"""What is wrong with a job, from its status and stacks: each rule's sentence, and which comes
first.
"""

from __future__ import annotations

from typing import Any

from holdfast.coordination.diagnosis.findings import (
    Evidence,
    Look,
    at_later,
    diagnose,
    silent,
    stalled_s,
    wants_stacks,
)
from holdfast.proto import coordination_pb2, session_pb2


def stack(function: str, line: int, waits: str = "") -> str:
    """Returns the stack of a main thread that is in the user's function, or waits in jax for it."""
    inner = f'\n  File "/x/site-packages/jax/a.py", line 1, in {waits}' if waits else ""
    return (
        'Thread MainThread:\n  File "/home/me/train.py", line 90, in main\n  File'
        f' "/home/me/train.py", line {line}, in {function}{inner}'
    )


WAITING = stack("reduce", 50, "psum")


def job(count: int = 4, **changes: dict[int, Any]) -> session_pb2.StatusResponse:
    """Returns the status of a job whose steps came until 41 s ago; `changes` are by field, then by
    process.
    """
    status = session_pb2.StatusResponse(
        num_processes=count, phase="running", up_s=300, heartbeat_interval_s=15
    )
    for number in range(count):
        task = status.tasks.add(
            task_id=number,
            state=coordination_pb2.CONNECTED,
            host=f"b{number}",
            pid=100 + number,
            heartbeat_age_s=1,
        )
        task.step_age_s = 41
        task.steps_per_second = 0
        task.usual_steps_per_second = 4
        task.progress.step = 7
    for name, values in changes.items():
        for number, value in values.items():
            where = (
                status.tasks[number].progress
                if name in ("step", "trouble", "values")
                else status.tasks[number]
            )
            if name == "values":
                where.values.update(value)
            else:
                setattr(where, name, value)
    return status


def texts(
    status: session_pb2.StatusResponse, stacks: dict[int, list[str]] | None = None, **looks: Any
) -> list[str]:
    """Returns the sentences of a diagnosis."""
    return [
        finding.text for finding in diagnose(Evidence(status, stacks or {}, looks.get("looks", {})))
    ]


def moving(**changes: dict[int, Any]) -> session_pb2.StatusResponse:
    """Returns the status of a job that gets on."""
    return job(**{"step_age_s": dict.fromkeys(range(4), 0.5), **changes})


def test_a_pace_that_is_not_known_yet_is_no_stall() -> None:
    """After one step a job may need long for the next; after a few quick ones it stalls soon."""
    assert stalled_s(job(usual_steps_per_second=dict.fromkeys(range(4), 0.0))) is None
    quick = dict.fromkeys(range(4), 0.3)
    usual = dict.fromkeys(range(4), 0.0)
    assert stalled_s(job(usual_steps_per_second=usual, steps_per_second=quick)) == 41


def test_a_job_that_is_done_does_not_stall() -> None:
    """Its processes have said that they make no more steps."""
    assert stalled_s(job(values={number: {"done": 1.0} for number in range(4)})) is None


def test_nobody_has_joined() -> None:
    """After a minute that is worth a sentence, with what each has to call."""
    status = job(2, state=dict.fromkeys(range(2), coordination_pb2.UNINITIALIZED))
    status.phase = "gathering"
    (text,) = texts(status)
    assert text == (
        "no process has joined for 300 s: each has to call holdfast.multihost.initialize()"
    )
    status.up_s = 30
    assert texts(status) == []


def test_a_job_that_gets_on_needs_nothing() -> None:
    """Nothing is asked for; a silence within what is expected is none."""
    status = moving(heartbeat_age_s={1: 20.0})
    assert not wants_stacks(status) and texts(status) == [] and not silent(status, status.tasks[1])


def test_who_waits_in_cpp_is_not_blamed() -> None:
    """One has skipped the collective of the others, which are inside a compiled function: it waits
    in Python, and they in C++, with no frame of jax's.
    """
    inside = f"{stack('reduce', 50)}\n  (asleep in C++)"
    stacks = {number: [inside] for number in (0, 1, 3)} | {2: [stack("main", 90, "sync")]}
    (text,) = texts(job(), stacks)
    assert text == (
        "process 2 (host b2) waits in sync at main, train.py:90, no step for 41 s; the other 3 wait"
        " in C++ at reduce, train.py:50"
    )


def test_a_minority_that_waits_is_the_odd_one() -> None:
    """Three work, and one waits for them: it is apart, whoever is right."""
    stacks = {number: [stack("load", 26)] for number in (0, 1, 3)} | {2: [WAITING]}
    (text,) = texts(job(), stacks)
    assert text.startswith("process 2 (host b2) waits in psum at reduce, train.py:50")


def test_the_odd_one_comes_first_with_its_line() -> None:
    """The sentence of a loader that sleeps on one host; the same in parts, for programs."""
    status = job()
    assert wants_stacks(status) and stalled_s(status) == 41
    stacks = {number: [WAITING] for number in (0, 1, 3)} | {2: [stack("load_batch", 26)]}
    (finding,) = diagnose(Evidence(status, stacks))
    assert (
        finding.text
        == "process 2 (host b2) is in load_batch, train.py:26, no step for 41 s; the other 3 wait"
        " in psum at reduce, train.py:50"
    )
    parts = finding.as_json()
    names = ("processes", "hosts", "function", "file", "line")
    told = tuple(parts[name] for name in names)
    assert told == ((2,), ("b2",), "load_batch", "/home/me/train.py", 26)


def test_of_thousands_those_are_counted_that_were_asked() -> None:
    """Nobody knows of the others where they are."""
    stacks = {number: [WAITING] for number in range(64)} | {2: [stack("load_batch", 26)]}
    (text,) = texts(job(4096), stacks)
    assert text.endswith("; 63 others that were asked wait in psum at reduce, train.py:50")


def test_of_two_the_one_that_works_is_odd() -> None:
    """There is no majority; whoever does not wait keeps the other waiting."""
    status = job(2)
    (text,) = texts(status, {0: [stack("load", 3)], 1: [WAITING]})
    assert (
        text.startswith("process 0 (host b0) is in load, train.py:3")
        and "the other waits in psum" in text
    )


def test_a_loop_sampled_twice_is_one_place() -> None:
    """Processes are told apart by function first, by line where that says nothing."""
    loop = [stack("spin", line) for line in (4, 5, 4, 6)]
    (text,) = texts(job(), {number: [WAITING] * 4 for number in (0, 1, 3)} | {2: loop})
    assert text.startswith("process 2 (host b2) is in spin, train.py:4,")
    skipped = [stack("reduce", 51, "psum")] * 4
    (text,) = texts(
        job(step={2: 9}), {number: [WAITING] * 4 for number in (0, 1, 3)} | {2: skipped}
    )
    assert text.startswith(
        "process 2 (host b2) waits in psum at reduce, train.py:51, at step 9, 2 ahead of the"
        " others' 7, no step for 41 s;"
    )


def test_all_at_one_place_accuse_nobody() -> None:
    """The place is named, for whoever looks; stacks that say nothing are nothing."""
    (finding,) = diagnose(Evidence(job(), {number: [WAITING] for number in range(4)}))
    assert finding.kind == "together"
    assert finding.text.endswith("wait in psum at reduce, train.py:50, no step for 41 s")
    assert texts(job(), {number: ["UNAVAILABLE"] for number in range(4)}) == []


def test_a_look_tells_why_nobody_answers() -> None:
    """Stopped, held by C code, cut off, or on another host."""
    status = job(heartbeat_age_s={2: 25.0}, values={2: {"report_interval_s": 2.0}})
    assert silent(status, status.tasks[2])
    others = {number: [WAITING] for number in (0, 1, 3)} | {2: []}
    place = stack("load_batch", 26)

    def first(look: Look | None) -> str:
        return texts(status, others, looks={} if look is None else {2: look})[0]

    heard = "(last heard of 25 s ago, expected every 2 s)"
    assert (
        first(Look(stopped=True))
        == f"process 2 (host b2) is stopped, by a signal or a debugger {heard}: kill -CONT 102 lets"
        " it go on"
    )
    assert (
        first(Look(held_s=21, stacks=place))
        == "process 2 (host b2) is in load_batch, train.py:26, in C code that holds its interpreter"
        " for 21 s"
    )
    assert first(Look(stacks=place)).startswith(
        "process 2 (host b2) is in load_batch, train.py:26, but is cut off from the coordinator"
        f" {heard}"
    )
    assert first(None).startswith(
        f"process 2 (host b2) does not answer {heard}: stopped, cut off, or held by C code:"
        " `holdfast status`"
    )


def test_who_is_merely_slow_is_not_accused() -> None:
    """A look that shows a running interpreter, of a process that was just heard of, is no
    finding.
    """
    status = moving()
    assert texts(status, {2: []}, looks={2: Look(stacks=WAITING)}) == []


def test_crossed_barriers_name_the_few() -> None:
    """One step ahead: who waits at which barrier, and the line."""
    status = job()
    status.barriers.add(
        barrier_id="step 7", waiting=[{"task_id": n, "since_s": 9} for n in (0, 1, 3)], missing=[2]
    )
    status.barriers.add(
        barrier_id="step 8", waiting=[{"task_id": 2, "since_s": 9}], missing=[0, 1, 3]
    )
    assert (
        texts(status, {2: [stack("main", 40, "sync")]})[0]
        == "process 2 (host b2) waits at barrier 'step 8' (in main, train.py:40), while the other 3"
        " wait for it at 'step 7'"
    )


def test_a_barrier_names_whom_it_misses() -> None:
    """After five seconds, with the place where stacks show it."""
    status = job(step_age_s=dict.fromkeys(range(4), -1.0))
    status.barriers.add(
        barrier_id="save/100",
        waiting=[{"task_id": n, "since_s": 12} for n in (0, 1, 3)],
        missing=[2],
    )
    assert texts(status) == [
        "process 2 (host b2) has not come to barrier 'save/100': the other 3 wait there for 12 s"
    ]


def test_failures_come_first_and_silence_last() -> None:
    """What a process said of itself is nearer to the cause than what followed."""
    status = job(state={1: coordination_pb2.ERROR, 3: coordination_pb2.ERROR})
    status.tasks[
        1
    ].error = "process 1 (host b1, silent for 61 s) is lost: its heartbeat timeout is 60 s"
    status.tasks[
        3
    ].error = "process 3 reported: the process ends with SaveFailed: No space left on device"
    assert texts(status)[:2] == [
        "process 3 (host b3) has failed: the process ends with SaveFailed: No space left on device",
        status.tasks[1].error,
    ]


def test_reported_trouble_is_said() -> None:
    """A save that failed, in a job that catches it."""
    assert texts(moving(trouble={2: "step 30 was not saved: [Errno 28] No space left"})) == [
        "process 2 (host b2): step 30 was not saved: [Errno 28] No space left"
    ]


def test_who_has_raised_and_stays_is_the_cause() -> None:
    """Also in a job that hangs, in which it is one of many that wait."""
    raised = {2: "the process ends with ValueError: no"}
    expected = ["process 2 (host b2) has failed, and does not end: ValueError: no"]
    assert texts(moving(trouble=raised)) == expected
    assert (
        hanging(job(trouble=raised), {process: [WAITING] for process in range(4)})[:1] == expected
    )


def test_who_never_waits_keeps_the_others_waiting() -> None:
    """Steps move, so no step is missing: the shares of waiting tell, and stacks the line."""
    shares = {
        0: {"waiting_share": 0.66},
        1: {"waiting_share": 0.6},
        2: {"waiting_share": 0.02},
        3: {"waiting_share": 0.7},
    }
    status = moving(values=shares, steps_per_second=dict.fromkeys(range(4), 1.3))
    assert wants_stacks(status)
    samples = [stack("load_batch", 26), WAITING, stack("load_batch", 26)]
    assert texts(status, {2: samples}) == [
        "process 2 (host b2) keeps the others waiting for 60% of their time (in load_batch,"
        " train.py:26); 1.3 steps/s, 4 at best"
    ]
    assert texts(moving(values={n: {"waiting_share": 0.5} for n in range(4)})) == []


def test_a_gathering_job_names_who_has_not_come() -> None:
    """With how many have; at most eight are named."""
    status = session_pb2.StatusResponse(num_processes=20, phase="gathering", up_s=30)
    for number in range(20):
        status.tasks.add(
            task_id=number,
            state=coordination_pb2.UNINITIALIZED if number else coordination_pb2.CONNECTED,
            heartbeat_age_s=1,
        )
    (text,) = texts(status)
    assert text.startswith("processes 1 (host unknown), 2") and text.endswith(
        "and 11 more have not come yet; 1 of 20 have"
    )


def test_a_diagnosis_of_thousands_is_quick() -> None:
    """4,096 processes with stacks: the one that is elsewhere is found in one pass."""
    status = job(4096)
    stacks = {number: [WAITING] for number in range(4096)} | {77: [stack("load_batch", 26)]}
    (text,) = texts(status, stacks)
    assert text.startswith("process 77 (host b77) is in load_batch, train.py:26") and text.endswith(
        "the other 4095 wait in psum at reduce, train.py:50"
    )


def hanging(
    status: session_pb2.StatusResponse,
    stacks: dict[int, list[str]],
    looks: dict[int, Look] | None = None,
) -> list[str]:
    """Returns the sentences about a job of which it is known that it hangs."""
    return [finding.text for finding in diagnose(Evidence(status, stacks, looks or {}, hangs=True))]


def test_in_a_hang_who_cannot_run_comes_first() -> None:
    """C code that holds the interpreter is said before where the others wait."""
    stacks = {number: [WAITING] for number in (0, 1, 3)} | {2: [stack("load_batch", 26)]}
    found = hanging(
        job(heartbeat_age_s={2: 50.0}),
        stacks,
        {2: Look(held_s=12.0, stacks=stack("load_batch", 26))},
    )
    assert found == [
        "process 2 (host b2) is in load_batch, train.py:26, in C code that holds its interpreter"
        " for 12 s"
    ]


def test_a_hang_at_one_place_says_where() -> None:
    """Nobody is odd; a job of one process has no other to wait for."""
    assert hanging(job(2), {0: [WAITING], 1: [WAITING]}) == [
        "processes 0 (host b0), 1 (host b1) wait in psum at reduce, train.py:50"
    ]
    assert hanging(job(1), {0: [stack("load_batch", 26)]}) == [
        "process 0 (host b0) is in load_batch, train.py:26"
    ]


def test_between_two_looks_the_seconds_go_on() -> None:
    """At a later status the stacks are those of before. Where steps come again, or the coordinator
    is another one, they say nothing.
    """
    stacks = {number: [WAITING] for number in (0, 1, 3)} | {2: [stack("load_batch", 26)]}
    status = job()
    status.up_s = 100.0
    looks = {1: Look(held_s=12.0)}
    evidence = Evidence(status, stacks, looks)
    later = session_pb2.StatusResponse()
    later.CopyFrom(status)
    later.up_s = 105.0
    for task in later.tasks:
        task.step_age_s += 5.0
    found = at_later(evidence, later)
    assert "no step for 46 s" in diagnose(found)[0].text
    assert found.looks[1].held_s == 17.0 and found.stacks == stacks
    assert at_later(evidence, moving()).stacks == {}
    later.service_life = 7
    assert at_later(evidence, later).stacks == {}
