"""What the saves of a life hold, by their numbers, and what a restore of them has to return."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from holdfast.checkpoint import SAVED, Files, Json

from .settings import Settings

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Pair(NamedTuple):
    """A class that is no plain container."""

    left: Any
    right: Any


class Counter:
    """A data iterator."""

    def __init__(self, position: int = 0) -> None:
        self.position = position

    def get_state(self) -> dict[str, int]:
        return {"position": self.position}

    def set_state(self, state: dict[str, int]) -> None:
        self.position = state["position"]


# --- What is saved


@functools.lru_cache(maxsize=512)
def items_of(settings: Settings, number: int, rank: int) -> dict[str, Any]:
    """Returns what a process saves."""
    return new_items_of(settings, number, rank)


def new_items_of(settings: Settings, number: int, rank: int) -> dict[str, Any]:
    """Returns what a process saves, which nobody else has."""
    tree = _placed(_tree(settings, number, rank), settings)
    match settings.items:
        case "two":
            return {
                "state": tree,
                "ema": {"w": np.full((4, 3), number, np.float32), "step": number},
            }
        case "json":
            return {
                "state": tree,
                "config": Json({"lr": number / 7, "names": ["a", None]}),
            }
        case "files" | "empty folder":
            write = functools.partial(_write_files, _files(settings, number))
            return {"state": tree, "tokenizer": Files(write)}
        case "iterator":
            return {"state": tree, "data": Counter(number + rank)}
        case "values":
            return {"state": {"step": number, "name": f"save {number}", "rate": number / 3}}
        case "empty":
            return {
                "state": {"none": np.zeros((0, 3), np.float32), "step": number},
                "void": {},
            }
    return {"state": tree}


def _tree(settings: Settings, number: int, rank: int) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    tree = {
        "base": np.arange(96, dtype=np.float32).reshape(8, 12),
        "w": rng.standard_normal((8, 4)).astype(np.float32),
        "half": rng.standard_normal(5).astype(BFLOAT16),
        "counts": rng.integers(-100, 100, 9, dtype=np.int8),
        "flags": rng.integers(0, 2, 7).astype(bool),
        "nothing": np.zeros((0, 3), np.float16),
        "point": np.asarray(rng.standard_normal()),
        "nested": [{"x": np.full(3, number, np.int32)}, (None, {}), []],
        "pair": Pair(np.full((2, 2), number, np.float64), number),
        "step": number,
        "name": f"save {number}",
        "rate": number / 3,
        "is_odd": number % 2 == 1,
    }
    if settings.per_process:
        tree["own"] = np.arange(4, dtype=np.int32) + 100 * rank + number
    return tree


def is_own(path: str) -> bool:
    """Says of a leaf's path whether each process keeps its own."""
    return path == "own"


def write_over(items: Any) -> None:
    """Writes over the memory of all arrays, as who has it beside jax may."""
    for leaf in jax.tree.leaves(items):
        if isinstance(leaf, np.ndarray):
            leaf.fill(0)
        elif isinstance(leaf, jax.Array):
            for shard in leaf.addressable_shards:
                ctypes.memset(shard.data.unsafe_buffer_pointer(), 0, shard.data.nbytes)


# --- Where arrays lie


