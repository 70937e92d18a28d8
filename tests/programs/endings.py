"""Runs a program in an ending: as a person would start it, from outside, on real processes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .drawing import CORPUS, ONE_SHAPE, STEPS, Run

HANGING = Path(__file__).with_name("hanging")
LIMIT_S = 100.0  # of a part: it is a hang of ours
BOUND_S = 2.0  # that a person waits for a lone program that hangs
STALL_S = 6  # that the launcher waits
_STEP = re.compile(r"^(?:\[\d+\] )?step (\d+) ", re.MULTILINE)

_ASKING = """
import json, sys
from click.testing import CliRunner
from holdfast.cli.entry import main
commands = json.loads(sys.argv[1])
print(json.dumps([CliRunner().invoke(main, [*each, "--json"]).stdout for each in commands]))
"""


@dataclass
class Part:
    """One command of a run, from its start to its end, and what was seen of it."""

    command: list[str]
    folder: Path
    steps: int
    launched: bool
    began_unix_s: float = 0.0
    elapsed_s: float = 0.0
    silent_s: float = 0.0  # before its first line
    code: int | None = None
    log: str = ""
    sent: list[str] = field(default_factory=list)
    statuses: list[dict[str, Any]] = field(default_factory=list)
    snapshots: list[dict[str, Any]] = field(default_factory=list)
    limit_passed: bool = False

    @property
    def log_dir(self) -> Path:
        """Returns the folder of the launcher's `--log-dir`."""
        return self.folder / "log"


@dataclass(frozen=True)
class Moment:
    """When something is done to a program: `delay_s` after it says `step`; 0 is its start."""

    step: int
    delay_s: float


def draw_moment(rng: random.Random, steps: int) -> Moment:
    """Returns a moment: most often between two steps, else in the start or near the end."""
    where = rng.random()
    if where < 0.15:
        return Moment(0, rng.uniform(0.0, 3.0))
    if where < 0.85:
        return Moment(rng.randrange(1, steps - 5), rng.uniform(0.0, 0.05))
    return Moment(rng.randrange(steps - 5, steps + 1), rng.uniform(0.0, 0.3))


class Running:
    """A part that runs; `log` grows with what it prints."""

    def __init__(self, part: Part, environment: dict[str, str]) -> None:
        self.part = part
        self._began_s = time.monotonic()
        part.began_unix_s = time.time()
        self.process = subprocess.Popen(
            part.command,
            cwd=part.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
            errors="replace",
        )
        self._environment = environment
        self._changed = threading.Condition()
        self._ended = False
        self._watchers: list[threading.Thread] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, moment: Moment) -> bool:
        """Waits for a moment; returns whether the part still runs then."""
        if moment.step:
            seen = re.compile(rf"^(?:\[\d+\] )?step {moment.step} ", re.MULTILINE)
            with self._changed:
                self._changed.wait_for(lambda: self._ended or seen.search(self.part.log), LIMIT_S)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(moment.delay_s)
        return self.process.poll() is None

    def end(self, within_s: float = LIMIT_S) -> bool:
        """Waits until it has ended; returns whether it has."""
        try:
            self.part.code = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            return False
        self.part.elapsed_s = time.monotonic() - self._began_s
        self._reader.join(20)
        for watcher in self._watchers:
            watcher.join(20)
        return True

    def abandon(self) -> None:
        """Ends what has not ended in its time, with all that it started."""
        self.part.limit_passed = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.end()

    def workers(self) -> list[int]:
        """Returns the processes that run the program below the launcher, the oldest first."""
        wanted = "\0".join(self.part.command[self.part.command.index("--") + 1 :]) + "\0"
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                if (
                    os.readlink(entry / "cwd") == str(self.part.folder)
                    and (entry / "cmdline").read_bytes().decode(errors="replace") == wanted
                ):
                    stat = (entry / "stat").read_text().rpartition(")")[2].split()
                    if stat[0] != "Z":
                        found[int(entry.name)] = int(stat[1])
        # A data loader's workers are no processes of the job.
        return sorted(pid for pid, parent in found.items() if parent not in found)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                if not self.part.log:
                    self.part.silent_s = time.monotonic() - self._began_s
                self.part.log += line
                self._changed.notify_all()
            if self.part.launched and (page := re.search(r"page at (http://\S+)", line)):
                self._watch(self._follow_page, page[1])
                self._watch(self._follow_status, self._environment["COORDINATOR_STATUS"])
        self.process.stdout.close()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _watch(self, follow: Callable[[str], None], where: str) -> None:
        thread = threading.Thread(target=follow, args=(where,), daemon=True)
        self._watchers.append(thread)
        thread.start()

    def _follow_page(self, url: str) -> None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}events", timeout=20) as it:
            for line in it:
                if line.startswith(b"data: "):
                    self.part.snapshots.append(json.loads(line[6:]))

    def _follow_status(self, command: str) -> None:
        """Asks for the status as JSON until the job has ended."""
        while self.process.poll() is None:
            asked = subprocess.run(
                [command, "status", "--json"],
                env=self._environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=30,
            )
            if asked.returncode == 0:
                self.part.statuses.append(json.loads(asked.stdout))
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)


