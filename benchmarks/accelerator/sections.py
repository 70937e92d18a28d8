"""Runs the sections of a part, each whatever became of those before."""

from __future__ import annotations

import functools
import subprocess
import sys
import traceback

from report import figure


def run_each(*sections: functools.partial[None]) -> int:
    """Runs the sections of a part, whatever became of those before; returns 1 if one failed."""
    failed = 0
    for section in sections:
        try:
            section()
        except Exception as error:
            traceback.print_exc()
            figure(
                section.func.__name__.replace("_", " "),
                "FAILED",
                f"{type(error).__name__}: {error}"[:300],
            )
            failed = 1
    return failed


def in_own_process(section: str) -> functools.partial[None]:
    """Returns what runs a section of this script in a process of its own.

    A device is one process's at a time: the one that calls it has not opened it.
    """
    return functools.partial(own_process, section.replace("_", " "), [*sys.argv[:2], section])


def own_process(name: str, command: list[str]) -> None:
    """Runs a command."""
    done = subprocess.run([sys.executable, *command], check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{name} ended with {done.returncode}")
