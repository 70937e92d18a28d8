"""Which runs there are: each program in each ending once, and every pair of ending, Python, jax and
shape. Computed, and seeded.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from tests.model.checkpoint.covering import Cell, covering_rows

from .environments import JAXES, PYTHONS

CORPUS = Path(__file__).with_name("corpus")
PROGRAMS = tuple(sorted(path.stem for path in CORPUS.glob("*.py")))
ENDINGS = ("finished", "killed", "preempted", "interrupted", "hung", "resumed")
SHAPES = ("alone", "together")  # `python program.py`, `holdfast run -n 2`
# Programs of one shape alone, and why.
ONE_SHAPE = {"notebook_cells": "alone"}  # a kernel is one process
STEPS = 40


@dataclass(frozen=True)
class Run:
    """A program and how it is run. `seed` decides all that is left to chance."""

    program: str
    ending: str
    python: str
    jax: str
    shape: str
    seed: int

    def __str__(self) -> str:
        return (
            f"{self.program} {self.ending}, {self.shape}, Python {self.python}, {self.jax} jax,"
            f" seed {self.seed}"
        )


def _agrees(one: Cell, other: Cell) -> bool:
    cells = dict([one, other])
    shape = ONE_SHAPE.get(cells.get("program", ""))
    return shape is None or cells.get("shape", shape) == shape


def draw(seed: int) -> list[Run]:
    """Returns the runs of a seed, in the order of programs and endings."""
    domains = {
        "program": PROGRAMS,
        "ending": ENDINGS,
        "python": PYTHONS,
        "jax": tuple(JAXES),
        "shape": SHAPES,
    }
    rows = covering_rows(domains, _agrees, seed)
    rng = random.Random(seed)
    runs = [Run(**row, seed=rng.randrange(2**32)) for row in rows]
    return sorted(runs, key=lambda run: (run.program, ENDINGS.index(run.ending)))
