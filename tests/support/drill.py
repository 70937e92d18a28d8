"""A job that trains, saves and meets a fault when a test says so, for what `holdfast status` says
of it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.paths import program
from tests.support.proxy import Proxy

HOLDFAST = [sys.executable, "-c", "from holdfast.cli import main; main()"]
VICTIM = 2
SAID_WITHIN_S = 30.0  # from a fault to the sentence about it
COUNT = 3

TRAINER = program("drill_trainer")


def line_of(mark: str) -> int:
    """Returns the line of the trainer that bears a mark."""
    return next(
        number
        for number, line in enumerate(TRAINER.read_text().splitlines(), 1)
        if line.endswith(f"# {mark}")
    )


class Drill:
    """A job that runs, to be disturbed."""

    def __init__(
        self,
        folder: Path,
        address: str | None,
        environment: dict[str, str],
        job: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.folder = folder
        self.address = address
        self.environment = environment
        self.job = job

    def status(self, *arguments: str) -> str:
        """Returns what `holdfast status` prints, "" where it finds nobody."""
        command = [*HOLDFAST, "status", *([self.address] if self.address else []), *arguments]
        environment = self.environment | {"COLUMNS": "400"}
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=60
        ).stdout

    def json(self) -> dict[str, Any]:
        """Returns the status as JSON."""
        text = self.status("--json")
        return json.loads(text) if text else {}

    def find_address(self) -> str:
        """Returns where the coordinator is."""
        if self.address is not None:
            return self.address
        said = (self.folder / "run.log").read_text()
        return next(
            line.rpartition(" ")[2] for line in said.splitlines() if "coordinator at " in line
        )

    def pid(self, process: int) -> int:
        """Returns the number of a process."""
        return int(self.json()["tasks"][process]["pid"])

    def wait_for_step(self, step: int, timeout_s: float = 180.0) -> None:
        """Waits until all processes have made so many steps."""
        deadline = time.monotonic() + timeout_s
        while not (tasks := self.json().get("tasks")) or any(
            int(task["progress"].get("step", 0)) < step for task in tasks
        ):
            assert time.monotonic() < deadline, (
                self.status(),
                (self.folder / "run.log").read_text()[-4000:],
            )

    def begin(self, fault: str) -> None:
        """Begins a fault of the trainer's own."""
        whole = self.folder / ".fault"
        whole.write_text(fault)
        whole.replace(self.folder / "fault")

    def first_sentence(self, pattern: str) -> str:
        """Returns what the status says of the job's state, in the line below it, as soon as it
        matches, else what it said last within 30 s.
        """
        deadline = time.monotonic() + SAID_WITHIN_S
        sentence = ""
        while not re.fullmatch(pattern, sentence) and time.monotonic() < deadline:
            _, _, below = self.status().partition("\n")
            sentence = below.partition("\n")[0]
        return sentence


@contextmanager
def drill(
    folder: Path, *options: str, under_launcher: bool = True, compiled: bool = False
) -> Iterator[Drill]:
    """Runs the trainer as three processes: under `holdfast run OPTIONS`, or alone beside a
    coordinator, the victim through a proxy. The processes wait for each other in Python code, or in
    a compiled function.
    """
    script = folder / "train.py"
    script.write_text(TRAINER.read_text())
    with tempfile.TemporaryDirectory(dir="/tmp") as base, open(folder / "run.log", "w") as log:
        environment = os.environ | {"TMPDIR": base, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
        if compiled:
            environment["DRILL_COMPILED"] = "1"
        if under_launcher:
            command = [
                *HOLDFAST,
                "run",
                "-n",
                str(COUNT),
                *options,
                "--log-dir",
                str(folder / "logs"),
                "--",
                sys.executable,
                str(script),
                str(folder),
            ]
            job = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            try:
                yield Drill(folder, None, environment, job)
            finally:
                job.kill()
                job.wait()
            return
        with _separately(script, folder, environment, log) as drilled:
            yield drilled


@contextmanager
def _separately(
    script: Path, folder: Path, environment: dict[str, str], log: Any
) -> Iterator[Drill]:
    from holdfast.coordination import CoordinationService

    with (
        CoordinationService.spawn(COUNT, recoverable=True, survivable=True) as service,
        Proxy(service.address) as proxy,
    ):
        addresses = [
            proxy.address if process == VICTIM else service.address for process in range(COUNT)
        ]
        commands = [
            [sys.executable, script, folder, str(process), addresses[process], str(COUNT)]
            for process in range(COUNT)
        ]
        popens = [
            subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            for command in commands
        ]
        try:
            drilled = Drill(folder, service.address, environment)
            drilled.drop_packets = proxy.drop  # type: ignore[attr-defined]
            yield drilled
        finally:
            for popen in popens:
                popen.kill()
                popen.wait()
