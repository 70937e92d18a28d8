"""Runs the parts of the accelerator kit in order of value, and writes down what they measure.

    python benchmarks/accelerator/kit.py OUT [smoke]

scripts/build_accelerator_kit.sh makes the folder whose run.sh calls this. OUT gets RESULTS.md, a
block of Markdown that is written anew with each figure, and log.txt. ACCELERATOR_KIT=cpu runs all
of it on the CPU with a tenth of the sizes. ACCELERATOR_KIT_LIMIT_S says how long the whole may take
(480 s, smoke 60), and ACCELERATOR_KIT_DISK in which folder it saves.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

import processes
from block import PartResult, Results, Row
from plan import Part, Plan, Probe, deadlines, remark_on_jax, share_s, sizes_of
from report import FIGURE, NOT_RUN, size

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PACKAGES = ("numpy", "flax", "orbax-checkpoint", "tensorstore", "grpcio", "protobuf")
LIMIT_S = {False: 480.0, True: 60.0}
LEAST_S = 2.0  # a part that has less is not begun
TAIL = 30
TAIL_COLUMNS = 200
# Lines of a stack dump that say nothing of where a program is.
NOISE = ("Extension modules:", '  File "<frozen ')
LOG_BYTES = 8 << 20
# Where nothing of it is set: XLA says much, and of that the first lines matter.
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "1"}


class Log:
    """log.txt: all that the parts print, with the seconds since the start."""

    def __init__(self, path: Path, began_s: float) -> None:
        self._file = path.open("w")
        self._began_s = began_s
        self._written = 0

    def add(self, text: str) -> None:
        """Writes a line, while there is room."""
        if not text.strip():
            return
        line = f"{time.monotonic() - self._began_s:7.1f} {text}\n"
        self._written += len(line)
        if self._written <= LOG_BYTES:
            self._file.write(line)
            self._file.flush()


class Kit:
    """One run of the kit."""

    def __init__(self, out: Path, *, cpu: bool, smoke: bool, limit_s: float) -> None:
        self._out = out
        self._cpu = cpu
        self._smoke = smoke
        self._limit_s = limit_s
        # The installation is within the limit too.
        began = float(os.environ.get("ACCELERATOR_KIT_BEGAN") or time.time())
        self._began_s = time.monotonic() - (time.time() - began)
        self._log = Log(out / "log.txt", self._began_s)
        self._results = Results({})
        self._environment = self._make_environment()

    def _make_environment(self) -> dict[str, str]:
        environment = QUIET | os.environ
        if self._cpu:
            environment["JAX_PLATFORMS"] = "cpu"
        return environment

    def _left_s(self) -> float:
        return self._began_s + self._limit_s - time.monotonic()

    def run(self) -> bool:
        """Runs all parts; says whether each that could run ended well."""
        self._write()  # in the place of an earlier run's
        scratch = tempfile.mkdtemp(prefix="accelerator-kit-", dir=choose_disk())
        try:
            plan = self._probe(Plan(scratch, self._cpu, self._smoke, 0, 0))
            if plan is not None:
                left_s = self._left_s()
                for part, end_s in deadlines(left_s, smoke=self._smoke):
                    self._run_part(part, plan, end_s - (left_s - self._left_s()))
            return plan is not None and all(
                each.outcome in ("ended", "not run") for each in self._results.parts
            )
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _probe(self, plan: Plan) -> Plan | None:
        """Looks at the machine; returns the plan for it, None where jax finds no accelerator."""
        described: dict[str, str] = {}
        measured: dict[str, float] = {}
        tail: list[str] = []

        def take(line: str) -> None:
            self._log.add(f"probe: {line}")
            if line.startswith("PROBE "):
                found = json.loads(line.removeprefix("PROBE "))
                described.update(found["machine"])
                measured.update(found["measured"])
            else:
                tail.append(line)

        command = [sys.executable, str(HERE / "probe.py"), plan.to_json()]
        code = processes.run(
            command, self._environment, time.monotonic() + max(10.0, self._left_s() / 4), take
        )
        machine = describe_machine(Path(plan.scratch)) | described
        self._results.machine = machine
        if code != 0:
            why = "took too long" if code is None else f"ended with {code}"
            self._say(f"jax was not found usable here: the probe {why}")
            self._results.remarks += tail[-TAIL:]
            self._write()
            return None
        if machine["platform"] not in ("gpu", "tpu") and not self._cpu:
            self._say(
                f"jax {machine['jax']} finds no accelerator here, only {machine['device']}:"
                " install a jax that finds it, or set ACCELERATOR_KIT=cpu to run on the CPU"
            )
            self._results.remarks += tail[-TAIL:]
            self._write()
            return None
        probe = Probe(
            int(measured["device_bytes"]),
            int(measured["host_free_bytes"]),
            shutil.disk_usage(plan.scratch).free,
            measured["write_bytes_s"],
        )
        of_save_s = share_s("b", self._left_s(), smoke=self._smoke)
        nbytes, small = sizes_of(probe, of_save_s, cpu=self._cpu, smoke=self._smoke)
        if remark := remark_on_jax(machine["jax"]):
            self._say(remark)
        machine["state"] = f"{size(nbytes)}, and {small} small leaves"
        self._write()
        return dataclasses.replace(plan, state_bytes=nbytes, small_leaves=small)

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)
        self._log.add(text)
        self._results.remarks.append(text)

    def _run_part(self, part: Part, plan: Plan, limit_s: float) -> None:
        result = PartResult(part)
        self._results.parts.append(result)
        free = shutil.disk_usage(plan.scratch).free
        needed = part.needed_bytes(cpu=self._cpu)
        why = ""
        if free < needed:
            why = f"{plan.scratch} has {size(free)} left; it needs {size(needed)}"
        elif limit_s < LEAST_S:
            why = "the time was over"
        if why:
            result.outcome = "not run"
            result.not_run.append(Row(part.name, why))
        self._write()
        if why:
            return
        began_s = time.monotonic()
        output: list[str] = []

        def take(line: str) -> None:
            if not line:
                return
            self._log.add(f"{part.letter}: {line}")
            result.seconds = time.monotonic() - began_s
            if line.startswith(FIGURE):
                result.add(Row(*json.loads(line.removeprefix(FIGURE))))
                self._write()
            elif line.startswith(NOT_RUN):
                result.not_run.append(Row(*json.loads(line.removeprefix(NOT_RUN))))
                self._write()
            elif not line.startswith(NOISE):
                output.append(line[:TAIL_COLUMNS])

        told = dataclasses.replace(plan, limit_s=limit_s)
        command = [sys.executable, str(HERE / part.script), told.to_json()]
        code = processes.run(command, self._environment, began_s + limit_s, take)
        result.seconds = time.monotonic() - began_s
        if code == 0:
            result.outcome = "ended"
        else:
            over = f"stopped at its limit of {limit_s:.0f} s"
            result.outcome = over if code is None else f"failed with {code}"
            result.tail = output[-TAIL:]
        self._write()
        _empty(Path(plan.scratch))  # a part that was ended has left its files there
        print(f"{result.title}: {result.outcome}, {result.seconds:.0f} s", flush=True)

    def _write(self) -> None:
        """Writes the block. Who is killed meanwhile leaves the one before."""
        new = self._out / "RESULTS.new"
        new.write_text(self._results.to_markdown())
        new.rename(self._out / "RESULTS.md")


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path, ignore_errors=True)


def describe_machine(scratch: Path) -> dict[str, str]:
    """Returns what is known of a machine without jax."""
    memory = Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0]
    commit = os.environ.get("ACCELERATOR_KIT_COMMIT") or "not known"
    return {
        "commit": commit,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "host": f"{os.cpu_count()} cores, {int(memory) >> 20} GiB, Linux {platform.release()},"
        f" {' '.join(platform.libc_ver())}",
        "python": platform.python_version(),
        "packages": ", ".join(map(version_of, PACKAGES)),
        "driver": driver_version(),
        "disk": f"{file_system(scratch)}, {size(shutil.disk_usage(scratch).free)} free",
    }


def version_of(package: str) -> str:
    """Returns a package and its version."""
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"no {package}"


def driver_version() -> str:
    """Returns what nvidia-smi says of the card, if there is such a command."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"not known ({type(error).__name__} of nvidia-smi)"


