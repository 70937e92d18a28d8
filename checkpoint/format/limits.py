"""Limits of readers, which writers check too: what no reader takes is never written."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..storage.tombstone import RECORD_NAME

STEP_LIMIT = 10**18
# of a JSON item, of a user's metadata, and of a tree's Python values
JSON_LIMIT_BYTES = 100_000_000
JSON_DEPTH = 200  # of lists and objects within each other, as of trees: JSON parsers recurse
HEADER_LIMIT_BYTES = 100_000_000  # of a pack, as in the safetensors library
RECORD_LIMIT_BYTES = 256 << 20
# What Python raises where a text is not of the shape that is expected. SyntaxError: of a dtype.
# No error of ours is among them.
MALFORMED = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
    SyntaxError,
)
ITEM_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


def check_step(step: Any) -> int:
    """Returns the step as an int.

    Raises TypeError for what is no whole number, ValueError for one out of range.
    """
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        found = f"expected a whole number, found a {type(step).__name__}"
        if isinstance(step, bool | float | str):
            raise TypeError(f"step {step!r}: {found}")
        raise TypeError(f"step: {found}; the step comes first, as in save(step, tree)")
    number = operator.index(step)
    if not 0 <= number < STEP_LIMIT:
        raise ValueError(f"step {number}: expected 0 to 10**18 - 1")
    return number


def is_step(step: Any) -> bool:
    """Says whether `check_step` takes a step."""
    try:
        check_step(step)
    except (TypeError, ValueError):
        return False
    return True


def check_item_name(name: Any) -> str:
    """Returns the name of an item.

    Raises ValueError for a name that could not be a folder in every store, beside the record.
    """
    if not isinstance(name, str) or name == RECORD_NAME or not ITEM_NAME.fullmatch(name):
        raise ValueError(
            f"an item cannot be called {name!r}: expected 1 to 100 ASCII letters, digits, '_', '.'"
            " and '-', the first of them a letter, a digit or '_', and not the name of the record"
        )
    return name


def check_items(call: str, items: Any) -> dict[str, Any]:
    """Returns the items that a call was given. Raises TypeError where they are none by name."""
    if not isinstance(items, Mapping):
        raise TypeError(
            f"{call}: items={shown(items)}: expected a dict of items by their names, as in"
            " items={'state': ...}"
        )
    return dict(items)


def encode_json(value: Any, what: str) -> bytes:
    """Returns a user's value as JSON; `what` names the value in errors. Numbers of numpy are JSON's
    numbers, and tuples its lists.

    Raises TypeError or ValueError for what no JSON reader would take back, with its path.
    """
    _check_nesting(value, what)
    try:
        data = _dump(value)
    except UnicodeEncodeError as error:
        part = error.object[error.start : error.end]
        raise ValueError(
            f"{_culprit(value, what)} cannot be saved as JSON: it is not valid UTF-8: {part!r}"
        ) from error
    except (TypeError, ValueError, RecursionError) as error:
        raise type(error)(f"{_culprit(value, what)} cannot be saved as JSON: {error}") from error
    if len(data) > JSON_LIMIT_BYTES:
        raise ValueError(
            f"{what} has {len(data):,} bytes as JSON, a reader takes {JSON_LIMIT_BYTES:,}; put"
            " large values into an array"
        )
    return data


def _dump(value: Any) -> bytes:
    text = json.dumps(
        value, separators=(",", ":"), allow_nan=False, ensure_ascii=False, default=_plain_number
    )
    return text.encode()


def _plain_number(value: Any) -> bool | int | float:
    """Returns a number of numpy's as Python's. Raises TypeError for anything else."""
    number = value.item() if isinstance(value, np.generic) else None
    if isinstance(number, bool | int | float):
        return number
    raise TypeError(f"a {type(value).__name__} is none of its types")


def _culprit(value: Any, what: str) -> str:
    """Returns the path of the first part of a value that is no JSON by itself."""
    for path, part in _parts(value, what):
        if isinstance(part, list | tuple | dict):
            continue
        try:
            _dump(part)
        except (TypeError, ValueError):
            return path
    return what


def _parts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields the parts of a value with their paths, keys too."""
    yield path, value
    if isinstance(value, dict):
        for key, child in value.items():
            yield f"{path} (the key {key!r})", key
            yield from _parts(child, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, child in enumerate(value):
            yield from _parts(child, f"{path}[{index}]")


def _check_nesting(value: Any, what: str) -> None:
    """Raises ValueError for a value that is nested too deep, or that holds itself, and TypeError
    for a key that is no text: as text it could be another's.
    """
    level = _containers([value])
    for _ in range(JSON_DEPTH):
        if not level:
            return
        # By identity: a value that holds itself several times would double with each level.
        distinct = {id(node): node for node in level}
        for node in distinct.values():
            if isinstance(node, dict):
                _check_keys(node, what)
        level = [child for node in distinct.values() for child in _containers(node)]
    if level:
        raise ValueError(
            f"{what} cannot be saved as JSON: it is nested deeper than {JSON_DEPTH}, or holds"
            " itself; flatten it"
        )


def _check_keys(node: dict[Any, Any], what: str) -> None:
    for key in node:
        if not isinstance(key, str):
            raise TypeError(
                f"{what} cannot be saved as JSON: the key {shown(key)} of a dict is a"
                f" {type(key).__name__}, and JSON's keys are text; write it as text"
            )


def _containers(node: Any) -> list[Any]:
    """Returns the lists and objects that a list or an object holds."""
    children = node.values() if isinstance(node, dict) else node
    return [child for child in children if isinstance(child, list | tuple | dict)]


def copy_json(value: Any, what: str) -> Any:
    """Returns a copy of a user's value, as a reader will have it; raises as `encode_json`."""
    return json.loads(encode_json(value, what))


def check_metrics(metrics: Any) -> dict[str, float]:
    """Returns a save's metrics as plain text and floats: a reader compares them.

    Raises TypeError where they are none by name, ValueError naming the metric that is no number.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"metrics={shown(metrics)}: expected numbers by name, as in metrics={{'loss': 0.5}}"
        )
    return {_check_metric_name(name): _number(name, value) for name, value in metrics.items()}


def _check_metric_name(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(
            f"metrics has the name {shown(name)}: expected text, found a {type(name).__name__}"
        )
    try:
        return name.encode().decode()
    except UnicodeEncodeError:
        raise ValueError(f"metrics has the name {name!r}, which is not valid UTF-8") from None


def _number(name: str, value: Any) -> float:
    reason = ""
    if not isinstance(value, str | bytes):  # float() reads these too
        try:
            # An array of one number is that number only where it has no axes.
            if not getattr(value, "shape", ()):
                return float(value)
        except (TypeError, ValueError, OverflowError) as error:
            reason = f" ({error})"
    raise ValueError(
        f"metrics[{name!r}] is {shown(value)}{reason}: expected a number; what is none goes into"
        " metadata="
    )


def shown(value: Any) -> str:
    """Returns a value for a message: its `repr` up to 100 characters, or its class where it has
    none, as an int of many digits.
    """
    try:
        return f"{value!r:.100}"
    except ValueError:
        return f"a {type(value).__name__}"
