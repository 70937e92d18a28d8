"""Draws values, saves them and brings them back: `python -m tests.model.values --draws 20000`.

It has the devices of a process to itself. Prints each draw that comes back otherwise, as short as
it goes, and ends with 1 where there is one.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Collection
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings

from .destinations import Draw, check
from .found import FOUND

ROUND = 500  # draws of one seed
SHRINKS = (Phase.generate, Phase.shrink)


def _check(draw: Draw) -> None:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(draw, Path(folder))


def _shown(value: object) -> str:
    """Returns a value for people; ints of many digits have no text."""
    digits = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return f"{value!r:.5000}"
    finally:
        sys.set_int_max_str_digits(digits)


def _round(number: int, draws: int, *, to: Collection[str], shrinks: bool) -> bool:
    """Checks the draws of one seed; prints the one that comes back otherwise. Returns whether none
    does.
    """
    failed: list[tuple[Draw, BaseException]] = []

    @seed(number)
    @settings(
        max_examples=draws,
        database=None,
        deadline=None,
        phases=SHRINKS if shrinks else SHRINKS[:1],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
    )
    @given(Draw.strategy(to))
    def run(draw: Draw) -> None:
        try:
            _check(draw)
        except BaseException as error:
            failed.append((draw, error))
            raise

    try:
        run()
    except Exception:
        if not failed:
            raise  # of the strategies themselves
        draw, error = failed[-1]
        print(f"--- seed {number}: {_shown(draw)}\n{_shown(error)}\n", flush=True)
        return False
    return True


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.model.values", description=__doc__)
    parser.add_argument("--draws", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--most", type=int, default=1, help="differences after which it ends")
    parser.add_argument("--to", action="append", default=[], help="a destination (all)")
    parser.add_argument("--found", action="store_true", help="takes those that once differed too")
    parser.add_argument("--as-drawn", action="store_true", help="makes no draw shorter")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    began_s = time.monotonic()
    bad = 0
    for name, draw in FOUND.items() if arguments.found else ():
        try:
            _check(draw)
        except Exception as error:
            bad += 1
            print(f"--- {name}: {_shown(draw)}\n{_shown(error)}\n", flush=True)
    drawn = 0
    while drawn < arguments.draws and (bad == 0 or bad < arguments.most):
        count = min(ROUND, arguments.draws - drawn)
        number = arguments.first + drawn // ROUND
        bad += not _round(number, count, to=arguments.to, shrinks=not arguments.as_drawn)
        drawn += count
    took_s = time.monotonic() - began_s
    print(f"{drawn} draws (fewer, where one differs) in {took_s:.1f} s, {bad} differ", flush=True)
    return 1 if bad else 0


sys.exit(main())
