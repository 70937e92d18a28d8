"""Puts the stand-ins where Orbax's modules are imported from, for programs that may not be
edited.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType

REAL = "orbax.checkpoint"
FACE = "holdfast.compat.orbax"
STARTUP = os.path.join(
    os.path.dirname(os.path.abspath(__file__)), "startup"
)  # for the PYTHONPATH of children


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `orbax.checkpoint` and all below it here; the rest of `orbax` (`orbax.export`) is where
    it was.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if (
            name == "orbax" and importlib.machinery.PathFinder.find_spec(name) is None
        ):  # Orbax is not installed at all
            return importlib.machinery.ModuleSpec(name, None, is_package=True)
        if name != REAL and not name.startswith(f"{REAL}."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Returns the stand-in; raises ModuleNotFoundError, naming the page, for a module that has
        none.
        """
        below = spec.name.removeprefix(REAL).lstrip(".")
        found: object = importlib.import_module(f"{FACE}.face")
        for part in below.split(".") if below else ():
            found = getattr(found, part, None)
        if not isinstance(found, ModuleType):
            message = (
                f"{spec.name} is not covered by {FACE}: leave it out, or use what"
                " docs/from-orbax.md names instead"
            )
            raise ModuleNotFoundError(message, name=spec.name)
        alias = ModuleType(
            spec.name, found.__doc__
        )  # a module of its own: the import system writes into what it gets
        alias.__dict__.update(
            {name: value for name, value in vars(found).items() if not name.startswith("__")}
        )
        return alias

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: the module is made."""


def install() -> None:
    """Makes `import orbax.checkpoint`, and what is below it, import the stand-ins, in this process
    and in those that it spawns.

    Raises RuntimeError once the real Orbax was imported: some of the program would be using it
    already. Idempotent.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if REAL in sys.modules:
        raise RuntimeError(
            f"{REAL} is imported already; call {FACE}.install() before anything imports it"
        )
    sys.meta_path.insert(0, _Finder())
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if STARTUP not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([STARTUP, *filter(None, paths)])