def file_system(folder: Path) -> str:
    """Returns the kind of a folder's file system."""
    mounts = {}
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, kind, *_ = line.split()
        mounts[point] = kind
    where = folder.resolve()
    while str(where) not in mounts and where != where.parent:
        where = where.parent
    return mounts.get(str(where), "not known")


def choose_disk() -> Path:
    """Returns the folder to save in: the one named, or that with most room that is no memory."""
    if named := os.environ.get("ACCELERATOR_KIT_DISK"):
        return Path(named)
    candidates = [path for path in map(Path, ("/tmp", "/var/tmp")) if os.access(path, os.W_OK)]
    candidates.append(ROOT)
    return max(
        candidates,
        key=lambda path: (file_system(path) != "tmpfs", shutil.disk_usage(path).free),
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("smoke", nargs="?", choices=["smoke"])
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    smoke = arguments.smoke is not None
    limit_s = float(os.environ.get("ACCELERATOR_KIT_LIMIT_S") or LIMIT_S[smoke])
    cpu = os.environ.get("ACCELERATOR_KIT") == "cpu"
    processes.adopt_orphans()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        ended_well = Kit(arguments.out, cpu=cpu, smoke=smoke, limit_s=limit_s).run()
    finally:
        if site := os.environ.get("ACCELERATOR_KIT_SITE"):
            shutil.rmtree(site)  # what run.sh has installed
    block = arguments.out / "RESULTS.md"
    print(f"{block.read_text()}\nthe block is {block}", flush=True)
    return 0 if ended_well else 1


if __name__ == "__main__":
    raise SystemExit(main())
