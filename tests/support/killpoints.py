"""Kills or fails a save right before its nth call that changes files: a fork server under
killpoint.c.

One interpreter imports everything once, without threads of jax; each point is a fork of it, or two
forks that join a job, with a coordinator of ours and jax.distributed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = str(HERE.parent.parent)  # a server is a script, and imports what is beside it


def build(folder: Path, name: str = "killpoint") -> Path:
    """Compiles one of the .c files here into a library to preload; skips the test where there is no
    C compiler, unless this is CI.
    """
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        assert not os.environ.get("CI"), "CI has to have a C compiler"
        pytest.skip(f"needs Linux and a C compiler (gcc or cc) to build tests/support/{name}.c")
    library = folder / f"{name}.so"
    command = [
        compiler,
        "-shared",
        "-fPIC",
        "-O2",
        "-o",
        str(library),
        str(HERE / f"{name}.c"),
        "-ldl",
    ]
    subprocess.run(command, check=True, timeout=60)
    return library


def walk(
    library: Path,
    processes: int,
    victim: int,
    error: int,
    points: Sequence[int],
    *,
    incremental: bool = False,
) -> list[dict[str, Any]]:
    """Goes through the points; returns what each fork server line says. `error` 0 kills process
    `victim`, else its call fails so.

    With `incremental` the save links files of one before it, whose calls are points too.
    """
    environment = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": ROOT,
    }
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            sys.executable,
            str(HERE / "killpoint_server.py"),
            scratch,
            str(processes),
            str(victim),
            str(error),
            json.dumps(list(points)),
            "incremental" if incremental else "",
        ]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=170, check=False
        )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return _points(done.stdout)


def walk_local(
    library: Path, processes: int, victim: int, error: int, points: Sequence[int]
) -> list[dict[str, Any]]:
    """Does so with local saves of one process or two, and the calls below the folder of the
    victim's host, reading ones among them.
    """
    environment = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": ROOT,
    }
    with tempfile.TemporaryDirectory() as scratch:
        numbers = map(str, (processes, victim, error))
        command = [
            sys.executable,
            str(HERE / "killpoint_local_server.py"),
            scratch,
            *numbers,
            json.dumps(list(points)),
        ]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=280, check=False
        )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return _points(done.stdout)


def walk_branch(library: Path, error: int, points: Sequence[int]) -> list[dict[str, Any]]:
    """Does so with a save by which a job that went back begins a branch."""
    environment = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": ROOT,
    }
    with tempfile.TemporaryDirectory() as scratch:
        server = str(HERE / "killpoint_branch_server.py")
        command = [sys.executable, server, scratch, str(error), json.dumps(list(points))]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=170, check=False
        )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return _points(done.stdout)


def _points(said: str) -> list[dict[str, Any]]:
    points = [json.loads(line) for line in said.splitlines()]
    print(f"{sum(point['reached'] for point in points)} points reached")
    return points
