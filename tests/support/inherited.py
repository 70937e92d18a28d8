"""Signals as a shell or a supervisor leaves them to what it starts."""

from __future__ import annotations

import sys

IGNORES = "signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
BLOCKS = "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})"
WAYS = {"ignored": IGNORES, "blocked": BLOCKS, "both": f"{IGNORES}; {BLOCKS}"}


def after(way: str, *command: object) -> list[str]:
    """Returns the command, started by a program that has done so before."""
    code = f"import os, signal, sys; {way}; os.execv(sys.argv[1], sys.argv[1:])"
    return [sys.executable, "-S", "-c", code, *map(str, command)]
