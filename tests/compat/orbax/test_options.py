"""What the options say of themselves is what the code does with them."""

from __future__ import annotations

import re
from dataclasses import fields

from holdfast.compat.orbax.options import CheckpointManagerOptions
from tests.support.paths import ROOT


def test_the_options_without_effect_are_those_that_nobody_asks_for() -> None:
    """Each field is either read somewhere, or listed as one without effect."""
    said = re.search(
        r"Without effect[^:]*: (.*?)\.", CheckpointManagerOptions.__doc__ or "", re.DOTALL
    )
    assert said is not None
    idle = set(re.split(r",\s*", said[1]))
    sources = [path.read_text() for path in (ROOT / "compat").rglob("*.py")]
    read = {
        each.name
        for each in fields(CheckpointManagerOptions)
        if any(re.search(rf"[\w)]\.{each.name}\b", source) for source in sources)
    }
    assert idle == {each.name for each in fields(CheckpointManagerOptions)} - read
