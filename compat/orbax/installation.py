"""Puts the stand-ins where Orbax's modules are imported from: for programs nobody may edit."""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

REAL = "orbax.checkpoint"
FACE = "holdfast.compat.orbax"
_JOINS = "jax.distributed"
_WHO = ("coordinator_address", "num_processes", "process_id")
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
        if name == _JOINS and (found := installed(name, path)) is not None:
            loader = _Joining(name, str(found.origin))
            return importlib.util.spec_from_file_location(name, found.origin, loader=loader)
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


class _Joining(importlib.machinery.SourceFileLoader):
    """Loads `jax.distributed`, which knows no launcher of holdfast's."""

    def exec_module(self, module: ModuleType) -> None:
        """Has it join the jobs of such launchers, where jax is to find out which."""
        super().exec_module(module)
        _join_by_holdfast(module)


def _join_by_holdfast(module: Any) -> None:
    joins = module.initialize

    @functools.wraps(joins)
    def initialize(*arguments: Any, **options: Any) -> None:
        import inspect  # each child of such a program loads this module

        from holdfast import multihost

        bound = inspect.signature(joins).bind(*arguments, **options).arguments
        given = {name: value for name, value in bound.items() if value is not None}
        if given.keys() >= {*_WHO} or multihost.ProcessSpec.from_env(os.environ) is None:
            joins(*arguments, **options)
        else:
            words = {name: given[name] for name in (*_WHO, "local_device_ids") if name in given}
            multihost.initialize(**words, timeout_s=given.get("initialization_timeout", 300))

    vars(module).update(initialize=initialize)


def install() -> None:
    """Makes `import orbax.checkpoint`, and what is below it, import the stand-ins. Where a launcher
    of holdfast's has started the process, `jax.distributed.initialize` joins its job.

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
    if _JOINS in sys.modules:
        _join_by_holdfast(sys.modules[_JOINS])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if STARTUP not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([STARTUP, *filter(None, paths)])
