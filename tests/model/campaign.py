"""Campaigns: many seeded lives beside a model, by the command line or by a test."""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from tests.support.garbage import freeze
from tests.support.paths import ROOT

L = TypeVar("L")
D = TypeVar("D")

LIFE_S = 80.0


@dataclass(frozen=True)
class Campaign(Generic[L, D]):
    """What the lives of a model are, of which there is one a seed.

    `divergence_of` lives a life, and returns where it and the model part. `shortest` leaves out
    what a divergence does not need. `found` are lives that once diverged, by name. A life that has
    not ended after `life_s` hangs, which is a divergence.
    """

    life_of: Callable[[int], L]
    divergence_of: Callable[[L], D | None]
    shortest: Callable[[D], D]
    found: Mapping[str, L]
    life_s: float = LIFE_S

    def run(self, arguments: argparse.Namespace) -> int:
        """Lives the lives that the command line asks for, and prints where they diverge. Returns
        the exit code: 1 where one does.
        """
        freeze()  # lives look for garbage that they have left, and for no other's
        began_s = time.monotonic()
        lived = 0
        found = 0
        for name, life in self._lives(arguments):
            if time.monotonic() - began_s > arguments.seconds or found >= arguments.most:
                break
            if arguments.verbose:
                print(f"{name}: {life}", flush=True)
            divergence = self._limited(name, life)
            lived += 1
            if divergence is not None:
                found += 1
                shown = divergence if arguments.as_drawn else self.shortest(divergence)
                print(f"--- {name}: {shown}\n", flush=True)
        print(f"{lived} lives in {time.monotonic() - began_s:.1f} s, {found} diverge", flush=True)
        return 1 if found else 0

    def _limited(self, name: str, life: L) -> D | None:
        """Returns the divergence of a life. Ends this process with 1 where the life hangs: what
        waits in it for ever is waited for at the end of a process too.
        """

        def end() -> None:
            print(f"--- {name} has not ended within {self.life_s:g} s: {life}\n", flush=True)
            os._exit(1)

        limit = threading.Timer(self.life_s, end)
        limit.daemon = True
        limit.start()
        try:
            return self.divergence_of(life)
        finally:
            limit.cancel()

    def _lives(self, arguments: argparse.Namespace) -> Iterator[tuple[str, L]]:
        """Yields the lives that are asked for, with what they are called."""
        if arguments.found:
            yield from list(self.found.items())[arguments.first :: arguments.every]
            return
        for seed in range(arguments.first, arguments.first + arguments.lives, arguments.every):
            yield f"seed {seed}", self.life_of(seed)


def shortened(divergence: D, shorter: Callable[[D], Iterable[D | None]], within_s: float) -> D:
    """Returns a divergence of a life as short and as plain as it goes, or as was found in time.

    `shorter` lives what is a little shorter than the life of a divergence, one after the other, and
    yields what diverges; None for what does not.
    """
    best = divergence
    end_s = time.monotonic() + within_s
    while time.monotonic() < end_s:
        tried = (each for each in shorter(best) if each is not None or time.monotonic() > end_s)
        better = next(tried, None)
        if better is None:
            break
        best = better
    return best


def parse_arguments(program: str, description: str | None) -> argparse.Namespace:
    """Returns which lives the command line asks for; the log is shown if it says so."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=description)
    add = parser.add_argument
    add("--lives", type=int, default=100, help="how many seeds")
    add("--first", type=int, default=0, help="the first seed, or found life")
    add("--every", type=int, default=1, help="takes every so many-th of them")
    add("--found", action="store_true", help="takes the lives that once diverged instead")
    add("--seconds", type=float, default=1e9, help="begins no life after so many")
    add("--most", type=int, default=1, help="divergences after which it ends")
    add("--verbose", action="store_true", help="shows each life, and the log")
    add("--as-drawn", action="store_true", help="makes no divergence shorter")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO if arguments.verbose else logging.CRITICAL)
    return arguments


def check_lives(program: str, *arguments: object, timeout_s: float) -> None:
    """Runs lives in a process of their own, and asserts that none diverges."""
    done = subprocess.run(
        [sys.executable, "-m", program, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
