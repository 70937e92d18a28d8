"""How a part tells the kit what it has measured: a line each, as soon as it is known."""

from __future__ import annotations

import json
import sys

FIGURE = "FIGURE "
NOT_RUN = "NOT RUN "


def figure(what: str, value: str, beside: str = "") -> None:
    """Reports a figure."""
    _print(FIGURE + json.dumps([what, value, beside]))


def not_run(what: str, why: str) -> None:
    """Reports what cannot be measured here."""
    _print(NOT_RUN + json.dumps([what, why]))


def _print(line: str) -> None:
    # pytest has another stdout for what its tests print, and has left a dot on this one.
    print(f"\n{line}", file=sys.__stdout__, flush=True)


def seconds(value: float) -> str:
    """Returns a time with three digits."""
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def speed(nbytes: int, value: float) -> str:
    """Returns bytes in a time."""
    return f"{nbytes / value / 1e9:.2f} GB/s"


def size(nbytes: int) -> str:
    """Returns a size."""
    return f"{nbytes / 1e9:.3g} GB" if nbytes >= 10**9 else f"{nbytes / 1e6:.3g} MB"
