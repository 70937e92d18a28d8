"""Lives a life in a process of its own, and says where it breaks a rule:

- A step that is listed is whole, however the process has ended.
- A save that was begun, and not called off, has its step, or stderr names the step; unless the
  process ended suddenly.
- The exit code is the program's; 1 where the error of a save could still leave main.
- The process ends, and stderr shows no trouble of the interpreter's with our hooks and threads.
- The next manager opens the root and saves.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from holdfast.checkpoint import CheckpointManager, load

from ..campaign import shortened
from .life import CHILDREN, SUDDEN, Life

PROGRAM = Path(__file__).with_name("program.py")
LIMIT_S = 60.0
SHORTENING_S = 120.0
_CODES = {
    "sys.exit": 3,
    "exception": 1,
    "interrupt": -2,
    "os._exit": 4,
    "exec": 5,
    "SIGKILL": -9,
    "SIGTERM": -15,
}
_TROUBLE = re.compile(
    "can't create new thread|Exception ignored in|Fatal Python error|cannot schedule new futures"
    "|Error in atexit"
)


def python() -> str:
    """Returns the Python that lives."""
    return os.environ.get("LIVES_PYTHON", sys.executable)


@dataclass(frozen=True)
class Divergence:
    """A life and the rules that it broke."""

    life: Life
    broken: tuple[str, ...]
    stderr: str

    def __str__(self) -> str:
        return "\n".join([str(self.life), *self.broken, self.stderr[-3000:]])


def divergence_of(life: Life) -> Divergence | None:
    """Lives a life; returns what it broke, None where it broke nothing."""
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [python(), str(PROGRAM), folder, json.dumps(asdict(life))],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": ""},
            start_new_session=True,
        )
        try:
            _, stderr = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its children too
            _, stderr = process.communicate()
            return Divergence(life, (f"it has not ended in {LIMIT_S:g} s",), stderr)
        broken = tuple(_broken(life, Path(folder), process.returncode, stderr))
    return Divergence(life, broken, stderr) if broken else None


def shortest(divergence: Divergence) -> Divergence:
    """Returns a divergence that is as plain as it goes."""
    return shortened(divergence, lambda best: map(divergence_of, best.life.plainer()), SHORTENING_S)


def _broken(life: Life, folder: Path, returncode: int, stderr: str) -> Iterator[str]:
    journal = [line.split() for line in (folder / "journal").read_text().splitlines()]
    begun = {int(words[1]) for words in journal if words[0] == "begun"}
    cancelled = {int(words[1]) for words in journal if words[0] == "cancelled"}
    listed = {int(path.name) for path in folder.glob("root/[0-9]*") if _has_record(path)}
    told = {int(step) for step in re.findall(r"\bstep (\d+)\b", stderr)}
    for step in sorted(listed):
        yield from _not_whole(folder / "root" / str(step), step)
    if life.parent_saves and life.call != "fails":
        yield from _not_whole(folder / "parent" / "7", 7)
    if life.end not in SUDDEN:
        if not begun and not told:
            yield "nothing was begun"
        for step in sorted(begun - cancelled - listed - told):
            yield f"step {step} is neither there nor named"
        if life.call != "fails" and told and life.maker != "global's finalizer":
            yield f"steps {sorted(told)} were lost"
    if life.call == "callback":
        called = {int(words[1]) for words in journal if words[0] == "committed"}
        if life.end not in SUDDEN and called != listed & {1}:
            yield f"the callback was called for {sorted(called)} of {sorted(listed)}"
    yield from _wrong_codes(life, journal, returncode)
    if (trouble := _TROUBLE.search(stderr)) and not told:
        yield f"trouble: {trouble.group()}"
    yield from _not_usable(folder / "root")


def _has_record(path: Path) -> bool:
    return (path / "checkpoint.json").exists()


def _not_whole(path: Path, step: int) -> Iterator[str]:
    try:
        found = load(path)["x"]
    except Exception as error:
        yield f"{path.parent.name}/{path.name} cannot be read: {error!r}"
        return
    if found.shape != (100_000,) or not np.all(found == step):
        yield f"{path.parent.name}/{path.name} has other values"


def _wrong_codes(life: Life, journal: list[list[str]], returncode: int) -> Iterator[str]:
    expected = {_CODES.get(life.end, 0)}
    # An error of `wait`, or of a manager that is closed, leaves what has made the call.
    makers = ("main", "asyncio", *CHILDREN)
    if life.call == "fails" and life.holder == "context" and life.maker in makers:
        expected = {1}
    if life.maker not in CHILDREN:
        if returncode not in expected:
            yield f"exit code {returncode}, expected {sorted(expected)}"
        return
    if life.end == "interrupt" and life.maker != "os.fork":
        expected = {1}  # what multiprocessing makes of it
    codes = {int(words[1]) for words in journal if words[0] == "child"}
    if codes != expected:
        yield f"exit code {codes} of the child, expected {sorted(expected)}"
    if returncode:
        yield f"exit code {returncode} of the parent, expected 0"


def _not_usable(root: Path) -> Iterator[str]:
    try:
        with CheckpointManager(root) as manager:
            manager.save(9, {"x": np.zeros(3)})
    except Exception as error:
        yield f"the next manager cannot save: {error!r}"