class Runner:
    """Runs the parts of a run in its folder."""

    def __init__(self, run: Run, python: Path, folder: Path) -> None:
        self.run = run
        self.python = python
        self.folder = folder
        self.rng = random.Random(run.seed)
        self.parts: list[Part] = []
        temporary = folder / "t"
        temporary.mkdir()
        self.environment = {
            "PATH": f"{python.parent}:{os.environ['PATH']}",
            "HOME": str(folder),
            "TMPDIR": str(temporary),  # this run's jobs alone
            "JAX_PLATFORMS": "cpu",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": str(HANGING),
            "COORDINATOR_STATUS": str(python.parent / "holdfast"),
        }

    def ask(self, *commands: list[str]) -> list[dict[str, Any]]:
        """Returns the JSON that commands of holdfast's print, as a person would type them
        afterwards. One interpreter runs all: each would import as much as a program does.
        """
        asked = subprocess.run(
            [self.python, "-c", _ASKING, json.dumps(commands)],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
        )
        return [json.loads(answer or "{}") for answer in json.loads(asked.stdout)]

    def parts_as_they_end(self) -> Iterator[Part]:
        """Yields each part once it has ended, before the next one begins."""
        with contextlib.closing(getattr(self, f"_{self.run.ending}")()) as parts:
            for part in parts:
                self.parts.append(part)
                yield part

    # --- Starting

    @contextlib.contextmanager
    def _started(self, *options: str, steps: int = STEPS, processes: int = 0) -> Iterator[Running]:
        """Starts a part, and waits for its end. `processes` is 1 for a lone program, 0 for as many
        as the run has.
        """
        processes = processes or (1 if self.run.shape == "alone" else 2)
        command = ["python", str(CORPUS / f"{self.run.program}.py"), "run", str(steps)]
        if processes > 1:
            logs = ["--log-dir", "log", "--web", *options]
            if options and self.rng.random() < 0.5:
                logs.append("--no-standby")
            command = ["holdfast", "run", "-n", str(processes), *logs, "--", *command]
        command[0] = str(self.python.parent / command[0])
        running = Running(Part(command, self.folder, steps, processes > 1), self.environment)
        try:
            yield running
            if not running.end():
                running.abandon()
        finally:
            if running.process.poll() is None:
                running.abandon()

    def _once(self, *options: str, steps: int = STEPS, processes: int = 0) -> Part:
        with self._started(*options, steps=steps, processes=processes) as running:
            pass
        return running.part

    # --- Endings

    def _finished(self) -> Iterator[Part]:
        yield self._once()

    def _resumed(self) -> Iterator[Part]:
        """On another number of processes, if it can be."""
        yield self._once(steps=STEPS // 2)
        others = [2] if self.run.shape == "alone" else [1, 3]
        if self.run.program in ONE_SHAPE:
            others = [0]
        yield self._once(processes=self.rng.choice(others))

    def _killed(self) -> Iterator[Part]:
        """One process gets SIGKILL. The launcher, or a person, starts it again."""
        moment = draw_moment(self.rng, STEPS)
        with self._started("--max-restarts", "2") as running:
            if running.wait_for(moment):
                self._signal_one(running, signal.SIGKILL)
        yield running.part
        if running.part.code:
            yield self._once()

    def _preempted(self) -> Iterator[Part]:
        """The machine is taken back: SIGTERM to the program, to the launcher, or to one process
        whose job starts again by itself.
        """
        moment = draw_moment(self.rng, STEPS)
        to_one = self.rng.random() < 0.5
        options = ["--max-preemptions", "2"] if to_one else []
        with self._started(*options) as running:
            if running.wait_for(moment):
                if to_one:
                    self._signal_one(running, signal.SIGTERM)
                else:
                    self._signal(running, signal.SIGTERM, running.process.pid)
        yield running.part
        yield self._once()

    def _interrupted(self) -> Iterator[Part]:
        """Ctrl-C on a terminal, which goes to all of the foreground."""
        moment = draw_moment(self.rng, STEPS)
        with self._started() as running:
            if running.wait_for(moment):
                self._signal(running, signal.SIGINT, -running.process.pid)
        yield running.part
        yield self._once()

    def _hung(self) -> Iterator[Part]:
        """One process stands still: its main thread alone, or all of it. The launcher finds it; of
        a lone program a person has enough, as `timeout -k 1` has.
        """
        moment = Moment(self.rng.randrange(1, STEPS - 5), self.rng.uniform(0.0, 0.05))
        how = self.rng.choice([signal.SIGUSR1, signal.SIGSTOP])
        restarts = self.rng.choice(["0", "1"])
        options = ["--stall-timeout-s", str(STALL_S), "--max-restarts", restarts]
        with self._started(*options) as running:
            if running.wait_for(moment):
                self._signal_one(running, how)
            if not running.part.launched and not running.end(BOUND_S):
                running.process.terminate()
                if not running.end(1.0):
                    running.process.kill()
        yield running.part
        if running.part.code:
            yield self._once()

    def _signal_one(self, running: Running, number: signal.Signals) -> None:
        """Sends a signal to one process of the job."""
        if not running.part.launched:
            self._signal(running, number, running.process.pid)
            return
        deadline_s = time.monotonic() + 20
        while not (workers := running.workers()):
            if running.process.poll() is not None or time.monotonic() > deadline_s:
                return
            time.sleep(0.02)
        self._signal(running, number, self.rng.choice(workers))

    def _signal(self, running: Running, number: signal.Signals, pid: int) -> None:
        said = _STEP.findall(running.part.log)
        to = "the launcher" if running.part.launched and pid == running.process.pid else "a process"
        if pid < 0:
            to = "the terminal's processes"
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            running.part.sent.append(
                f"{number.name} to {to} ({pid}) after step {said[-1] if said else 'none'}"
            )
