"""Prints how many words README and docs have, and how long their sentences are: median, 90th
percentile, longest.

    python scripts/prose_figures.py                 all pages of this tree
    python scripts/prose_figures.py PAGE ...        the pages named
    python scripts/prose_figures.py --long          also each sentence of more than 28 words

Headings, tables, code blocks, link targets and comments are left out; code in a line is one word.
An item of a list begins a new sentence. Words are counted with tables and code, and without what is
made by a script: `tests/test_docs.py` holds their number, and sentences are a compass.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LONG = 28

_BLOCKS = re.compile(r"^( *)```.*?^\1```[^\n]*$|<!--.*?-->", re.MULTILINE | re.DOTALL)
_NOT_PROSE = re.compile(r"^\s*(\||#|!\[)")
_ITEM = re.compile(r"^\s*(?:[-*]|\d+\.)\s+")
_CODE = re.compile(r"`[^`]+`")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_URL = re.compile(r"https?://\S+")
# A full stop ends a sentence where something begins after it; "e.g. this" and "0.4.38" go on.
# Some names begin with a small letter wherever they stand.
_END = re.compile(r"(?<=[.!?])[*)\"']*\s+(?=[\"'(*]*(?:[A-Z0-9@]|holdfast|jax|gcsfuse|gRPC))")
_WORD = re.compile(r"[\w@][\w@'./-]*")
_MADE = re.compile(r"<!-- (?:\w+: )?[Mm]ade by .*? end -->", re.DOTALL)


def default_pages() -> list[Path]:
    """Returns README, the pages of docs and the decisions."""
    folder = ROOT / "docs"
    pages = {*folder.glob("*.md")} - {folder / "index.md"}  # made of README
    return [ROOT / "README.md", *sorted(pages), *sorted(folder.glob("adr/*.md"))]


def paragraphs(text: str) -> Iterator[str]:
    """Yields the paragraphs of a page, and each item of its lists, as one line each."""
    rows: list[str] = []
    for row in [*_BLOCKS.sub("", text).splitlines(), ""]:
        begins = _ITEM.match(row)
        if (begins or not row.strip() or _NOT_PROSE.match(row)) and rows:
            yield " ".join(rows)
            rows = []
        if not _NOT_PROSE.match(row) and row.strip():
            rows.append(_ITEM.sub("", row).strip())


def sentences(text: str) -> Iterator[str]:
    """Yields the sentences of a page."""
    for paragraph in paragraphs(text):
        plain = _LINK.sub(r"\1", paragraph)
        plain = _URL.sub("@", _CODE.sub("@", plain))
        yield from (sentence for sentence in _END.split(plain) if _WORD.search(sentence))


def words_of_page(text: str) -> int:
    """Returns how many words somebody has written on a page."""
    return sum(any(map(str.isalnum, word)) for word in _MADE.sub("", text).split())


def words(sentence: str) -> int:
    """Returns how many words a sentence has."""
    return len(_WORD.findall(sentence))


def percentile_90(sizes: list[int]) -> int:
    """Returns the size that nine in ten do not exceed."""
    return sorted(sizes)[min(len(sizes) - 1, int(len(sizes) * 0.9))]


def row_of(name: str, count: int, sizes: list[int]) -> str:
    """Returns a row of the table: how many words and sentences, and how long these are."""
    lengths = f"{statistics.median(sizes):g} | {percentile_90(sizes)} | {max(sizes)}"
    return f"| {name} | {count} | {len(sizes)} | {lengths} |"


def main() -> None:
    """Prints a table in Markdown, and the long sentences with --long."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", type=Path)
    parser.add_argument("--long", action="store_true", help="also list the long sentences")
    chosen = parser.parse_args()
    texts = {page: page.read_text() for page in chosen.pages or default_pages()}
    by_page = {page: list(sentences(text)) for page, text in texts.items()}
    counts = {page: words_of_page(text) for page, text in texts.items()}
    everything: list[int] = []
    print("| page | words | sentences | median | nine in ten | longest |")
    print("|---|---|---|---|---|---|")
    for page, prose in by_page.items():
        sizes = [words(sentence) for sentence in prose]
        everything += sizes
        if sizes:
            print(row_of(page.name, counts[page], sizes))
    print(row_of("all", sum(counts.values()), everything))
    if chosen.long:
        for page, prose in by_page.items():
            for sentence in prose:
                if words(sentence) > LONG:
                    print(f"\n{page.name}, {words(sentence)} words: {sentence}")


if __name__ == "__main__":
    main()
