"""What the command line and the page both say of a job's status. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from holdfast.proto import session_pb2

GOODPUT_PARTS = {
    "stepping_s": "new steps",
    "waiting_s": "waiting for machines",
    "starting_s": "starting",
    "rejoining_s": "joining again",
    "compiling_s": "compiling",
    "restoring_s": "restoring",
    "saving_s": "blocked in saves",
    "redoing_s": "steps done again",
    "hung_s": "hung",
    "ending_s": "ending attempts",
}
"""The words for what a job did with its seconds: progress first."""

SAVED = "saved"
"""The kind of an event that says that a step is saved."""

_SAVED_STEP = re.compile(r"step (\d+) is saved")
_FEW_SAVES = 3  # that are lines of their own
_STEPS = ("stepping_s", "redoing_s", "hung_s")  # parts that only a job with steps has


def printable(text: str, *, lines: bool = False) -> str:
    """Returns text as a terminal may show it: what would steer the terminal, or turn the direction
    of writing, becomes an escape such as \\x1b. Line ends and tabs stay where there are `lines`.

    A process chooses what it is called, and what its errors say.
    """
    kept = "\n\t" if lines else ""
    return "".join(
        char if char.isprintable() or char in kept else char.encode("unicode_escape").decode()
        for char in text
    )


def counted(number: int, noun: str, nouns: str = "") -> str:
    """Returns how many of a thing there are: "1 process", "2 processes", "1,024 leaves"."""
    nouns = nouns or f"{noun}{'es' if noun.endswith('s') else 's'}"
    return f"{number:,} {noun if number == 1 else nouns}"


def show_rate(per_second: float) -> str:
    """Returns a rate with two digits that count, and no fewer than it has: 0.052, 4.1, 1234."""
    return f"{per_second:.0f}" if per_second >= 99.5 else f"{per_second:.2g}"


def fastest(status: session_pb2.StatusResponse) -> float:
    """Returns the steps per second of the fastest process of a job, 0 where none makes any."""
    return max((task.steps_per_second for task in status.tasks), default=0.0)


def usually_fastest(status: session_pb2.StatusResponse) -> float:
    """Returns what the fastest process of a job usually makes, 0 where that is not known yet."""
    return max((task.usual_steps_per_second for task in status.tasks), default=0.0)


def describe_goodput(seconds: Mapping[str, float]) -> str:
    """Returns where the time of a job went, the share of new steps first.

    Without a step there is no share: a job may work, and report none.
    """
    total_s = sum(seconds.values())
    parts = [f"{words} {seconds.get(part, 0.0):.1f}" for part, words in GOODPUT_PARTS.items()]
    if not any(seconds.get(part, 0.0) for part in _STEPS):
        text = f"goodput is not known, because no two reports of steps came in {total_s:.1f} s"
    else:
        text = f"goodput {seconds.get('stepping_s', 0.0) / total_s:.0%} of {total_s:.1f} s"
    return f"{text}: {', '.join(parts)}"


def fold_saves(events: Iterable[session_pb2.Event]) -> list[session_pb2.Event]:
    """Returns events, oldest first, with those saves as one that nothing came between."""
    folded: list[session_pb2.Event] = []
    run: list[session_pb2.Event] = []
    for event in sorted(events, key=lambda event: event.unix_s):
        if event.kind == SAVED:
            run.append(event)
            continue
        folded += _folded(run)
        folded.append(event)
        run = []
    return folded + _folded(run)


def _folded(saves: Sequence[session_pb2.Event]) -> list[session_pb2.Event]:
    if len(saves) < _FEW_SAVES:
        return list(saves)
    first, last = (saved_step(saves[at]) for at in (0, -1))
    text = f"{counted(len(saves), 'step')} are saved, from step {first} to step {last}"
    return [session_pb2.Event(unix_s=saves[-1].unix_s, kind=SAVED, text=text)]


def saved_step(event: session_pb2.Event) -> int:
    """Returns the step of an event that says that one is saved; -1 for any other."""
    found = _SAVED_STEP.fullmatch(event.text) if event.kind == SAVED else None
    return int(found[1]) if found else -1


def describe_staying(attempt: session_pb2.Attempt) -> str:
    """Returns how many processes outlived the attempt before, and who was replaced beside them."""
    if not attempt.stayed:
        return f"all {attempt.num_processes} started" if attempt.num_processes else "none started"
    count = attempt.num_processes - attempt.stayed
    named = ", ".join(map(str, attempt.replaced))
    more = f" and {count - len(attempt.replaced)} more" if count > len(attempt.replaced) else ""
    return f"{attempt.stayed} stayed, replaced {named}{more}"


def checkpoint_roots(status: session_pb2.StatusResponse) -> list[session_pb2.CheckpointRoot]:
    """Returns what the processes report of their checkpoints: the primary of each manager does."""
    return [task.progress.root for task in status.tasks if task.progress.HasField("root")]
