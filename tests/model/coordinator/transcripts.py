"""Writes tests/transcripts/coordinator: a barrier through a restart of its service, as the real
machine and its journal have it.

`python -m tests.model.coordinator.transcripts` writes it anew; a test compares it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from holdfast.coordination.core.status import ARRIVED, BARRIER
from tests.support.paths import ROOT

from .world import FAULTS, Bounds, World

FOLDER = ROOT / "tests" / "transcripts" / "coordinator"


class Scene(NamedTuple):
    """What happens, and why it is told."""

    why: str
    events: Sequence[str]


RESTART = [
    Scene(
        "Processes 0 and 1 come. Each says which instance of the barrier it comes to: its own count"
        " of the calls of that name. That they have come is in the journal before anybody hears of"
        " anything that rests on it.",
        ["arrive 0", "arrive 1"],
    ),
    Scene(
        "The service is killed, and started again from its journal. What waits is no part of the"
        " journal: who waits has lost its connection, and will ask again.",
        ["restart 0"],
    ),
    Scene(
        "Both connect and ask again, with the number that they had. It names the instance that they"
        " have arrived at: nobody is counted twice, and nobody comes to the next instance.",
        ["reconnect 0", "reconnect 1"],
    ),
    Scene(
        "The connection of process 1 breaks. It has arrived all the same.",
        ["break 1"],
    ),
    Scene(
        "Process 2 was away too. With it all have come: the result is written, and then told."
        " Process 1 does not hear it.",
        ["reconnect 2", "arrive 2"],
    ),
    Scene(
        "Process 1 asks again. The instance is over, and its result stays: the answer is the one"
        " that the others had.",
        ["reconnect 1"],
    ),
]


class _Told(World):
    """A world that tells each event: what the journal has of it, and who hears what."""

    def tell(self, event: str) -> list[str]:
        """Has an event happen; returns its lines."""
        before = dict(self.disk.rows)
        told = [list(client.told) for client in self.clients]
        self.happen(event)
        lines = [_SAID[event.partition(" ")[0]].format(event.partition(" ")[2])]
        for key in sorted(before.keys() | self.disk.rows.keys()):
            if key[0] in (BARRIER, ARRIVED) and before.get(key) != self.disk.rows.get(key):
                lines.append(
                    f"   journal: {' '.join(key)} {_shown(key[0], self.disk.rows.get(key))}"
                )
        for client, known in zip(self.clients, told, strict=True):
            lines += [
                f"   process {client.task_id} hears: {each}" for each in client.told[len(known) :]
            ]
        return lines


_SAID = {
    "arrive": "process {} comes to barrier b",
    "reconnect": "process {} connects again",
    "restart": "the service dies, and is back",
    "break": "the connection of process {} breaks",
}


def _shown(table: str, row: bytes | None) -> str:
    if row is None:
        return "is gone"
    kept = json.loads(row)
    if table == ARRIVED:
        return f"has process {kept['arrived'][0][0]}"
    end = "open" if kept["outcome"] is None else "over, and how"
    return f"has instance {kept['counter']}: {end}"


def page() -> str:
    """Returns the page: each event, what is written, and what is heard."""
    world = _Told(Bounds(1, FAULTS, len(FAULTS)))
    texts = [
        "# A barrier through a restart\n\n"
        "Three processes, a barrier `b`, and a service whose machine is in its journal.\n"
    ]
    for scene in RESTART:
        lines = [line for event in scene.events for line in world.tell(event)]
        texts.append(f"\n{scene.why}\n\n```text\n" + "\n".join(lines) + "\n```\n")
    return "".join(texts)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "restart.md").write_text(page())
