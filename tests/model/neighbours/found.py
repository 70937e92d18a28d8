"""Draws that once broke a rule, each as plain as it goes."""

from __future__ import annotations

from .lives import Life
from .roots import Neighbour


def _life(past: str, way: str, stranger: str, name: str) -> Life:
    return Life(past, way, (Neighbour(stranger, "root", name),))


FOUND: dict[str, Life] = {
    "a model in the root": _life("steps", "load", "a model", "it"),
    "half a model in the root": _life("steps", "show", "half a model", "it"),
    "an export of Orbax's in the root": _life("steps", "verify", "orbax item", "export"),
    "Orbax's own files in the root": _life("steps", "convert to holdfast", "an orbax", "it"),
    "half a record in the root": _life("steps", "load", "half a record", "it"),
    "an export that is called by a year": _life("steps", "open", "orbax v0", "export_2024"),
    "a model that is called by a year": _life("steps", "open", "hugging face", "2024"),
    "a copy of a root with a model in it": _life("steps", "cp", "a model", "it"),
    "a step of ours over Orbax's": Life("migrated", "over orbax"),
    "a step of ours over Orbax's, by another name": Life("migrated by a prefix", "over orbax"),
    "a root that is deleted as a checkpoint": _life("steps", "orbax paths", "a model", "it"),
    # Since the rule of names stands.
    "a root below a number": _life("steps", "open", "other root", "9"),
    "a folder in a step of Orbax's": Life(
        "orbax", "load", (Neighbour("a folder of files", "root", "2"),)
    ),
    "a trainer's record in a root of Orbax's": _life("orbax", "load", "a trainer's record", "it"),
}
