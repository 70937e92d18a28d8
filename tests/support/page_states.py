"""Made-up jobs in every state that the page shows, for its tests and its pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from holdfast.coordination.diagnosis.findings import Evidence, diagnose
from holdfast.coordination.diagnosis.step_curve import Sample
from holdfast.proto import coordination_pb2, session_pb2
from holdfast.web.snapshot import snapshot

NOW = 1_700_000_900.0
BEGAN = NOW - 900.0
PACE = 4.1
WAITING = (
    'Thread MainThread:\n  File "/home/me/train.py", line 50, in step\n  File'
    ' "/x/site-packages/jax/a.py", line 1, in block_until_ready'
)
LOADING = 'Thread MainThread:\n  File "/home/me/train.py", line 26, in load_batch'
GOODPUT = {"stepping_s": 812.4, "starting_s": 41.0, "restoring_s": 9.4, "saving_s": 37.2}
SAVED = ((1000, 274.0), (2000, 518.0), (3000, 762.0))


LENGTH_S = NOW - BEGAN
FIRST_STEP_S = 30
"""When a job that was not restarted made its first step."""


def step_at(after_s: float) -> int:
    """Returns the step of a job that was not restarted and never stood."""
    return int(PACE * (after_s - FIRST_STEP_S))


def job(
    count: int = 4,
    hosts: int = 4,
    *,
    step: int | None = None,
    saved: Sequence[tuple[int, float]] = SAVED,
    **launcher: Any,
) -> session_pb2.StatusResponse:
    """Returns a job that gets on, 870 s after its first step; `saved` has steps and when each was
    saved.
    """
    if step is None:
        step = step_at(LENGTH_S)
    status = session_pb2.StatusResponse(
        job="run7", attempt=1, num_processes=count, up_s=890, phase="running"
    )
    status.launcher.MergeFrom(
        session_pb2.Launcher(
            command="python train.py --config large.toml",
            folder="/home/me/run7",
            began_unix_s=BEGAN,
            attempt=1,
            **{"state": "running", **launcher},
        )
    )
    for number in range(count):
        task = status.tasks.add(
            task_id=number,
            state=coordination_pb2.CONNECTED,
            host=f"node-{number * hosts // count:04}",
            pid=4000 + number,
            heartbeat_age_s=1.2,
            step_age_s=0.2,
            steps_per_second=PACE,
            usual_steps_per_second=PACE + 0.2,
        )
        task.progress.step = step - number % 2
        task.progress.saved_step = saved[-1][0]
        task.progress.values.update(
            report_interval_s=2.0,
            waiting_share=0.08,
            memory_bytes=41e9 + number * 3e8,
            checkpoint_peak_bytes=2e9,
        )
    root = status.tasks[0].progress.root
    root.path = "gs://models/run7"
    root.num_steps = len(saved)
    for number, (saved_step, after_s) in enumerate(saved):
        root.steps.add(
            step=saved_step,
            bytes=9_800_000_000 if number else 61_300_000_000,
            incremental=number > 0,
            saved_unix_s=BEGAN + after_s,
            took_s=1.4 if number else 6.3,
            metrics={"loss": 2.9 - saved_step / 2000},
            best=["loss"] if saved_step == saved[-1][0] else [],
        )
        event(status, after_s, "saved", f"step {saved_step} is saved")
    root.steps.add(step=step - 20, local=True, survives=1)
    status.goodput_s.update(GOODPUT)
    event(status, 0, "launcher", f"attempt 1 is running: attempt 1 starts with {count} processes")
    event(status, 12, "joined", f"{count} processes joined")
    return status


def event(status: session_pb2.StatusResponse, after_s: float, kind: str, text: str) -> None:
    """Adds what happened so long after the job's beginning."""
    status.events.add(unix_s=BEGAN + after_s, kind=kind, text=text)


def curve(*stretches: tuple[float, float, int], pace: float = PACE) -> list[Sample]:
    """Returns the samples of stretches, each from one second to another, from a step on."""
    return [
        Sample(BEGAN + at, int(first + pace * (at - begin)), pace, -1)
        for begin, end, first in stretches
        for at in range(int(begin), int(end), 5)
    ]


def until(after_s: float) -> list[Sample]:
    """Returns the samples of a job that was not restarted."""
    return curve((FIRST_STEP_S, after_s, 0))


WHOLE = until(LENGTH_S)
STOOD_S = 72


def shown(
    status: session_pb2.StatusResponse,
    samples: Sequence[Sample] = (),
    *,
    stacks: dict[int, list[str]] | None = None,
    gone: str = "",
) -> dict[str, Any]:
    """Returns the snapshot of a job, with its diagnosis."""
    findings = diagnose(Evidence(status, stacks or {}))
    return snapshot(status, findings, samples, unix_s=NOW, gone=gone)


def healthy() -> dict[str, Any]:
    """All steps come."""
    return shown(job(), WHOLE)


def starting() -> dict[str, Any]:
    """Half of the processes have joined, and nothing else has happened."""
    status = empty(8)
    for number in range(5):
        status.tasks[number].state = coordination_pb2.CONNECTED
    return shown(status)


