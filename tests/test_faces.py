"""What a program may rely on does not change in silence: today's faces beside those of the last
baseline, tests/faces, as griffe compares them.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import griffe
import pytest

from scripts.write_faces import FACES, ROOMS, load_faces, main, stub_of
from tests.support.paths import ROOT

CHANGELOG = ROOT / "CHANGELOG.md"


def _breaks(old: Path, new: Path) -> dict[str, str]:
    """Returns what a face under `new` breaks that programs of one under `old` may use, by name."""
    before = load_faces(old)
    after = load_faces(new)
    return {
        each.obj.path.removeprefix("holdfast."): each.explain(griffe.ExplanationStyle.ONE_LINE)
        for room in ROOMS
        for each in griffe.find_breaking_changes(before[room], after[room])
    }


def _announced() -> set[str]:
    """Returns the names under "Breaks" in the newest section of the changelog."""
    newest = CHANGELOG.read_text().split("\n## ")[1]
    section = newest.partition("\n### Breaks\n")[2].partition("\n### ")[0]
    return set(re.findall(r"^- `([\w.()]+)`", section, re.MULTILINE))


def test_a_break_has_a_line_in_the_changelog(tmp_path: Path) -> None:
    """Names, parameters and fields of the baseline are there, or "Breaks" says which are not."""
    main(tmp_path)
    broken = _breaks(FACES, tmp_path)
    missing = {name: text for name, text in broken.items() if name not in _announced()}
    assert missing == {}, "CHANGELOG.md wants a line under '### Breaks' that begins with `NAME`"
    assert _announced() <= set(broken), "CHANGELOG.md announces a break that is none"


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        ("def verify(", "def check(", "checkpoint.verify"),
        ("on_busy: ", "when_busy: ", "checkpoint.Options.on_busy"),
        ("timeout_s: ", "timeout: ", "checkpoint.save"),
        ("class StepGone(CheckpointError):", "class StepGone:", "checkpoint.StepGone"),
    ],
)
def test_a_deliberate_break_is_found(tmp_path: Path, before: str, after: str, name: str) -> None:
    """A name, a field, a parameter and a base that are gone are each named."""
    shutil.copytree(FACES, tmp_path / "changed")
    stub = tmp_path / "changed" / "holdfast" / "checkpoint.pyi"
    text = stub.read_text()
    assert before in text
    stub.write_text(text.replace(before, after))
    assert any(found.endswith(name) for found in _breaks(FACES, tmp_path / "changed"))


def test_the_baseline_is_read_as_it_was_written() -> None:
    """A stub that is read and written again is the same: nothing of a face is lost on the way."""
    for room, face in load_faces(FACES).items():
        assert stub_of(face) == (FACES / "holdfast" / f"{room}.pyi").read_text()
