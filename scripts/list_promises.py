"""Prints the promises of docs/guarantees.md, each with its home and its evidence.

Then the sentences that stand on more than one page.

    python scripts/list_promises.py
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from prose_figures import ROOT, default_pages, sentences

LONG = 8  # words: a shorter sentence may stand twice
_PROMISE = re.compile(r"^(\d+)\. \*\*(.+?)\*\*", re.MULTILINE)
_EVIDENCE = re.compile(r"^\| (\d+(?:(?:, | to )\d+)*)[.| ]", re.MULTILINE)
_WORDS = re.compile(r"[\w@]+")


def promises() -> dict[int, str]:
    """Returns the statements of the guarantees, by number."""
    page = ROOT / "docs" / "guarantees.md"
    return {int(number): text for number, text in _PROMISE.findall(page.read_text())}


def attacked() -> set[int]:
    """Returns the numbers of the promises for which there is a row of evidence."""
    found: set[int] = set()
    for row in _EVIDENCE.findall((ROOT / "docs" / "how-we-know.md").read_text()):
        for part in row.split(", "):
            first, _, last = part.partition(" to ")
            found |= set(range(int(first), int(last or first) + 1))
    return found


def said_twice() -> dict[str, list[str]]:
    """Returns the long sentences that stand on several pages, or twice on one, with their pages."""
    homes: dict[str, list[str]] = defaultdict(list)
    for page in default_pages():
        if page.parent.name == "adr":  # a decision may quote what it has decided
            continue
        for sentence in sentences(page.read_text()):
            words = _WORDS.findall(sentence.lower())
            if len(words) >= LONG:
                homes[" ".join(words)].append(page.name)
    return {sentence: pages for sentence, pages in homes.items() if len(pages) > 1}


def main() -> None:
    known = attacked()
    for number, text in promises().items():
        evidence = "how-we-know.md" if number in known else "NONE"
        print(f"{number:2}. {text} home: guarantees.md, evidence: {evidence}")
    for sentence, pages in said_twice().items():
        print(f"twice ({', '.join(pages)}): {sentence}")


if __name__ == "__main__":
    main()
