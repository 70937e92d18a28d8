"""What docs/architecture.md says that a room never does, it does not do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text()
SECTION = PAGE.partition("## What a room never does\n")[2].partition("\n## ")[0]
_QUOTED = re.compile(r"`([^`]+)`")


def _rows() -> list[tuple[str, list[str]]]:
    """Returns each place of the table, and what it never imports."""
    rows = [row.split("|")[1:3] for row in SECTION.splitlines() if row.startswith("| `")]
    return [
        (place, _QUOTED.findall(never)) for where, never in rows for place in _QUOTED.findall(where)
    ]


def _sources(place: str) -> Iterator[tuple[Path, ast.Module]]:
    path = ROOT / place
    files = [path] if path.suffix else sorted(path.rglob("*.py"))
    assert files, place
    for file in files:
        yield file, ast.parse(file.read_text())


def _imported(tree: ast.Module) -> set[str]:
    """Returns the libraries that a module imports, wherever it does."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {each.name.partition(".")[0] for each in node.names}
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize(("place", "never"), _rows(), ids=[place for place, _ in _rows()])
def test_a_room_never_imports(place: str, never: list[str]) -> None:
    for file, tree in _sources(place):
        assert not _imported(tree) & set(never), file.relative_to(ROOT)


def test_the_table_has_its_rows() -> None:
    assert len(_rows()) > 15


def test_who_reads_deletes_nothing() -> None:
    """The places and the verbs are those of the sentence below the table."""
    sentence = SECTION.rpartition("\n\nAnd ")[2]
    quoted = _QUOTED.findall(sentence)
    places = [each for each in quoted if "/" in each]
    verbs = set(quoted) - set(places)
    assert len(places) == 3 and len(verbs) == 4
    for place in places:
        for file, tree in _sources(place):
            called = {
                node.func.attr
                for node in ast.walk(tree)
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            }
            assert not called & verbs, file.relative_to(ROOT)