def empty(up_s: float) -> session_pb2.StatusResponse:
    """Returns a job of eight processes of which none has come."""
    status = job(8)
    status.phase = "gathering"
    status.up_s = up_s
    status.launcher.began_unix_s = NOW - up_s
    status.goodput_s.clear()
    status.goodput_s["starting_s"] = up_s
    del status.events[:]
    event(status, 900 - up_s, "launcher", "attempt 1 is running: attempt 1 starts with 8 processes")
    for task in status.tasks:
        task.ClearField("progress")
        task.state = coordination_pb2.UNINITIALIZED
        task.step_age_s = -1
        task.steps_per_second = 0
        task.usual_steps_per_second = 0
    return status


def nobody_joined() -> dict[str, Any]:
    """A program that does not call initialize()."""
    return shown(empty(95))


def waiting() -> dict[str, Any]:
    """A job without machines: there is no coordinator."""
    status = job(state="scheduling", waiting_for="room for 1 of at least 4 processes")
    bare = session_pb2.StatusResponse(job="run7", launcher=status.launcher)
    bare.goodput_s["waiting_s"] = 900
    return shown(bare, gone="the job has no coordinator now")


def hung() -> dict[str, Any]:
    """One process is in its loader, the others wait for it."""
    status = job(4, step=step_at(LENGTH_S - STOOD_S))
    standing(status)
    stacks = {number: [LOADING if number == 2 else WAITING] for number in range(4)}
    return shown(status, until(LENGTH_S - STOOD_S), stacks=stacks)


def standing(status: session_pb2.StatusResponse) -> None:
    """Has the processes of a job make no step for a while."""
    for task in status.tasks:
        task.step_age_s = STOOD_S
        task.steps_per_second = 0
    status.goodput_s["stepping_s"] -= STOOD_S
    status.goodput_s["hung_s"] = STOOD_S


def slow() -> dict[str, Any]:
    """One process has kept the others waiting for 100 s."""
    slow_s = 100.0
    pace = 1.7
    begin = LENGTH_S - slow_s
    before = step_at(begin)
    status = job(4, step=int(before + pace * slow_s))
    for task in status.tasks:
        task.steps_per_second = pace
        task.progress.values["waiting_share"] = 0.02 if task.task_id == 3 else 0.58
    samples = until(begin) + curve((begin, LENGTH_S, before), pace=pace)
    return shown(status, samples, stacks={3: [LOADING]})


def preempting() -> dict[str, Any]:
    """A notice is out."""
    status = job(state="preempting", why="SIGTERM at process 2: all save and leave")
    event(status, 895, "notice", "process 2 has a preemption notice: SIGTERM")
    return shown(status, WHOLE)


def restarted() -> dict[str, Any]:
    """Three restarts, and it runs again."""
    last_s = 615.0
    saved = ((500, 152.0), (1000, 347.0), (1500, 557.0), (2500, 859.0))
    status = job(step=int(1500 + PACE * (LENGTH_S - last_s)), saved=saved)
    status.attempt = 4
    status.launcher.attempt = 4
    for number, at in enumerate((200, 410, 590), 1):
        event(status, at, "lost", f"process {number} (host node-000{number}) is lost: signal 9")
        why = f"process {number} of 4 was ended by signal 9"
        event(status, at + 1, "launcher", f"attempt {number} is restarting: {why}")
        event(status, at + 14, "launcher", f"attempt {number + 1} is running: it starts")
    goodput = {"redoing_s": 142.0, "ending_s": 8.1, "stepping_s": 609.0, "starting_s": 94.3}
    status.goodput_s.update(goodput)
    stretches = ((30, 200, 0), (225, 410, 500), (435, 590, 1000), (last_s, LENGTH_S, 1500))
    return shown(status, curve(*stretches))


def failed() -> dict[str, Any]:
    """It was ended, and is not started again."""
    why = "process 1 of 4 was ended by signal 9: no restarts are left (--max-restarts 0)"
    status = job(step=step_at(812), state="failed", why=why)
    status.tasks[1].state = coordination_pb2.ERROR
    status.tasks[1].error = "process 1 (host node-0001, ended by signal 9) is lost"
    event(status, 812, "lost", status.tasks[1].error)
    return shown(status, until(812), gone=f"failed: {why}")


def finished() -> dict[str, Any]:
    """All processes have left in order."""
    status = job(state="finished", why="all 4 processes are done")
    for task in status.tasks:
        task.state = coordination_pb2.DISCONNECTED
    return shown(status, WHOLE, gone="done: all 4 processes are done")


def large(count: int = 4096) -> dict[str, Any]:
    """Thousands of processes in four slices, of which one is in its loader."""
    status = job(count, hosts=count // 8, step=step_at(LENGTH_S - STOOD_S))
    standing(status)
    for task in status.tasks:
        task.progress.values["num_slices"] = 4
    stacks = {number: [LOADING if number == 77 else WAITING] for number in range(64, 128)}
    return shown(status, until(LENGTH_S - STOOD_S), stacks=stacks)


STATES: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "healthy": ("Healthy", healthy),
    "starting": ("Starting", starting),
    "nobody-joined": ("Starting", nobody_joined),
    "waiting": ("Waiting for machines", waiting),
    "hung": ("Hung", hung),
    "slow": ("Slow", slow),
    "preempting": ("Preempting", preempting),
    "restarted": ("Healthy", restarted),
    "failed": ("Failed", failed),
    "finished": ("Finished", finished),
    "large": ("Hung", large),
}
"""By name: the state that the page has to say first, and what makes the snapshot."""
