"""The settings of a life: their values, which exclude each other, and the rows that pair them."""

from __future__ import annotations

import functools
import random
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeAlias

from .covering import Cell, Row, covering_rows
from .policies import KEEP, SAVE


@dataclass(frozen=True)
class Settings:
    """How a root is used. The defaults are the plainest values."""

    store: str = "disk"
    processes: int = 1
    items: str = "state"
    arrays: str = "numpy"
    dtype: str = "as it is"
    read: str = "like"
    read_once: bool = False
    fallback: bool = False
    save_policy: str = "always"
    keep_policy: str = "all"
    incremental: str = "no"
    step_format: str | None = None
    modes: bool = False
    on_busy: str = "wait"
    per_process: bool = False
    host_memory_bytes: int | None = None
    local: int | None = None
    local_strict: bool = False
    local_sync: bool = False
    out_of_order: bool = False

    def __repr__(self) -> str:
        return shown(self)


def shown(value: Any) -> str:
    """Returns a dataclass as its call, without the arguments that are their defaults."""
    own = [
        f"{each.name}={getattr(value, each.name)!r}"
        for each in fields(value)
        if getattr(value, each.name) != each.default
    ]
    return f"{type(value).__name__}({', '.join(own)})"


DOMAINS: dict[str, tuple[Any, ...]] = {
    "store": ("disk", "faulty", "memory"),
    "processes": (1, 2, 3),
    "items": ("state", "two", "json", "files", "empty folder", "iterator", "values", "empty"),
    "arrays": ("numpy", "jax", "sharded", "pinned"),
    "dtype": ("as it is", "bfloat16", "by path"),
    "read": ("like", "nothing", "plain", "saved", "mesh", "partial", "rename", "cast"),
    "read_once": (False, True),
    "fallback": (False, True),
    "save_policy": tuple(SAVE),
    "keep_policy": tuple(KEEP),
    "incremental": ("no", "yes", "full every 2"),
    "step_format": (None, "step_{:d}", "checkpoint_{:04d}"),
    "modes": (False, True),
    "on_busy": ("wait", "skip"),
    "per_process": (False, True),
    "host_memory_bytes": (None, 100),
    "local": (None, 1, 2, 3),
    "local_strict": (False, True),
    "local_sync": (False, True),
    "out_of_order": (False, True),
}

# Values of two settings that exclude each other: (name, its values, another name, its values).
Excluded: TypeAlias = tuple[str, tuple[Any, ...], str, tuple[Any, ...]]
EXCLUDED: list[Excluded] = [
    # The processes are threads that have the same devices: no job has such shardings.
    ("processes", (2, 3), "read", ("saved",)),
    # Without a policy every call saves durably.
    ("local", (1, 2, 3), "save_policy", ("always",)),
    # A URL has no modes.
    ("modes", (True,), "store", ("faulty", "memory")),
    # An object has no second name.
    ("incremental", ("yes", "full every 2"), "store", ("memory",)),
]
# Defects that are known: each line goes with its mend.
UNMENDED: list[Excluded] = []


def agrees(one: Cell, other: Cell) -> bool:
    """Says whether two values of different settings may meet."""
    values = dict((one, other))
    return not any(
        values.get(left, values) in lefts and values.get(right, values) in rights
        for left, lefts, right, rights in (*EXCLUDED, *UNMENDED)
    )


@functools.cache
def rows() -> tuple[Settings, ...]:
    """Returns settings in which every two values meet that may."""
    return tuple(Settings(**row) for row in covering_rows(DOMAINS, agrees, seed=0))


def settings_of(seed: int) -> Settings:
    """Returns the settings of a life: those of the rows first, and then any, by chance."""
    if seed < len(rows()):
        return rows()[seed]
    rng = random.Random(f"settings {seed}")
    row: Row = {}
    for name in rng.sample(list(DOMAINS), len(DOMAINS)):
        fits = [
            value
            for value in DOMAINS[name]
            if all(agrees((name, value), other) for other in row.items())
        ]
        row[name] = rng.choice(fits)
    return Settings(**row)


def plainer(settings: Settings) -> list[Settings]:
    """Returns the settings with one value each made plain, where the rest allows it."""
    found = []
    for name, value in asdict(settings).items():
        plain = DOMAINS[name][0]
        others = [cell for cell in asdict(settings).items() if cell[0] != name]
        if value != plain and all(agrees((name, plain), other) for other in others):
            found.append(replace(settings, **{name: plain}))
    return found
