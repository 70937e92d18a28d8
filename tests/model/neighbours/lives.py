"""Draws roots with neighbours, goes one way each, and says where it breaks a rule:

- The root's steps are those that it has by docs/from-orbax.md, with the values that they had.
- The files of its own steps are what they were, but for steps that were to be deleted.
- Nothing of others is taken for a step, changed or deleted.
- What is refused is a typed error, or an exit code and a sentence.
"""

from __future__ import annotations

import contextlib
import random
import re
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.checkpoint import CheckpointError

from ..campaign import shortened
from .roots import PASTS, PLACES, Neighbour, Site
from .strangers import NAMES, STRANGERS
from .ways import WAYS, Changed

SHORTENING_S = 60.0
MOST_NEIGHBOURS = 5
ON_DISK = 0.7
PLAIN_NAME = re.compile(r"[\w.~-]+", re.ASCII)


@dataclass(frozen=True)
class Life:
    """A root's past, what lies about it, and the way that is gone, on disk or in a bucket."""

    past: str
    way: str
    neighbours: tuple[Neighbour, ...] = ()
    bucket: bool = False

    def in_a_bucket(self) -> Life:
        """Returns the life in a bucket, where it can be lived there: Orbax's arrays are not read
        from one in memory, and names are those that need no escape.
        """
        if PASTS[self.past].orbax or self.way.startswith("orbax"):
            return self
        fit = [each for each in self.neighbours if PLAIN_NAME.fullmatch(each.name)]
        rest = tuple(each for each in fit if STRANGERS[each.stranger].layout != "orbax")
        return replace(self, neighbours=rest, bucket=True)

    def plainer(self) -> Iterator[Life]:
        """Yields lives that are a little plainer."""
        for index in range(len(self.neighbours)):
            rest = self.neighbours[:index] + self.neighbours[index + 1 :]
            yield replace(self, neighbours=rest)
        if self.bucket:
            yield replace(self, bucket=False)
        if self.past != "steps":
            yield replace(self, past="steps")


@dataclass(frozen=True)
class Divergence:
    """A life, and what it broke."""

    life: Life
    broken: str

    def __str__(self) -> str:
        return f"{self.life}\n{self.broken[-5000:]}"


def life_of(seed: int) -> Life:
    """Draws a life."""
    rng = random.Random(seed)
    neighbours = tuple(
        Neighbour(
            rng.choice(sorted(STRANGERS)),
            place=rng.choice(PLACES),
            name=rng.choice(NAMES),
        )
        for _ in range(rng.randint(1, MOST_NEIGHBOURS))
    )
    life = Life(rng.choice(sorted(PASTS)), rng.choice(sorted(WAYS)), neighbours)
    return life if rng.random() < ON_DISK else life.in_a_bucket()


def divergence_of(life: Life) -> Divergence | None:
    """Goes a way; returns what is not as it should be."""
    with tempfile.TemporaryDirectory() as folder:
        site = Site.make(Path(folder), life.past, life.neighbours)
        if life.bucket:
            site = site.in_a_bucket()
        before = site.look()
        try:
            changed = _go(site, life.way)
        except Exception:
            return Divergence(life, traceback.format_exc())
        broken = "\n".join(_broken(site, before, changed or Changed()))
    return Divergence(life, broken) if broken else None


def _go(site: Site, way: str) -> Changed | None:
    if site.past.own or (site.past.orbax and not site.has_whole):
        return WAYS[way](site)
    # Which of the strangers are steps is not asked here: nothing of theirs changes.
    with contextlib.suppress(CheckpointError, AssertionError, LookupError):
        WAYS[way](site)
    return Changed(anything_new=True)


def shortest(divergence: Divergence) -> Divergence:
    """Returns a divergence that is as plain as it goes."""
    return shortened(divergence, lambda best: map(divergence_of, best.life.plainer()), SHORTENING_S)


def _broken(site: Site, before: dict[str, object], changed: Changed) -> Iterator[str]:
    after = site.look()
    gone = [f"root/{site.past.name_of(step)}" for step in changed.deleted]
    new = [f"root/{site.past.name_of(step)}" for step in changed.saved]
    new += ["root/.holdfast", "root/by itself", "out"]
    for name, what in before.items():
        is_foreign = name in site.foreign
        if name in after and after[name] == what:
            continue
        is_asked_for = changed.anything_new or _is_below(name, gone)
        if not is_foreign and (is_asked_for or name.startswith("root/.holdfast")):
            continue
        state = "gone" if name not in after else "changed"
        yield f"{name} ({'foreign' if is_foreign else 'ours'}) is {state}"
    for name in () if changed.anything_new else after.keys() - before.keys():
        if not _is_below(name, new):
            yield f"{name} is new"


def _is_below(name: str, folders: list[str]) -> bool:
    return any(name == folder or name.startswith(f"{folder}/") for folder in folders)
