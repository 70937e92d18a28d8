"""Parts as bytes, and what inventories add up to: never a mixture, never a dead step, never older
than what was acknowledged.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint import Corrupt, HostileCheckpoint
from holdfast.checkpoint.format.item_report import pack_name
from holdfast.checkpoint.local_tier.parts import (
    LocalKey,
    Part,
    parse_folder,
    why_dead,
)
from holdfast.checkpoint.steps.lineage import NOTHING, Branch
from holdfast.checkpoint.storage.tombstone import body_of, sealed
from tests.support.local_parts import RUN, SAVE, saved_parts


def test_a_part_comes_back_as_it_was(tmp_path: Path) -> None:
    """Text and back is the identity, NaN among the metrics too; its files are named with their
    sizes.
    """
    for part in saved_parts(tmp_path):
        found = Part.from_bytes(part.to_bytes(), "p")
        assert repr(found) == repr(part)
        assert {name: (tmp_path / name).stat().st_size for name in found.files} == found.files
    assert parse_folder(found.key.folder) == (1, 7, SAVE)
    assert parse_folder("1/7") is None


def test_each_flipped_bit_of_a_part_is_noticed(tmp_path: Path) -> None:
    """Whatever bit of the text is another, it is Corrupt."""
    data = saved_parts(tmp_path)[1].to_bytes()
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corrupt, match="checksum does not fit"):
            Part.from_bytes(bytes(flipped), "p")


HOSTILE: dict[str, dict[str, Any]] = {
    "another format": {"format": "holdfast/1"},
    "a run that is a path": {"run": "../../etc"},
    "a process beyond the count": {"process": 9},
    "a step that is no number": {"key": ["7", 1, SAVE, 2]},
    "a negative branch": {"key": [7, -1, SAVE, 2]},
    "a save id that is a path": {"key": [7, 1, "../0000000000001", 2]},
    "a head at another process": {"head": {}},
    "items that are none": {"items": []},
    "an item that is a path": {
        "items": {"../x": {"process": 1, "plan": "", "files": [], "local": [], "values": []}}
    },
    **{
        f"a file named {name!r}": {
            "items": {
                "state": {
                    "process": 1,
                    "plan": "",
                    "files": [[name, 1, 0, 0]],
                    "local": [],
                    "values": [],
                }
            }
        }
        for name in (
            "../../x",
            "/etc/passwd",
            pack_name(0, 0, SAVE),
            pack_name(1, 0, "0" * 16),
            "part-00001.json",
        )
    },
    "a file of negative size": {
        "items": {
            "state": {
                "process": 1,
                "plan": "",
                "files": [[pack_name(1, 0, SAVE), -1, 0, 0]],
                "local": [],
                "values": [],
            }
        }
    },
    "a report of another process": {
        "items": {"state": {"process": 0, "plan": "", "files": [], "local": [], "values": []}}
    },
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_part_that_nobody_writes_is_hostile(kind: str, tmp_path: Path) -> None:
    """A text with a right checksum whose numbers or names are none of ours is refused."""
    body = json.loads(saved_parts(tmp_path)[1].to_bytes())
    body.pop("crc32c")
    data = sealed(json.dumps(body | HOSTILE[kind]).encode()[:-1])
    assert body_of(data)
    with pytest.raises(HostileCheckpoint, match="not a part that holdfast writes"):
        Part.from_bytes(data, "p")


BRANCHES = [
    Branch(RUN, 1, "00000001", NOTHING),
    Branch(RUN, 2, "00000002", 50),
    Branch(RUN, 3, "00000003", 80),
]


@pytest.mark.parametrize(
    ("step", "branch", "writer", "why"),
    [
        (50, 1, "00000001", ""),
        (51, 1, "00000001", "branch 2 went on from step 50"),
        (80, 2, "00000002", ""),
        (90, 2, "00000002", "branch 3 went on from step 80"),
        (999, 3, "00000003", ""),
        (10, 3, "00000002", "branch 3 of writer 00000002 is not known"),
        (10, 4, "00000004", "branch 4 of writer 00000004 is not known"),
    ],
)
def test_a_local_step_above_the_base_of_a_later_opening_is_dead(
    step: int, branch: int, writer: str, why: str
) -> None:
    """Also of a branch that the root does not know, or knows as another's, nothing comes back."""
    found = why_dead(LocalKey(step, branch, f"{writer}00000001", 1), BRANCHES)
    assert found.startswith(why) and bool(found) == bool(why)


def test_a_step_of_a_damaged_opening_is_dead() -> None:
    """Of such an opening nobody knows who wrote it."""
    damaged = Branch(RUN, 4, "", NOTHING)
    found = why_dead(LocalKey(10, 4, "0000000400000001", 1), [*BRANCHES, damaged])
    assert found.startswith("branch 4 of writer 00000004 is not known")
