"""A checkpoint as a page: what a checkpoint says is text."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest

from holdfast.web.tree_page import MOST_CELLS, PLACES, checkpoint_page


def shown(leaves: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns what `holdfast show --json` says."""
    return {
        "path": "/ckpt/<b>",
        "layout": "holdfast",
        "step": 7,
        "metrics": {"loss": 1.5},
        "metadata": None,
        "leaves": leaves,
    }


def leaf(path: str, size: int, **more: Any) -> dict[str, Any]:
    """Returns an array of a checkpoint."""
    return {
        "item": "state",
        "path": path,
        "dtype": "float32",
        "shape": [size // 4],
        "bytes": size,
        "sharding": "local",
    } | more


class Tags(HTMLParser):
    """Collects the tags and the text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_leaves_are_drawn_with_shards_and_values() -> None:
    """Sizes in the map and the table, a picture of the shards, bars of the values; what is no array
    says what it is.
    """
    stats = {"min": -1.0, "max": 2.0, "mean": 0.5, "nan": 3, "inf": 0, "bins": [1, 4, 2]}
    page = checkpoint_page(
        shown(
            [
                leaf("a.b", 4000, shards=[4, 1, 2], stats=stats),
                {"item": "state", "path": "name", "dtype": "str", "value": "x"},
            ]
        )
    )
    assert 'title="state.a.b: 4.0 kB, float32 [1000]"' in page
    assert 'aria-label="4 by 2 shards"' in page
    assert 'aria-label="histogram: 1, 4, 2"' in page
    parsed = Tags(page)
    assert "step 7 of /ckpt/<b> (holdfast)" in parsed.text
    assert "2 leaves, 4.0 kB" in parsed.text
    assert "loss 1.5" in parsed.text
    assert "script" not in parsed.tags
    assert "radio" not in page


def test_what_has_changed_can_be_the_colour() -> None:
    """Where the page knows an earlier step: each share is a class, a branch's that of its bytes."""
    leaves = [leaf("a", 4000, changed=1.0), leaf("b", 4000, changed=0.0001), leaf("c", 8)]
    page = checkpoint_page(shown(leaves) | {"since": 3})
    assert "changed since step 3" in page
    assert page.count('class="cell d0 c4"') == page.count('class="cell d0 c1"') == len(PLACES)
    assert 'title="state.b: 4.0 kB, float32 [1000], under 1 % changed"' in page
    assert '<td class="number">100 %</td>' in page


def test_names_of_a_checkpoint_are_text() -> None:
    """A path that is markup stays what it is; nothing in the page runs."""
    parsed = Tags(
        checkpoint_page(shown([leaf("<script>alert(1)</script>", 8), leaf('"><img src=x>', 8)]))
    )
    assert (
        "script" not in parsed.tags
        and "img" not in parsed.tags
        and "<script>alert(1)</script>" in parsed.text
    )


@pytest.mark.parametrize("branches", [1, 100, 5000])
def test_ten_thousand_leaves_are_a_bounded_map(branches: int) -> None:
    """The smallest of a branch are one cell, small branches are closed; all are in the table."""
    leaves = [leaf(f"b{n % branches}.a{n}", 4 * (n + 1)) for n in range(10_000)]
    page = checkpoint_page(shown(leaves))
    assert page.count('<div class="cell') + page.count('<div class="branch') < 6 * MOST_CELLS
    assert Tags(page).tags.count("tr") == 10_001


def test_a_checkpoint_without_arrays_has_a_page() -> None:
    """Nothing is divided by nothing."""
    assert "0 leaves, 0 bytes" in checkpoint_page(shown([]))
