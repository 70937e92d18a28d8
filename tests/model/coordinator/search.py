"""All orders, to the end: states that are alike are visited once."""

from __future__ import annotations

from typing import NamedTuple

from tests.model.promise import Broken

from .world import Bounds, World


class Found(NamedTuple):
    """What a search has seen: the states, the events, and the shortest story that breaks a
    promise.
    """

    states: int
    events: int
    longest: int
    broken: Broken | None = None
    story: tuple[str, ...] = ()


def replay(story: tuple[str, ...], bounds: Bounds) -> World:
    """Returns the world after a story."""
    world = World(bounds)
    for event in story:
        world.happen(event)
    return world


def search(bounds: Bounds) -> Found:
    """Returns what all orders of events lead to; ends at the first promise that breaks, else when
    nothing more can happen.
    """
    front: list[tuple[str, ...]] = [()]
    seen = {World(bounds).key()}
    events = 0
    longest = 0
    while front:
        following = []
        for story in front:
            for event in replay(story, bounds).events():
                events += 1
                told = (*story, event)
                try:
                    world = replay(told, bounds)
                except Broken as broken:
                    return Found(len(seen), events, len(told), broken, told)
                key = world.key()
                if key not in seen:
                    seen.add(key)
                    following.append(told)
                    longest = len(told)
        front = following
    return Found(len(seen), events, longest)
