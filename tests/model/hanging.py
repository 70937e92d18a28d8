"""A campaign whose one life hangs, for a test: `python -m tests.model.hanging --lives 1`."""

from __future__ import annotations

import sys
import threading

from . import campaign


def hang(life: str) -> None:
    """Never returns."""
    threading.Event().wait()


arguments = campaign.parse_arguments("tests.model.hanging", __doc__)
hanging = campaign.Campaign(lambda seed: "a life", hang, lambda each: each, {}, life_s=0.1)
sys.exit(hanging.run(arguments))
