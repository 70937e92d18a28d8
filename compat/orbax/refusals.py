"""What is not covered: an error that says what is nearest, and stand-ins that raise it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

PAGE = "docs/from-orbax.md"
FACE = "holdfast.compat.orbax"
# What to do instead, where more than one module says so.
OWN_HANDLER = (
    "give handlers of your own by item, CheckpointManager(item_handlers={...}), or register their"
    " arguments: args.register_with_handler"
)
PATHS = "leave it out: steps are folders with plain numbers, found by manager.all_steps()"
METADATA = "manager.metadata(step), or holdfast.checkpoint.structure(path)"
PRIVATE = (
    "what lies below _src is Orbax's own affair: use the name that orbax.checkpoint has for it"
)
PATHWAYS = (
    "holdfast.multihost.is_pathways_backend() says where a program runs; a save needs nothing more"
)
TESTING = "it serves Orbax's own tests"


def not_covered(call: str, nearest: str) -> NotImplementedError:
    """Returns the error for a call of Orbax's that is not covered; do `nearest` instead."""
    return NotImplementedError(
        f"{call} is not covered by holdfast.compat.orbax: {nearest}. See {PAGE}"
    )


def refuse(call: str, nearest: str, **given: Any) -> None:
    """Raises for the first argument that was given: whose value is none of None, False and ()."""
    for name, value in given.items():
        if value is not None and value is not False and value != ():
            raise not_covered(f"{call}({name}={value!r:.60})", nearest)


def check_options(call: str, given: Iterable[str], known: str) -> None:
    """Raises TypeError, as Orbax does, for the first option that is none of the known ones."""
    for name in given:
        if name not in known.split():
            raise TypeError(
                f"{call}() got an unexpected keyword argument {name!r}; expected one of"
                f" {', '.join(known.split())}"
            )


class _StandIn(type):
    """The class of names that can be imported, subclassed and asked about, but not called."""

    refusal: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise not_covered(f"{cls.__module__}.{cls.__qualname__}", cls.refusal)

    def __getattr__(cls, name: str) -> Any:
        # Some stand for modules, whose names may be imported and annotated too.
        if name.startswith("_") or name == "refusal":
            raise AttributeError(f"{cls.__module__}.{cls.__qualname__} has no {name}")
        return stand_in(f"{cls.__module__}.{cls.__qualname__}", name, cls.refusal)


@functools.cache
def stand_in(module: str, name: str, nearest: str) -> Any:
    """Returns what stands for a name of `module` that is not covered."""
    return _StandIn(name, (), {"__module__": module, "__qualname__": name, "refusal": nearest})


def refusal_of(value: Any) -> str | None:
    """Returns why a name is refused, None where it is covered."""
    if isinstance(value, _StandIn):
        return value.refusal
    refusal: str | None = getattr(value, "__holdfast_refusal__", None)
    return refusal


def refusing(module: str, reason: str, names: str = "") -> Callable[[str], Any]:
    """Returns the `__getattr__` of a module by which these names, or all, are stand-ins."""
    real = module.replace(FACE, "orbax.checkpoint")

    def find(name: str) -> Any:
        if name.startswith("__") or (names and name not in names.split()):
            raise AttributeError(f"{module} has no {name!r}, and neither has {real}; see {PAGE}")
        return stand_in(real, name, reason)

    return find


def make_module(name: str, reason: str, **names: Any) -> ModuleType:
    """Makes the module `holdfast.compat.orbax.<name>` of covered names; all others are refused."""
    module = ModuleType(f"{FACE}.{name}", "Stands for a module of Orbax's.")
    vars(module).update(names, __getattr__=refusing(module.__name__, reason))
    if not names:
        vars(module)["__holdfast_refusal__"] = reason
    sys.modules[module.__name__] = module
    return module
