"""Seeded hostile records: any place of a record is changed, and its checksum made to fit.

What comes back of such a record is whatever it says now, or a typed error: never another error,
never a file outside of the folders, never more memory or time than is there.
"""

from __future__ import annotations

import contextlib
import copy
import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

from holdfast.checkpoint import (
    SAVED,
    CheckpointError,
    CheckpointManager,
    Files,
    Json,
    Options,
    load,
    structure,
    verify,
)
from holdfast.cli.entry import main

from .test_hostile import seal

ODD: tuple[Any, ...] = (
    None,
    True,
    0,
    1,
    -1,
    1 << 31,
    1 << 63,
    10**4000,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "0",
    "..",
    "../x",
    "/tmp/x",
    "a/b",
    "\x00",
    "\ud800",
    "x" * 100_000,
    [],
    {},
    [[]],
    [None],
    [-1, 2],
    {"": 0},
    {"kind": "array"},
)


COMMANDS = tuple(
    tuple(line.split())
    for line in (
        "ls ROOT",
        "show STEP",
        "verify STEP",
        "diff STEP STEP",
        "cp STEP TO",
        "cp ROOT TO",
        "convert STEP TO --to safetensors",
        "convert STEP TO --to orbax",
        "convert STEP TO --to holdfast",
        "prune ROOT --keep-last 1 --dry-run",
        "sweep ROOT",
    )
)


class Pair(NamedTuple):
    first: Any
    second: Any


def a_tree() -> dict[str, Any]:
    return {
        "w": jnp.arange(24.0).reshape(4, 6),
        "half": np.arange(6, dtype=np.float16),
        "key": jax.random.key(7),
        "pair": Pair([1, 2.5, True], ("text", b"bytes", 1 + 2j)),
        "none": None,
        "empty": {},
        "scalar": np.float32(3),
    }


def a_root(folder: Path) -> Path:
    """Makes an incremental root of two steps: a tree, JSON, files. Returns the newer folder."""
    options = Options(incremental=True)
    with CheckpointManager(folder / "root", options=options) as manager:
        for step in range(2):
            items = {
                "state": a_tree() | {"step": step},
                "position": Json({"epoch": step, "seen": [1, 2]}),
                "files": Files(lambda own: (own / "note.txt").write_text("a note")),
            }
            manager.save(step, items=items)
        manager.wait_until_finished()
    return folder / "root" / "1"


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields each place of a JSON value, as what holds it and its key there."""
    keys: Any = ()
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = range(len(value))
    for key in keys:
        yield value, key
        yield from places(value[key])


def change(record: dict[str, Any], chance: random.Random) -> str:
    """Changes one place of a record, or two. Returns what was done."""
    done = []
    for _ in range(chance.choice((1, 1, 2))):
        holder, key = chance.choice(list(places(record)))
        how = chance.choice(("odd", "odd", "odd", "drop", "other", "twice"))
        if how == "odd":
            holder[key] = chance.choice(ODD)
        elif how == "drop":
            del holder[key]
        elif how == "other":
            source, at = chance.choice(list(places(record)))
            holder[key] = copy.deepcopy(source[at])
        elif isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        else:
            holder[f"{key}2"] = copy.deepcopy(holder[key])
        done.append(f"{how} at {key!r}")
    return ", ".join(done)


def run(command: Sequence[str], root: Path, elsewhere: Path) -> None:
    """Runs a command of `holdfast`; raises what it did not answer itself."""
    named = {"ROOT": str(root), "STEP": str(root / "1"), "TO": str(elsewhere / "to")}
    ended = CliRunner().invoke(main, [named.get(word, word) for word in command])
    if ended.exception is not None and not isinstance(ended.exception, SystemExit):
        raise ended.exception


def reads(folder: Path, elsewhere: Path) -> dict[str, Callable[[], Any]]:
    """Returns the ways to read a step whose folder is `folder`."""
    root = folder.parent
    like = {"w": jax.ShapeDtypeStruct((4, 6), jnp.float32), "step": 0}

    def restored() -> None:
        with CheckpointManager(root, options=Options(read_only=True)) as manager:
            manager.restore(1, like, partial=True)

    def newest() -> None:
        with CheckpointManager(root, options=Options(read_only=True)) as manager:
            manager.restore(fallback=True)

    def next_save() -> None:
        shutil.copytree(root, elsewhere / "saved")
        with CheckpointManager(elsewhere / "saved", options=Options(incremental=True)) as manager:
            manager.save(2, a_tree() | {"step": 2})
            manager.wait_until_finished()

    return {
        "load": lambda: load(folder),
        "load SAVED": lambda: load(folder, SAVED),
        "load alike": lambda: load(folder, like, partial=True),
        "restore": restored,
        "newest": newest,
        "structure": lambda: repr(structure(root, 1)),
        "verify": lambda: verify(root),
        "save": next_save,
    } | {
        " ".join(command): lambda command=command: run(command, root, elsewhere)
        for command in COMMANDS
    }


def wrong_of(folder: Path, elsewhere: Path) -> list[str]:
    """Reads a hostile record in every way. Returns what was neither an answer nor typed."""
    wrong = []
    for name, read in reads(folder, elsewhere).items():
        elsewhere.mkdir()
        try:
            with contextlib.suppress(CheckpointError):
                read()
        except BaseException as error:  # whatever it is, it is what is looked for
            wrong.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
        shutil.rmtree(elsewhere)
    return wrong


def names_around(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def campaign(folder: Path, seeds: range) -> list[str]:
    step = a_root(folder)
    record = json.loads((step / "checkpoint.json").read_text())
    before = names_around(folder)
    wrong = []
    for seed in seeds:
        changed = copy.deepcopy(record)
        done = change(changed, random.Random(seed))
        seal(step, changed)
        found = wrong_of(step, folder / "elsewhere")
        wrong += [f"seed {seed} ({done}): {line}" for line in found]
        after = names_around(folder)
        if after != before:
            wrong.append(f"seed {seed} ({done}): left {after ^ before}")
            before = after
    return wrong


def test_hostile_records_are_answers_or_typed(tmp_path: Path) -> None:
    """30 records with one or two odd places: read in every way, each is an answer or typed."""
    assert campaign(tmp_path, range(30)) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", range(5))
def test_hostile_records_by_seed(block: int, tmp_path: Path) -> None:
    """1,500 records, 300 a block, each read in 17 ways."""
    assert campaign(tmp_path, range(300 * block, 300 * (block + 1))) == []
