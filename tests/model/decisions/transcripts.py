"""Writes tests/transcripts/jobs: what the launcher decides, event by event, with why.

`python -m tests.model.decisions.transcripts` writes them anew; a test compares them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import NamedTuple

from holdfast.launch import RestartPolicy
from holdfast.launch.supervisor.decide import decide
from holdfast.launch.supervisor.job import (
    NO_SAVE,
    Action,
    Capacity,
    Event,
    Exited,
    Job,
    Noticed,
    Progressed,
    Reserved,
    SavePosition,
    Start,
    Tick,
    Unplaced,
)
from holdfast.multihost.group.group import SaveStage
from tests.support.paths import ROOT

FOLDER = ROOT / "tests" / "transcripts" / "jobs"
POLICY = RestartPolicy(max_failures=3, max_preemptions=3, backoff_jitter=0.0)
REPORTED = SavePosition(4, SaveStage.REPORTED)
SETTLED = SavePosition(4, SaveStage.SETTLED)


class Scene(NamedTuple):
    """What happens at one moment, and why it is told."""

    why: str
    at_s: float
    events: Sequence[Event]


BEGIN = Scene(
    "The launcher asks for all of the machines at once. A job of three that has two trains nobody.",
    0.0,
    [Start(), Reserved(1, 3)],
)
PREEMPTION = [
    BEGIN,
    Scene(
        "Steps are reported, and saved steps: these are what a job gets on by.",
        40.0,
        [
            Progressed(1, 90, 80),
        ],
    ),
    Scene(
        "The machine of process 2 is to be given back in 30 s. One host's notice is everybody's:"
        " all save the same step. Its deadline is earlier than the launcher's own patience.",
        50.0,
        [Noticed("the machine of process 2", deadline=80.0)],
    ),
    Scene(
        "They save, and leave with the code that says so. What counts is that the last has left:"
        " until then the others may need it.",
        58.0,
        [
            Progressed(1, 97, 97),
            Exited(1, 0, 75),
            Exited(1, 1, 75),
            Exited(1, 2, 75),
        ],
    ),
    Scene(
        "After the back-off the job asks for machines again, and goes on from step 97.",
        59.0,
        [
            Tick(),
            Reserved(2, 3),
        ],
    ),
    Scene(
        "An exit code of 0 means done: no notice is out in this attempt.",
        90.0,
        [Progressed(2, 120, 120, done=True), Exited(2, 0, 0), Exited(2, 1, 0), Exited(2, 2, 0)],
    ),
]
REJOIN = [
    BEGIN,
    Scene(
        "All three are in `run_restartable`: they can outlive an attempt. Processes 0 and 2 have"
        " handed in their shares of a save; process 1 has, too, and its commit needs it no more.",
        40.0,
        [
            Progressed(1, 90, 80, restartable=frozenset(range(3))),
            Progressed(1, 91, 80, saves=dict.fromkeys(range(3), REPORTED)),
        ],
    ),
    Scene(
        "Process 1 is killed. The others stay: the next attempt opens at once, and one process is"
        " started. Nothing is asked for, and nobody waits for a back-off. A save that can still be"
        " committed has its time.",
        41.0,
        [Exited(1, 1, -9)],
    ),
    Scene(
        "Who reports from the new attempt is back. When all are, it runs.",
        42.0,
        [
            Progressed(2, 91, 90, saves={0: SETTLED}, restartable=frozenset({0})),
            Progressed(2, 91, 90, saves={0: SETTLED, 2: SETTLED}, restartable=frozenset({0, 2})),
        ],
    ),
    Scene(
        "Process 2 dies while process 1 has yet to say that it can stay. It has only just been"
        " started, so that nothing is lost by starting it again: process 0 stays.",
        44.0,
        [Exited(1, 2, -9)],
    ),
    Scene(
        "Process 0 sits in a call that does not return, and does not come. After 10 s it is"
        " replaced, never later than a restart of all would have been.",
        54.0,
        [Tick()],
    ),
    Scene(
        "The machine of process 2 is to be given back. That process alone is told, and the others"
        " hear of it: all save the same step, leave their loops, and wait.",
        70.0,
        [
            Progressed(3, 95, 90, restartable=frozenset(range(3))),
            Noticed("the machine of process 2", deadline=100.0, processes=frozenset({2})),
        ],
    ),
    Scene(
        "When all have, the others stay. Process 2 ends by itself, and then another begins.",
        72.0,
        [Progressed(3, 96, 96, held=frozenset(range(3))), Exited(3, 2, 0)],
    ),
]
RESIZE = [
    Scene(
        "A job of two to three processes finds room for two. Both are in `run_restartable`.",
        0.0,
        [Start(), Reserved(1, 2), Progressed(1, 40, 40, restartable=frozenset(range(2)))],
    ),
    Scene(
        "There is room for one more. Nobody gets a signal: process 0 hears of it at its"
        " coordinator, and gives notice. That ends with the attempt. Its echo is no news.",
        60.0,
        [
            Capacity(3),
            Noticed("process 0 (growing)", delivered=True, processes=frozenset({0}), attempt=1),
        ],
    ),
    Scene(
        "Both have saved, and have left their loops. They stay, and one is started beside them.",
        62.0,
        [
            Progressed(1, 58, 58, held=frozenset(range(2))),
            Progressed(2, 58, 58, saves=dict.fromkeys(range(2), NO_SAVE)),
            Progressed(2, 59, 58, restartable=frozenset(range(3))),
        ],
    ),
    Scene(
        "There is room for two only. The last one gets the notice, and leaves. Nobody comes in its"
        " place: who has no number any more has the time in which the others have to be back.",
        120.0,
        [
            Capacity(2),
            Progressed(2, 90, 90, held=frozenset(range(3))),
            Progressed(3, 90, 90, saves=dict.fromkeys(range(2), NO_SAVE)),
            Exited(2, 2, 0),
        ],
    ),
]
SMALLER = [
    BEGIN,
    Scene(
        "Process 1 is lost with its machine. The others stay, and it is to be started elsewhere.",
        40.0,
        [
            Progressed(1, 90, 80, restartable=frozenset(range(3))),
            Exited(1, 1, -9),
        ],
    ),
    Scene(
        "There is no room for it, and two are enough. The attempt that has begun is over, out of no"
        " further budget. In the next one process 2 has the number that is free.",
        41.0,
        [
            Unplaced(2, frozenset({1}), "process 1 cannot be placed: room for 0 of 1 processes"),
            Progressed(3, 90, 80, saves=dict.fromkeys(range(2), NO_SAVE)),
        ],
    ),
]
PAGES = {
    "preemption.md": ("A preemption", "three processes", Job("j", 3, 3, POLICY), PREEMPTION),
    "rejoin.md": (
        "A process is replaced, and the others stay",
        "three processes",
        Job("j", 3, 3, POLICY),
        REJOIN,
    ),
    "resize.md": (
        "There is room for more, and those that run stay",
        "two to three processes",
        Job("j", 2, 3, POLICY),
        RESIZE,
    ),
    "smaller.md": (
        "A machine is lost, and there is no other",
        "two to three processes",
        Job("j", 2, 3, POLICY),
        SMALLER,
    ),
}


def page_of(title: str, size: str, job: Job, scenes: Sequence[Scene]) -> str:
    """Returns a page: each event, the state after it, the reason that the log has, and the orders
    to the engine.
    """
    texts = [f"# {title}\n\nA job of {size}, as `decide` takes it from event to event.\n"]
    for scene in scenes:
        lines = []
        for event in scene.events:
            decision = decide(job, event, scene.at_s)
            job = decision.job
            lines.append(f"{scene.at_s:5.1f} s  {_shown(event)}")
            lines.append(f"         {job.state}: {decision.reason}")
            lines += [f"         > {_shown(action)}" for action in decision.actions]
        texts.append(f"\n{scene.why}\n\n```text\n" + "\n".join(lines) + "\n```\n")
    return "".join(texts)


def _shown(value: Event | Action) -> str:
    """Returns an event or an action with what it says beyond its defaults."""
    said = []
    for each in fields(value):
        found = getattr(value, each.name)
        if found in ("", None, False, 0.0, math.inf, frozenset(), {}, ()) and each.name not in (
            "process",
            "code",
        ):
            continue
        if isinstance(found, frozenset | tuple):
            found = sorted(found)
        if isinstance(found, dict):
            found = {process: position.stage.name.lower() for process, position in found.items()}
        said.append(f"{each.name}={found}")
    return f"{type(value).__name__}({', '.join(said)})"


def pages() -> dict[str, str]:
    """Returns the pages, by file."""
    return {file: page_of(*page) for file, page in PAGES.items()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, text in pages().items():
        (FOLDER / file).write_text(text)
