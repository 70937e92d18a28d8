"""Trials of preemption, many in a minute: whole jobs that save, forked from a process that has
imported jax and nothing more.

`python -m tests.support.preemption_trials FIRST COUNT` runs the seeds, prints one line for each,
and ends with 1 where one has failed.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from holdfast import checkpoint, multihost
from holdfast.coordination import CoordinationService

MARKS = {
    "before initialize()": "begun",
    "in initialize()": "begun",
    "after initialize()": "joined",
    "in a save": "",
    "at the last step": "the last step",
    "in shutdown()": "leaving",
}
WHEN = tuple(MARKS)
"""When the signal comes: after a process has printed a line, or while a save is in flight on all.
"""
LIMIT_S = 60.0
FLOATS = 1 << 22  # of each process in a save: 16 MiB, so that it takes a while


@dataclass(frozen=True)
class Plan:
    """One trial, drawn from its seed."""

    count: int
    stride: int
    steps: int
    slow: int
    victims: tuple[int, ...]
    when: str
    delay_s: float
    twice: bool
    ahead: bool  # a loop that computes, and never waits for its devices


def plan_of(seed: int) -> Plan:
    """Returns the trial of a seed; six seeds in a row have six moments, and strides and loops
    alternate.
    """
    rng = random.Random(seed)
    count = 2 + seed % 2
    when = WHEN[seed % len(WHEN)]
    delays = {"before initialize()": 0.0, "in initialize()": rng.uniform(0.0, 0.8)}
    delays |= {"in a save": rng.uniform(0.0, 0.01), "at the last step": rng.uniform(0.0, 0.01)}
    return Plan(
        count=count,
        stride=(1, 7)[seed // len(WHEN) % 2],
        steps=rng.randint(5, 25),
        slow=rng.randrange(count),
        victims=tuple(rng.sample(range(count), 1 + (rng.random() < 0.3))),
        when=when,
        delay_s=delays.get(when, rng.uniform(0.0, 0.1)),
        twice=rng.random() < 0.3,
        ahead=seed // len(WHEN) % 4 in (1, 2),
    )


def state_of(step: int) -> jax.Array:
    """Returns an array that is spread over all processes."""
    mesh = jax.make_mesh((jax.device_count(),), ("all",))
    shape = (jax.process_count() * FLOATS,)
    own = np.full(FLOATS, step, np.float32)
    return jax.make_array_from_process_local_data(
        NamedSharding(mesh, PartitionSpec("all")), own, shape
    )


@functools.partial(jax.jit, donate_argnums=0)
def advance(state: jax.Array) -> jax.Array:
    """Returns the state of the next step, which all processes compute together."""
    return state + state.mean() / 2 + 1


def run_ahead(plan: Plan, manager: checkpoint.CheckpointManager, last: int) -> int | None:
    """Makes steps as fast as jax takes them; returns the step at which it has
    stopped.
    """
    state = state_of(0)
    for step in range(0, last + 1, plan.stride):
        if step == last:
            print("the last step", flush=True)
        state = advance(state)
        if step // plan.stride % 4 == 0:
            print(f"saving {step}", flush=True)
        manager.save(step, state)
        if manager.reached_preemption(step):
            return step
    return None


def run_slowly(
    plan: Plan, manager: checkpoint.CheckpointManager, last: int, step_s: float
) -> int | None:
    """Makes steps of some time, saves some of them, and returns the step at which it stopped."""
    for step in range(0, last + 1, plan.stride):
        if step == last:
            print("the last step", flush=True)
        if multihost.reached_preemption(step):
            manager.save(step, state_of(step))
            return step
        if step // plan.stride % 4 == 1:
            print(f"saving {step}", flush=True)
            manager.save(step, state_of(step))
        time.sleep(step_s)
    return None


def work(index: int, address: str, plan: Plan, root: Path) -> None:
    """The program of one process: steps, a save every few of them, and one more where it is
    preempted.
    """
    print("begun", flush=True)
    if plan.when == "before initialize()" and index in plan.victims:
        time.sleep(LIMIT_S)
    multihost.initialize(address, plan.count, index, timeout_s=30)
    print("joined", flush=True)
    last = plan.stride * (plan.steps - 1)
    policy = checkpoint.EveryNSteps(4 * plan.stride) if plan.ahead else None
    manager = checkpoint.CheckpointManager(root, save_policy=policy)
    if plan.ahead:
        stopped = run_ahead(plan, manager, last)
    else:
        stopped = run_slowly(plan, manager, last, 0.03 if index == plan.slow else 0.003)
    manager.close()
    assert stopped in (None, *manager.all_steps())
    print(f"story: stopped at {stopped}", flush=True)
    print("leaving", flush=True)
    multihost.shutdown()
    print("left", flush=True)


class Job:
    """The processes of one trial, and what they print."""

    def __init__(self, address: str, plan: Plan, folder: Path) -> None:
        self._root = folder / "steps"
        self.outputs = [folder / str(index) for index in range(plan.count)]
        self.pids = [
            _fork(self.outputs[index], index, address, plan, self._root)
            for index in range(plan.count)
        ]
        self.codes: dict[int, int] = {}

    def text(self, index: int) -> str:
        """Returns what a process has printed."""
        return self.outputs[index].read_text() if self.outputs[index].exists() else ""

    def poll(self) -> None:
        """Notes which processes have ended."""
        for index, pid in enumerate(self.pids):
            if index not in self.codes and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                self.codes[index] = os.waitstatus_to_exitcode(ended[1])

    def signal(self, index: int, number: int) -> None:
        """Sends a signal to a process that has not ended."""
        self.poll()
        if index not in self.codes:
            os.kill(self.pids[index], number)

    def wait_for(self, index: int, mark: str) -> None:
        """Waits until a process has printed a line, or has ended."""
        end_s = time.monotonic() + LIMIT_S
        while (
            f"{mark}\n" not in self.text(index)
            and index not in self.codes
            and time.monotonic() < end_s
        ):
            self.poll()
            time.sleep(0.002)

    def in_a_save(self) -> bool:
        """Returns whether all processes have begun to save a step that is not committed."""
        begun = [
            [line for line in self.text(index).splitlines() if line.startswith("saving ")]
            for index in range(len(self.pids))
        ]
        if not all(begun) or len(last := {lines[-1] for lines in begun}) != 1:
            return False
        step = last.pop().removeprefix("saving ")
        return not (self._root / step / "checkpoint.json").exists()

    def wait_for_save(self, delay_s: float) -> bool:
        """Waits until a save has been in flight on all for so long; returns False where none comes
        any more.
        """
        end_s = time.monotonic() + LIMIT_S
        while not self.codes and time.monotonic() < end_s:
            self.poll()
            if self.in_a_save():
                time.sleep(delay_s)
                if self.in_a_save():
                    return True
            time.sleep(0.002)
        return False

    def finish(self, plan: Plan) -> None:
        """Waits for the end of all; where a process has died before it had joined, ends the rest,
        as a launcher does.
        """
        end_s = time.monotonic() + LIMIT_S
        while len(self.codes) < len(self.pids):
            self.poll()
            died_early = any(
                self.codes.get(index) == -signal.SIGTERM and "joined\n" not in self.text(index)
                for index in plan.victims
            )
            if died_early or time.monotonic() > end_s:
                for index in range(len(self.pids)):
                    self.signal(index, signal.SIGKILL)
            time.sleep(0.005)


def _fork(output: Path, index: int, address: str, plan: Plan, root: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1), os.dup2(file, 2)
    code = 1
    try:
        work(index, address, plan, root)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:  # an interpreter's end, without the parent's `with` blocks
        atexit._run_exitfuncs()
        os._exit(code)


def faults_of(job: Job, plan: Plan) -> list[str]:
    """Returns what was wrong with a trial; an empty list for one story, or for a job that was
    preempted before it had begun.
    """
    texts = [job.text(index) for index in range(plan.count)]
    gathered = any(f"{plan.count} of {plan.count} processes" in text for text in texts)
    died = [index for index in plan.victims if job.codes[index] == -signal.SIGTERM]
    if died and not gathered:
        return []  # before all had joined: the launcher counts it as preempted
    # Once all have come to shutdown() the job is over: its signals are the program's own again.
    all_came = any("left\n" in text for text in texts) and not any(
        "leaving without the others" in text for text in texts
    )
    over = [index for index in died if all_came and "leaving\n" in texts[index]]
    faults = [
        f"process {index} ended with {code}"
        for index, code in sorted(job.codes.items())
        if code and index not in over
    ]
    stories = {line for text in texts for line in text.splitlines() if line.startswith("story: ")}
    return faults + ([f"stories differ: {sorted(stories)}"] if len(stories) != 1 else [])


def run(seed: int) -> list[str]:
    """Runs a trial and returns what was wrong with it."""
    plan = plan_of(seed)
    folder = Path(
        tempfile.mkdtemp()
    )  # not a TemporaryDirectory, which the end of every child would remove
    with CoordinationService.spawn(plan.count, recoverable=True, survivable=True) as service:
        job = Job(service.address, plan, folder)
        moment = plan.when
        if plan.when == "in a save":
            moment += (
                ", in flight on all" if job.wait_for_save(plan.delay_s) else ", which none was"
            )
        else:
            for victim in plan.victims:
                job.wait_for(victim, MARKS[plan.when])
            time.sleep(plan.delay_s)
        for _ in range(1 + plan.twice):
            for victim in plan.victims:
                job.signal(victim, signal.SIGTERM)
            time.sleep(0.02)
        job.finish(plan)
        faults = faults_of(job, plan)
        stories = {
            line
            for index in range(plan.count)
            for line in job.text(index).splitlines()
            if line.startswith("story")
        }
        print(
            f"seed {seed}: {moment}: {faults or sorted(stories) or 'preempted before it began'}",
            flush=True,
        )
        if faults:
            print(
                plan,
                *(f"--- process {index}:\n{job.text(index)}" for index in range(plan.count)),
                sep="\n",
                flush=True,
            )
    shutil.rmtree(folder)
    return faults


def main(arguments: Sequence[str]) -> int:
    logging.basicConfig(format="%(levelname)s %(message)s")
    logging.getLogger("holdfast").setLevel("INFO")
    first, count = map(int, arguments)
    failed = [seed for seed in range(first, first + count) if run(seed)]
    print(
        f"{count - len(failed)} of {count} trials have one story",
        *(f"failed: {failed}" for _ in failed[:1]),
    )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
