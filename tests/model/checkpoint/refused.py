"""Saves of what cannot be saved: each is refused, and leaves everything as it was."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.checkpoint import CheckpointManager, Files, register_leaf_type

from .operations import alike
from .site import Site
from .world import World

HOWS = ("two fields of one name", "a folder that became a link", "a folder that is gone")


class Twofold:
    """A leaf whose fields have one name, once as a number and once as a string."""


register_leaf_type(Twofold, lambda value: {1: 2, "1": 3}, lambda fields: Twofold())  # type: ignore[dict-item]


def _link_outside(folder: Path) -> None:
    folder.rmdir()
    folder.symlink_to(Path(__file__).parent)


def _state(how: str) -> Any:
    match how:
        case "two fields of one name":
            return {"leaf": Twofold()}
        case "a folder that became a link":
            return Files(_link_outside, per_process=True)
    return Files(shutil.rmtree, per_process=True)


@dataclass(frozen=True)
class SaveRefused:
    """Saves what its leaf type or its handler has made unfit, one of HOWS."""

    step: int
    how: str

    def run(self, site: Site) -> list[Any]:
        site.settle()

        def save(rank: int, manager: CheckpointManager) -> bool:
            handle = manager.save(
                self.step, items={"state": _state(self.how)}, force=True, overwrite=True
            )
            handle.wait()
            return bool(handle)

        return site.each(save)

    def judge(self, world: World, site: Site, found: list[Any]) -> Iterator[World]:
        expected = {"UnsupportedLeaf", "ValueError", "SaveFailed"}
        if alike(found) not in expected:
            return
        now_s = site.clock.true_s
        # In a group the others have begun this save, and its policy knows it.
        for ended in world.ended():
            yield ended
            yield ended.started(self.step, now_s)
