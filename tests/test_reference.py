"""The pages that are made from the code are as the code is today."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT
from tests.test_words import PUBLIC

DOCS = ROOT / "docs"
REMEDY = "run python scripts/write_reference.py"


def test_the_made_pages_are_fresh(tmp_path: Path) -> None:
    """Commands' help and the reference are what scripts/write_reference.py makes."""
    script = ROOT / "scripts" / "write_reference.py"
    subprocess.run([sys.executable, "-W", "ignore", script, tmp_path], check=True)
    made = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.md")}
    assert len(made) > 8
    for name, text in made.items():
        assert (ROOT / name).read_text() == text, f"{name}: {REMEDY}"


def test_no_public_name_is_without_an_entry() -> None:
    """Each name of each room's `__all__` stands on the page of that room."""
    for room, names in PUBLIC.items():
        text = (DOCS / "api" / f"{room}.md").read_text()
        found = set(re.findall(rf"^(?:### |- \[holdfast\.{room}\.)(\w+)", text, re.MULTILINE))
        assert set(names.split()) <= found, f"docs/api/{room}.md: {REMEDY}"


def test_every_page_is_in_the_navigation() -> None:
    """Nothing is written that nobody can reach."""
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} == listed


def test_a_signature_can_be_read_without_building() -> None:
    """The arguments of a call stand in the page itself, with types, defaults and meaning."""
    text = (DOCS / "api" / "checkpoint.md").read_text()
    manager = text.split("\n### CheckpointManager\n")[1].split("\n### ")[0]
    for each in ("    save_policy: SavePolicy | None = None,", "#### CheckpointManager.restore"):
        assert each in manager
    assert "- `on_busy`: what `save` does" in text
    assert ":::" not in text
