"""Looks at a process of a job on this host, from outside: is it stopped, does its interpreter run,
and where are its threads.

It reads what `holdfast.multihost` keeps for this (multihost/liveness/vitals.py): a file in memory,
found through /proc by its name, so that nobody else's process is ever touched. Needs Linux and the
process's own user.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path

from ..diagnosis.findings import Look
from ..vitals import LOOK_SIGNAL, VITALS_INTERVAL_S, vitals_file

_HELD_S = 4 * VITALS_INTERVAL_S  # without a touch: the interpreter is held
_ANSWER_S = 3.0
_POLL_S = 0.02
_MOST_BYTES = 1 << 20


def look(process_id: int, pid: int) -> Look | None:
    """Returns what a look at a process shows, None where it is not on this host or cannot be seen.
    Blocks for at most 6 s.
    """
    try:
        vitals_and_thread = _vitals(process_id, Path("/proc") / str(pid))
        if vitals_and_thread is None:
            return None
        vitals, thread = vitals_and_thread
        if _state(pid) in "tT":
            return Look(stopped=True)
        file = os.open(vitals, os.O_RDWR)
    except OSError:
        return None
    try:
        touched = os.fstat(file)
        if time.time() - touched.st_mtime < _HELD_S:
            os.pwrite(file, b"?", 0)
            if stacks := _read(file, lambda text: text.endswith(b"\n.")):
                return Look(stacks=stacks.removesuffix("\n."))
        stacks = _from_c(pid, thread, file)
        # The touch was this look's, and not the process's: the next look must not count it.
        os.utime(file, ns=(touched.st_atime_ns, touched.st_mtime_ns))
        return Look(held_s=time.time() - touched.st_mtime, stacks=stacks)
    except OSError:  # it has ended meanwhile
        return None
    finally:
        os.close(file)


def _vitals(process_id: int, process: Path) -> tuple[Path, int] | None:
    """Returns the file of vitals, and the thread that takes the signal."""
    begins = f"/memfd:{vitals_file(process_id, 0)[:-1]}"
    for link in (process / "fd").iterdir():
        if (target := _target(link)).startswith(begins):
            return link, int(target.removeprefix(begins).split()[0])
    return None


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # closed meanwhile
        return ""


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _from_c(pid: int, thread: int, file: int) -> str:
    """Has faulthandler write the stacks, by a signal, which would end a process that does not catch
    it.

    A thread of ours takes it: a call of the program that sleeps in the kernel would end early.
    """
    status = dict(
        line.split(":", 1)
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if ":" in line
    )
    if not int(status["SigCgt"], 16) >> (LOOK_SIGNAL - 1) & 1:
        return ""
    os.ftruncate(file, 0)
    ctypes.CDLL(None).tgkill(pid, thread, LOOK_SIGNAL)
    return _read(file, lambda text: text == _later(file, text))


def _later(file: int, text: bytes) -> bytes | None:
    """Returns what is in the file a moment later, None while there is nothing: faulthandler writes
    no end.
    """
    time.sleep(2 * _POLL_S)
    return os.pread(file, _MOST_BYTES, 0) if text else None


def _read(file: int, complete: Callable[[bytes], bool]) -> str:
    """Returns the answer, "" where none came within 3 s, and empties the file."""
    deadline = time.monotonic() + _ANSWER_S
    text = b""
    whole = False
    while not whole and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        text = os.pread(file, _MOST_BYTES, 0)
        whole = complete(text)
    os.ftruncate(file, 0)
    return text.decode(errors="replace") if whole else ""