@functools.cache
def sharding(devices: int, memory: str | None = None) -> NamedSharding:
    """Returns a sharding of the first axis over so many devices, in a kind of memory of theirs."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("d",))
    return NamedSharding(mesh, PartitionSpec("d"), memory_kind=memory)


def _placed(tree: Any, settings: Settings, devices: int | None = None) -> Any:
    """Returns the tree with its arrays where the settings have them, or on so many devices."""
    if settings.arrays == "numpy" and devices is None:
        return tree
    default = 2 if settings.arrays == "sharded" else 1
    spread = min(devices or default, jax.device_count())

    def place(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray) or path[0] == jax.tree_util.DictKey("own"):
            return leaf
        if leaf.dtype == np.float64:
            # jax has none. A reader does not ask for another dtype than there is.
            if devices is not None:
                return leaf
            leaf = leaf.astype(np.float32)
        fits = leaf.ndim > 0 and leaf.shape[0] % spread == 0
        memory = "pinned_host" if settings.arrays == "pinned" and devices is None else None
        return jax.device_put(leaf, sharding(spread, memory) if fits else None)

    return jax.tree_util.tree_map_with_path(place, tree)


# --- Casts at save

CASTS: dict[str, Any] = {
    "as it is": None,
    "bfloat16": BFLOAT16,
    "by path": lambda path: np.float16 if path in ("w", "pair.left") else None,
}


def _cast(tree: Any, settings: Settings) -> Any:
    """Returns the tree as a save casts it."""

    def cast(path: str, leaf: Any) -> Any:
        floating = hasattr(leaf, "dtype") and (leaf.dtype.kind == "f" or leaf.dtype == BFLOAT16)
        wanted = CASTS[settings.dtype]
        if callable(wanted) and not isinstance(wanted, type | np.dtype):
            wanted = wanted(path)
        return leaf.astype(wanted) if floating and wanted is not None else leaf

    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: cast(jax.tree_util.keystr(path, simple=True, separator="."), leaf),
        tree,
    )


# --- How it is read, and what has to come back


class Reading(NamedTuple):
    """The `like` of an item, what a restore with it returns, and the words of that restore."""

    like: Any
    expected: Any
    words: Mapping[str, Any] = {}


def reading_of(settings: Settings, item: str, number: int, rank: int) -> Reading:
    """Returns how a process reads an item of a save."""
    saved = items_of(settings, number, rank)[item]
    if isinstance(saved, Json):
        return Reading(None, saved.value)
    if isinstance(saved, Counter):
        return Reading(Counter(), saved)
    if isinstance(saved, Files):
        return Reading(Files(read=_read_files), _files(settings, number))
    blank = items_of(settings, 0, rank)[item]
    return READINGS[settings.read](settings, blank, saved)


def _like(settings: Settings, blank: Any, saved: Any) -> Reading:
    return Reading(_cast(blank, settings), _cast(saved, settings))


def _nothing(settings: Settings, blank: Any, saved: Any) -> Reading:
    return Reading(None, _on_host(_cast(saved, settings)), {"types": (Pair,)})


def _plain(settings: Settings, blank: Any, saved: Any) -> Reading:
    expected = _on_host(_cast(saved, settings))
    if "pair" in expected:
        expected |= {"pair": expected["pair"]._asdict()}
    return Reading(None, expected, {"plain": True})


def _saved(settings: Settings, blank: Any, saved: Any) -> Reading:
    return Reading(SAVED, _cast(saved, settings), {"types": (Pair,)})


def _mesh(settings: Settings, blank: Any, saved: Any) -> Reading:
    four = functools.partial(_placed, settings=settings, devices=4)
    return Reading(four(_cast(blank, settings)), four(_cast(saved, settings)))


def _partial(settings: Settings, blank: Any, saved: Any) -> Reading:
    some = [key for key in saved if key in ("w", "step", "own", "pair")]
    like = {key: blank[key] for key in some}
    expected = {key: saved[key] for key in some}
    return Reading(_cast(like, settings), _cast(expected, settings), {"partial": True})


def _rename(settings: Settings, blank: Any, saved: Any) -> Reading:
    def renamed(tree: Any) -> Any:
        return {{"step": "at"}.get(key, key): value for key, value in tree.items()}

    like = renamed(_cast(blank, settings))
    return Reading(like, renamed(_cast(saved, settings)), {"rename": {"step": "at"}})


def _widened(settings: Settings, blank: Any, saved: Any) -> Reading:
    def back(cast: Any, leaf: Any) -> Any:
        if isinstance(leaf, jax.Array):
            return jax.device_put(cast.astype(leaf.dtype), leaf.sharding)
        return cast.astype(leaf.dtype) if hasattr(leaf, "dtype") else cast

    expected = jax.tree.map(back, _cast(saved, settings), saved)
    return Reading(blank, expected, {"cast": True})


READINGS: dict[str, Callable[[Settings, Any, Any], Reading]] = {
    "like": _like,
    "nothing": _nothing,
    "plain": _plain,
    "saved": _saved,
    "mesh": _mesh,
    "partial": _partial,
    "rename": _rename,
    "cast": _widened,
}


def _on_host(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: np.asarray(leaf) if hasattr(leaf, "dtype") else leaf, tree)


# --- Files


def _files(settings: Settings, number: int) -> dict[str, bytes | None]:
    """Returns what an item of files holds, by name; None is a folder."""
    files = {"deep": None, "deep/vocabulary": b"w" * number, "merges": b"m\0"}
    return files | ({"hollow": None} if settings.items == "empty folder" else {})


def _write_files(files: Mapping[str, bytes | None], folder: Path) -> None:
    for name, data in files.items():
        if data is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(data)


def _read_files(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }


# --- Bit by bit


def differs(expected: Any, found: Any, where: str = "it") -> str:
    """Returns where two values differ, in types or to the bit; "" where nowhere."""
    if isinstance(expected, Counter):
        is_same = isinstance(found, Counter) and found.position == expected.position
        return "" if is_same else f"{where} is at {found!r}"
    if isinstance(expected, jax.Array | np.ndarray):
        return _array_differs(expected, found, where)
    if type(found) is not type(expected):
        return f"{where} is a {type(found).__name__}, not a {type(expected).__name__}"
    if isinstance(expected, dict):
        if list(expected) != list(found) and set(expected) != set(found):
            return f"{where} has {list(found)}, not {list(expected)}"
        parts = [(expected[key], found[key], f"{where}[{key!r}]") for key in expected]
    elif isinstance(expected, list | tuple):
        if len(expected) != len(found):
            return f"{where} has {len(found)} elements, not {len(expected)}"
        together = enumerate(zip(expected, found, strict=True))
        parts = [(*pair, f"{where}[{place}]") for place, pair in together]
    else:
        return "" if expected == found else f"{where} is {found!r}, not {expected!r}"
    return next(filter(None, (differs(*part) for part in parts)), "")


def _array_differs(expected: Any, found: Any, where: str) -> str:
    for kind in (jax.Array, np.ndarray):
        if isinstance(expected, kind) != isinstance(found, kind):
            return f"{where} is a {type(found).__name__}, not a {type(expected).__name__}"
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return f"{where} is {found.dtype}{found.shape}, not {expected.dtype}{expected.shape}"
    if np.asarray(found).tobytes() != np.asarray(expected).tobytes():
        return f"{where} has other bits: {found}, not {expected}"
    if isinstance(expected, jax.Array) and not _lie_alike(expected.sharding, found, expected.ndim):
        return f"{where} lies at {found.sharding}, not {expected.sharding}"
    return ""


def _lie_alike(expected: Any, found: Any, axes: int) -> bool:
    is_there = found.sharding.is_equivalent_to(expected, axes)
    return is_there and found.sharding.memory_kind == expected.memory_kind
