"""The stacks of a process as values: parsed from text, told apart into the user's frames and the
rest. Pure.

Two writers are understood: `traceback` (oldest call first, with the lines of source) and
`faulthandler` (latest call first, without).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ..vitals import ASLEEP
from .summary import counted

_THREAD = re.compile(r"^(?:Current thread|Thread) (.+?)(?: \(most recent call first\))?:$")
_FRAME = re.compile(r'^  File "(.*?)", line (\d+),? in (.+)$')
_ROOMS = ("proto", "coordination", "multihost", "checkpoint", "launch", "compat", "web", "cli")
_ROOT = Path(__file__).parent.parent.parent
OURS = tuple(
    {
        f"{root}/{room}/"
        for root in (_ROOT, _ROOT.resolve(), Path(__file__).resolve().parent.parent.parent)
        for room in _ROOMS
    }
)
"""The folders of this package: installed, or of a source tree behind links. The processes of a job
have the same ones.
"""

_STANDARD_LIBRARY = re.compile(r"/lib/python3\.\d+/(?!site-packages/|dist-packages/)|^<")
_INSTALLED = re.compile(r"/(?:site|dist)-packages/([^/]+)")
# where a program waits for devices and for other processes
_RUNTIME = frozenset({"jax", "jaxlib", "holdfast"})
_MAIN = "MainThread"


class Frame(NamedTuple):
    """One call. `source` is the line of code, "" where the writer had none."""

    file: str
    line: int
    function: str
    source: str = ""

    @property
    def place(self) -> str:
        """The function, file and line, as a sentence names them."""
        return f"{self.function}, {self.file.rsplit('/', 1)[-1]}:{self.line}"

    @property
    def library(self) -> str:
        """The library that the frame is of: "python" for the standard library, "" for the user's
        own code.
        """
        if self.file.startswith(OURS):
            return "holdfast"
        if installed := _INSTALLED.search(self.file):
            return installed[1]
        return "python" if _STANDARD_LIBRARY.search(self.file) else ""


@dataclass(frozen=True)
class Thread:
    """One thread with its calls, the oldest first."""

    name: str
    frames: tuple[Frame, ...]
    asleep: bool = False  # in C++, for another thread or a device

    @property
    def place(self) -> Frame | None:
        """The latest call of the user's own code; of a program that is installed itself, of what is
        neither a runtime nor Python.
        """
        own = [frame for frame in self.frames if not frame.library]
        others = [frame for frame in self.frames if frame.library not in _RUNTIME | {"python", ""}]
        latest = own or others
        return latest[-1] if latest else None

    @property
    def waits(self) -> str:
        """The function of the runtime that the user called and that waits for devices or other
        processes; "" where none does. Compiled functions and `block_until_ready()` are C++.
        """
        if self.asleep and self.frames and not self.frames[-1].library:
            return "C++"
        called = ""
        for frame in reversed(self.frames):
            if frame.library in _RUNTIME:
                called = frame.function
            elif frame.library != "python" or called:
                break
        return called

    @property
    def folded(self) -> bool:
        """Whether nobody needs to see it: it is ours, or a library's, and runs nothing of the
        user.
        """
        return self.name != _MAIN and self.place is None


def parse(text: str) -> tuple[Thread, ...]:
    """Returns the threads in `text`, the main one first; none where there are none in it."""
    threads: list[tuple[str, list[Frame], bool]] = []
    asleep: set[int] = set()  # by their number in the text
    for line in text.splitlines():
        frames = threads[-1][1] if threads else []
        source = line.strip() if line.startswith("    ") else ""
        if thread := _THREAD.match(line):
            threads.append((thread[1], [], line.endswith("(most recent call first):")))
        elif line == ASLEEP:
            asleep.add(len(threads) - 1)
        elif threads and (frame := _FRAME.match(line)):
            frames.append(Frame(frame[1], int(frame[2]), frame[3]))
        elif frames and source and not source.startswith(("^", "~")):
            frames[-1] = frames[-1]._replace(source=frames[-1].source or source)
    return _main_first(
        [
            Thread(name, tuple(reversed(frames) if latest_first else frames), number in asleep)
            for number, (name, frames, latest_first) in enumerate(threads)
        ]
    )


def _main_first(threads: Sequence[Thread]) -> tuple[Thread, ...]:
    """Puts the main thread first; faulthandler names none, and lists it last."""
    named = [thread for thread in threads if thread.name == _MAIN]
    if not named and threads:
        named = [replace(threads[-1], name=_MAIN)]
        threads = threads[:-1]
    return (*named, *(thread for thread in threads if thread.name != _MAIN))


def fold(text: str) -> str:
    """Returns stacks for a reader: the threads that are the program's own, and how many others
    there are.
    """
    threads = parse(text)
    shown = [thread for thread in threads if not thread.folded]
    lines = [line for thread in shown for line in _thread_lines(thread)]
    if len(shown) < len(threads):
        more = counted(len(threads) - len(shown), "more thread")
        lines.append(f"({more}, of holdfast and the runtime)")
    return "\n".join(lines)


def whole(text: str) -> str:
    """Returns stacks for a reader who wants all: those that `fold` shows, its line about the
    others, and then these.
    """
    others = [thread for thread in parse(text) if thread.folded]
    return "\n".join([fold(text), *(line for thread in others for line in _thread_lines(thread))])


def _thread_lines(thread: Thread) -> list[str]:
    return [f"Thread {thread.name}:", *map(_frame_lines, thread.frames)]


def _frame_lines(frame: Frame) -> str:
    source = f"\n    {frame.source}" if frame.source else ""
    return f'  File "{frame.file}", line {frame.line}, in {frame.function}{source}'
