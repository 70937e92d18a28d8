"""Part e: two processes of one job on one device, one of which is killed at a random moment."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import processes
from plan import Plan
from report import figure, not_run, seconds, size

WORKER = Path(__file__).with_name("two_worker.py")
MEMORY = {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".4"}
OTHER_NAMES = {"XLA_CLIENT_MEM_FRACTION"}  # jax refuses both
SHARE_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
RECOVER = {
    "JAX_ENABLE_RECOVERABILITY": "1",
    "XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE": "1",
    "XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT": "1",
}
STEPS = {True: 30, False: 40}  # by smoke
SAVE_EVERY = 5
BARRIERS = 100
KILL_FROM_STEP = 6
KILL_WITHIN_S = 1.0
COLLECTIVE_S = 25.0
LEAST_S = 6.0
REFUSAL_WORDS = ("Duplicate GPU", "NCCL", "ncclInvalid", "Error:")


@dataclass
class Life:
    """What was seen of one job."""

    marks: list[dict[str, Any]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    killed: dict[str, Any] | None = None
    killed_s: float = 0.0
    code: int | None = None

    def of(self, name: str, attempt: int | None = None) -> list[dict[str, Any]]:
        """Returns the marks of a name."""
        return [
            mark
            for mark in self.marks
            if mark["name"] == name and attempt in (None, mark["attempt"])
        ]

    def steps_of(self, process: int) -> list[int]:
        return [mark["step"] for mark in self.of("step", 1) if mark["process"] == process]


def run_job(
    words: Sequence[str],
    environment: dict[str, str],
    end_s: float,
    *,
    options: Sequence[str] = (),
    watch: Callable[[], None] = lambda: None,
    line: Callable[[str], None],
) -> int | None:
    """Runs two processes under `holdfast run`, to that second of the monotonic clock at most.

    Returns the launcher's code, None where the time was over; then all say where they are.
    """
    holdfast = shutil.which("holdfast")
    assert holdfast is not None, "no holdfast on PATH"
    command = [sys.executable, holdfast, "run", "-n", "2", *options]
    command += ["--", sys.executable, str(WORKER), *words]

    def take(text: str) -> None:
        print(text, flush=True)
        if not text.startswith("Extension modules:"):
            line(text)

    told = {key: value for key, value in os.environ.items() if key not in OTHER_NAMES}
    return processes.run(command, told | MEMORY | environment, end_s, take, watch)


def find_collective(plan: Plan, end_s: float) -> tuple[bool, dict[str, str]]:
    """Returns whether a sum over both devices works, and by which variables."""
    if plan.smoke:
        not_run("a sum over both processes' devices", "not in smoke")
        return plan.cpu, {}
    tries: list[dict[str, str]] = [{}] if plan.cpu else [{}, SHARE_GPU]
    for environment in tries:
        lines: list[str] = []
        limit_s = min(COLLECTIVE_S, (end_s - time.monotonic()) / 4)
        code = run_job(["collective"], environment, time.monotonic() + limit_s, line=lines.append)
        named = " ".join(f"{key}={value}" for key, value in environment.items()) or "as it is"
        if code == 0:
            figure(f"a sum over both processes' devices, {named}", "works")
            return True, environment
        figure(
            f"a sum over both processes' devices, {named}",
            "not within its limit" if code is None else f"refused, code {code}",
            refusal(lines),
        )
    return False, {}


def refusal(lines: Sequence[str]) -> str:
    """Returns the line of an output that says why."""
    for word in REFUSAL_WORDS:
        for text in lines:
            if word in text:
                return text.strip()[:300]
    return "; ".join(text.strip() for text in lines[-3:])[:300]


def kill_one(
    plan: Plan, name: str, words: Sequence[str], environment: dict[str, str], end_s: float
) -> Life:
    """Runs a job, and kills one of its processes at a random moment."""
    life = Life()
    folder = plan.folder(name)
    folder.mkdir()
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    lots = random.Random(name)
    due_s = 0.0

    def watch() -> None:
        nonlocal due_s
        life.marks += reader.read()
        if life.killed is not None:
            return
        if not due_s:
            if all(max(life.steps_of(each), default=0) >= KILL_FROM_STEP for each in (0, 1)):
                due_s = time.monotonic() + lots.uniform(0, KILL_WITHIN_S)
        elif time.monotonic() >= due_s:
            victim = lots.randrange(2)
            life.killed = next(mark for mark in life.of("joined", 1) if mark["process"] == victim)
            with contextlib.suppress(ProcessLookupError):
                os.kill(life.killed["pid"], signal.SIGKILL)
            life.killed_s = time.monotonic()

    with open_pipe(pipe) as reader:
        life.code = run_job(
            ["train", str(pipe), str(folder / "steps"), *words],
            environment,
            end_s,
            options=["--max-restarts", "3", "--log-dir", str(folder / "logs")],
            watch=watch,
            line=life.lines.append,
        )
        life.marks += reader.read()
    shutil.rmtree(folder)
    return life


class PipeReader:
    """The marks that have come through a pipe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rest = b""

    def read(self) -> list[dict[str, Any]]:
        """Returns those that are new. Does not wait."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._fd, 1 << 16):
                self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        return [json.loads(line) for line in lines]


@contextlib.contextmanager
def open_pipe(path: Path) -> Iterator[PipeReader]:
    """Yields the reader of a pipe that never ends."""
    fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        yield PipeReader(fd)
    finally:
        os.close(fd)


def report(name: str, life: Life) -> None:
    """Reports what a kill has cost, or how far the job came."""
    if life.killed is None:
        figure(name, f"nobody could be killed: code {life.code}", refusal(life.lines))
        return
    before = max(mark["step"] for mark in life.of("step", 1))
    after = [mark for mark in life.of("step") if mark["attempt"] > 1 and mark["step"] > before]
    ends = life.of("end")
    is_right = len(ends) == 2 and all(mark["is_right"] for mark in ends)
    outcome = f"code {life.code}" if life.code is not None else "did not end within its limit"
    if not after:
        figure(name, f"no new step after the kill, {outcome}", refusal(life.lines))
        return
    restored = life.of("restored", 2)
    stayed = {mark["pid"] for mark in life.of("joined", 1)} & {
        mark["pid"] for mark in life.of("joined", 2)
    }
    memory = {mark["limit_bytes"] for mark in life.of("joined", 2)} - {0}
    told = [
        f"process {life.killed['process']} killed after step {before}",
        f"restored step {restored[0]['step'] if restored else 'not known'}",
        "the other stayed" if stayed else "both new",
        f"the end {'is bit-exact' if is_right else 'is NOT what it should be'}, {outcome}",
    ]
    if memory:
        told.append(f"memory of each {' and '.join(map(size, sorted(memory)))}")
    to_step_s = min(mark["time_s"] for mark in after) - life.killed_s
    figure(f"{name}: from the kill to a new step", seconds(to_step_s), "; ".join(told))


def main() -> None:
    plan = Plan.of_json(sys.argv[1])
    end_s = time.monotonic() + plan.limit_s - 4  # time to end a job, and to say where it was
    processes.adopt_orphans()
    works, environment = find_collective(plan, end_s)
    loop = "a loop with sums" if works else "a loop local to each device"
    variants = [
        (f"{loop}, {after}{', recoverable' if flags else ''}", stays, flags)
        for flags in ({}, RECOVER)
        for stays, after in (("stays", "the survivor stays"), ("", "all restarted"))
    ]
    if plan.smoke:
        not_run("without run_restartable, and with jax's recoverability", "not in smoke")
        variants = variants[:1]
    for number, (name, stays, flags) in enumerate(variants):
        limit_s = (end_s - time.monotonic()) / (len(variants) - number)
        if limit_s < LEAST_S:
            not_run(name, "the time was over")
            continue
        words = [str(STEPS[plan.smoke]), str(SAVE_EVERY), str(0 if number else BARRIERS)]
        words += ["collective"] * works + [stays] * bool(stays)
        life = kill_one(
            plan, f"variant{number}", words, environment | flags, time.monotonic() + limit_s
        )
        if not number:
            report_start(life)
        report(name, life)


def report_start(life: Life) -> None:
    """Reports how the processes of a job came together."""
    joined = life.of("joined", 1)
    if len(joined) == 2:
        took = max(mark["time_s"] - mark["born_s"] for mark in joined)
        limits = [size(mark["limit_bytes"]) for mark in joined if mark["limit_bytes"]]
        figure(
            "initialize() with the backend, after the imports",
            seconds(took),
            f"memory of each {' and '.join(limits)}" if limits else "",
        )
    if barriers := life.of("barriers", 1):
        worst = max(mark["median_s"] for mark in barriers)
        figure(f"a barrier of both, median of {BARRIERS}", seconds(worst))


if __name__ == "__main__":
    main()
