"""The figures of README are those of the newest results, and no others stand beside them."""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import versus_orbax

ROOT = Path(__file__).parent.parent

# "7 x as fast", "9 x |", "three times Orbax's speed"
HEADLINE = re.compile(r"\b[\d.]+ x\b(?! \d)| x as fast|Orbax's speed|returns at once")


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(versus_orbax.RESULTS.read_text())
    return found


def test_table_and_page_are_of_the_newest_results(results: dict[str, Any]) -> None:
    """README's table and the page are what `make figures` writes of its results."""
    table = f"{versus_orbax.BEGIN}\n{versus_orbax.readme_table(results)}\n{versus_orbax.END}"
    assert table in versus_orbax.README.read_text()
    assert versus_orbax.PAGE.read_text() == versus_orbax.results_page(results)


def test_each_figure_says_how_it_was_made(results: dict[str, Any]) -> None:
    """Each row names its command, machine and date; all workloads of README have all columns."""
    assert [name for name in results if name in versus_orbax.DEFAULT] == versus_orbax.DEFAULT
    page = versus_orbax.results_page(results)
    table = versus_orbax.readme_table(results)
    for name, found in results.items():
        words = found["command"].split()
        assert words[-2:] == ["--only", name]
        datetime.date.fromisoformat(found["date"])
        assert f"{found['command']}`, {found['date']}" in page
        assert found["machine"] in page
        if name in versus_orbax.DEFAULT:
            assert f"`{found['command']}`, {found['date']}" in table
            assert found["machine"] in table
        wanted = {"first total", "total", "first blocked", "blocked"}
        if name != "busy":
            wanted |= set(versus_orbax.FIGURES) - ({"cold"} if name == "memory" else set())
        for system in ("holdfast", "orbax"):
            assert set(found["systems"][system]) == wanted | {"peak_extra_mib"}


def test_a_changed_figure_is_noticed(results: dict[str, Any]) -> None:
    """Another median, or another date, makes another table and another page."""
    changed: dict[str, Any] = json.loads(json.dumps(results))
    changed["disk"]["systems"]["holdfast"]["total"] *= 2
    assert versus_orbax.readme_table(changed) != versus_orbax.readme_table(results)
    assert versus_orbax.results_page(changed) != versus_orbax.results_page(results)


def test_no_headline_stands_outside_of_the_table() -> None:
    """README and the pages of docs claim no speed that no command keeps true."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for page in pages:
        text = page.read_text()
        if versus_orbax.BEGIN in text:
            text = text.split(versus_orbax.BEGIN)[0] + text.split(versus_orbax.END)[1]
        assert not (found := HEADLINE.findall(text)), (page.name, found)


def test_a_headline_is_found() -> None:
    """The sentences that README had are headlines."""
    for claim in ("| 2 ms, 9 x |", "0.17 s, 7 x as fast", "manager.save(step)  # returns at once"):
        assert HEADLINE.search(claim)
    assert not HEADLINE.search("| mean 3 x 4 devices |")
