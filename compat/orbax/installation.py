"""Puts the stand-ins where Orbax's modules are imported from: for programs nobody may edit."""

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
# For the PYTHONPATH of children.
_OWN_NAMES = frozenset(vars(ModuleType("module")))
STARTUP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "startup")


def _module_in(module: object, name: str) -> object:
    """Returns what a module has under a name: a module of stand-ins for what is refused."""
    refusals = importlib.import_module(f"{FACE}.refusals")
    found = getattr(module, name, None)
    reason = refusals.refusal_of(found)
    if reason is None or isinstance(found, ModuleType):
        return found
    assert isinstance(module, ModuleType)
    return refusals.make_module(f"{module.__name__.removeprefix(f'{FACE}.')}.{name}", reason=reason)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `orbax.checkpoint` and all below it here.

    The rest of `orbax`, such as `orbax.export`, is where it was.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        installed = importlib.machinery.PathFinder.find_spec
        if name == "orbax" and installed(name) is None:
            return importlib.machinery.ModuleSpec(name, None, is_package=True)
        if name != REAL and not name.startswith(f"{REAL}."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Returns the stand-in; raises ModuleNotFoundError, naming the page, for none."""
        stand_in: object = importlib.import_module(f"{FACE}.face")
        for name in spec.name.split(".")[2:]:
            stand_in = _module_in(stand_in, name)
        if not isinstance(stand_in, ModuleType):
            raise ModuleNotFoundError(
                f"{spec.name} is not covered by {FACE}: leave it out, or use what"
                " docs/from-orbax.md names instead",
                name=spec.name,
            )
        # A module of its own: the import system writes into what it gets.
        alias = ModuleType(spec.name, stand_in.__doc__)
        names = {key: value for key, value in vars(stand_in).items() if key not in _OWN_NAMES}
        vars(alias).update(names)
        return alias

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: the module is made."""


def install() -> None:
    """Makes `import orbax.checkpoint`, and what is below it, import the stand-ins.

    In this process and in those that it spawns. Raises RuntimeError once the real Orbax was
    imported: some of the program would be using it already. Idempotent.
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
