"""Measures what a death costs: the seconds from the SIGKILL of one process to the first step that had not been done before, in parts.

    python benchmarks/recovery.py [--processes 4] [--kills 5] [--state-gb 0] [--step-s 0.1] [--save-every 150] [--after 5] [-- OPTIONS]

The trainer is that of examples/train_digits.py, its state made larger by --state-gb, under `holdfast run` with the OPTIONS. A step takes
at least --step-s. In each attempt one process kills itself --after steps behind a save, which it has waited for. All times are
CLOCK_MONOTONIC, of whoever saw it; each part ends when the last process is so far:

    known       the launcher says that the process died
    ended       no process of the attempt is left
    started     the processes of the next attempt have imported what they need
    joined      initialize() has returned
    restored    the state is there (with the compilation of its initial value)
    compiled    the first step is done
    redone      the steps since the save are done again
    new         the first step is done that had not been done before
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PARTS = ("known", "ended", "started", "joined", "restored", "compiled", "redone", "new")
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
_MARK, _DIED = re.compile(r"mark (\{.*\})"), re.compile(r"process \d+ .*ended by signal 9")


def mark(name: str, attempt: int, **more: Any) -> None:
    """Prints a line for whoever measures."""
    print("mark " + json.dumps({"name": name, "attempt": attempt, "time_s": time.monotonic(), "pid": os.getpid()} | more), flush=True)


def kill_step(attempt: int, arguments: argparse.Namespace) -> int:
    """Returns the step after which a process of `attempt` dies; the one before the first attempt is 0."""
    return attempt * arguments.save_every + arguments.after if attempt else 0


def train(arguments: argparse.Namespace) -> None:
    """Trains as a process of the job, up to its attempt's kill; the attempt after the last one ends with its first new step."""
    sys.path.insert(0, str(EXAMPLES))
    import jax
    import jax.numpy as jnp
    import train_digits as digits

    from holdfast import checkpoint, multihost

    attempt = int(os.environ["HOLDFAST_ATTEMPT"])
    mark("started", attempt)
    multihost.initialize()
    mark("joined", attempt)

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    data = digits.load_digits()
    images, labels = (data.data / 16).astype("float32"), data.target.astype("int32")

    def fresh_state() -> Any:
        params = digits.init(jax.random.key(0))
        zeros = jax.tree.map(jnp.zeros_like, params)
        ballast = jnp.ones((jax.device_count(), int(arguments.state_gb * 1e9 / 4) // jax.device_count()))
        return {"params": params, "mean": zeros, "square": zeros, "count": jnp.zeros((), jnp.int32)}, ballast

    shardings = jax.tree.map(lambda leaf: digits.sharding_of(mesh, leaf), jax.eval_shape(fresh_state))
    state, ballast = jax.jit(fresh_state, out_shardings=shardings)()
    step_fn = jax.jit(digits.train_step, donate_argnums=0)
    dies_at, redo_to = kill_step(attempt, arguments), kill_step(attempt - 1, arguments)
    manager = checkpoint.CheckpointManager(
        arguments.directory, save_policy=checkpoint.EveryNSteps(arguments.save_every), keep_policy=checkpoint.KeepLast(2)
    )
    with manager:
        last = manager.latest_step() or 0
        if last:
            restored = manager.restore(last, like={"state": state, "ballast": ballast})
            state, ballast = restored["state"], restored["ballast"]
        jax.block_until_ready((state, ballast))
        mark("restored", attempt, step=last)
        names = {last + 1: "compiled", redo_to: "redone", redo_to + 1: "new"}
        end = redo_to + 1 if attempt > arguments.kills else dies_at
        for step, x, y in digits.batches(mesh, images, labels, range(last + 1, end + 1)):
            began = time.monotonic()
            state, loss = step_fn(state, x, y)
            jax.block_until_ready(loss)
            if step in names:
                mark(names[step], attempt, step=step)
            manager.save(step, {"state": state, "ballast": ballast})
            if step == dies_at and jax.process_index() == attempt % jax.process_count():
                manager.wait_until_finished()
                mark("killed", attempt, step=step)
                os.kill(os.getpid(), 9)
            time.sleep(max(0.0, began + arguments.step_s - time.monotonic()))
        manager.wait_until_finished()
    multihost.shutdown()


class Watch:
    """Reads the launcher's output, and sees processes end: `marks` is all that came of it."""

    def __init__(self, launcher: subprocess.Popen[str]) -> None:
        assert launcher.stdout is not None
        self._stream, self._pids = launcher.stdout, dict[int, tuple[int, int]]()  # pidfd -> (pid, attempt)
        self.marks: list[dict[str, Any]] = []
        self.lines: list[str] = []

    def run(self) -> None:
        """Returns when the launcher has closed its output."""
        buffer = b""
        while True:
            ready, _, _ = select.select([self._stream, *self._pids], [], [])
            for fd in ready:
                if isinstance(fd, int):
                    pid, attempt = self._pids.pop(fd)
                    os.close(fd)
                    self._note("ended", attempt, pid)
            if self._stream in ready:
                data = os.read(self._stream.fileno(), 1 << 16)
                if not data:
                    return
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    self._read(line.decode(errors="replace"))

    def _read(self, line: str) -> None:
        self.lines.append(line)
        if found := _MARK.search(line):
            value = json.loads(found[1])
            self.marks.append(value)
            if value["name"] == "started":
                with contextlib.suppress(ProcessLookupError):
                    self._pids[os.pidfd_open(value["pid"])] = value["pid"], value["attempt"]
        elif _DIED.search(line):
            killed = [each["attempt"] for each in self.marks if each["name"] == "killed"]
            self._note("known", killed[-1] if killed else 0, 0)

    def _note(self, name: str, attempt: int, pid: int) -> None:
        self.marks.append({"name": name, "attempt": attempt, "time_s": time.monotonic(), "pid": pid})


def recoveries(marks: list[dict[str, Any]]) -> Iterator[dict[str, float]]:
    """Yields for each kill the seconds from it to the end of each part."""
    for killed in (each for each in marks if each["name"] == "killed"):
        attempt = killed["attempt"]
        times: dict[str, float] = {}
        for name in PARTS:
            of = attempt if name in ("known", "ended") else attempt + 1
            seen = [each["time_s"] for each in marks if each["name"] == name and each["attempt"] == of]
            if not seen:
                raise SystemExit(f"no mark {name!r} of attempt {of}")
            times[name] = (min(seen) if name == "known" else max(seen)) - killed["time_s"]
        yield times


def measure(arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Runs the job and returns its recoveries."""
    with tempfile.TemporaryDirectory() as folder:
        worker = [sys.executable, __file__, "--worker", "--directory", f"{folder}/checkpoints"]
        for name in ("kills", "state_gb", "step_s", "save_every", "after"):
            worker += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
        run = [str(Path(sys.executable).parent / "holdfast"), "run", "--log-dir", f"{folder}/logs"]
        run += ["-n", str(arguments.processes), "--max-restarts", str(arguments.kills)]
        launcher = subprocess.Popen(
            [*run, *arguments.options, "--", *worker],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        watch = Watch(launcher)
        try:
            watch.run()
        finally:
            launcher.terminate()
        if code := launcher.wait():
            raise SystemExit("\n".join([*watch.lines, f"holdfast run ended with {code}"]))
        return list(recoveries(watch.marks))


def show(found: list[dict[str, float]]) -> None:
    """Prints a table: for each part the seconds that it took, and those since the kill; medians, and the span of the total."""
    print("| part | seconds | since the kill |\n|---|---|---|")
    before: dict[str, float] = {}
    for name, previous in zip(PARTS, (None, *PARTS), strict=False):
        taken = [each[name] - (each[previous] if previous else 0.0) for each in found]
        before[name] = statistics.median(each[name] for each in found)
        print(f"| {name} | {statistics.median(taken):.2f} | {before[name]:.2f} |")
    totals = sorted(each["new"] for each in found)
    print(f"\n{len(found)} kills; from the kill to the first new step {totals[0]:.1f} to {totals[-1]:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--state-gb", type=float, default=0.0)
    parser.add_argument("--step-s", type=float, default=0.1)
    parser.add_argument("--save-every", type=int, default=150)
    parser.add_argument("--after", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write all times here")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("options", nargs="*", help="of `holdfast run`, after --")
    arguments = parser.parse_args()
    if arguments.worker:
        train(arguments)
    else:
        found = measure(arguments)
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1))
        show(found)


if __name__ == "__main__":
    main()
