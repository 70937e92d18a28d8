"""Limits of readers, which writers check too: what no reader takes is never written."""

from __future__ import annotations

import json
import operator
import re
from typing import Any

STEP_LIMIT = 10**18
# of a JSON item, of a user's metadata, and of a tree's Python values
JSON_LIMIT_BYTES = 100_000_000
JSON_DEPTH = 200  # of lists and objects within each other, as of trees: JSON parsers recurse
HEADER_LIMIT_BYTES = 100_000_000  # of a pack, as in the safetensors library
RECORD_LIMIT_BYTES = 256 << 20
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

    Raises ValueError for a name that could not be a folder in every store.
    """
    if not isinstance(name, str) or not ITEM_NAME.fullmatch(name):
        raise ValueError(
            f"an item cannot be called {name!r}: expected 1 to 100 ASCII letters, digits, '_', '.'"
            " and '-', the first of them a letter, a digit or '_'"
        )
    return name


def encode_json(value: Any, what: str) -> bytes:
    """Returns a user's value as JSON; `what` names the value in errors.

    Raises TypeError or ValueError for what no JSON reader would take back.
    """
    _check_depth(value, what)
    try:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
        data = text.encode()
    except UnicodeEncodeError as error:
        part = error.object[error.start : error.end]
        message = f"{what} cannot be saved as JSON: a string in it is not valid UTF-8: {part!r}"
        raise ValueError(message) from error
    except (TypeError, ValueError, RecursionError) as error:
        raise type(error)(f"{what} cannot be saved as JSON: {error}") from error
    if len(data) > JSON_LIMIT_BYTES:
        raise ValueError(
            f"{what} has {len(data):,} bytes as JSON, a reader takes {JSON_LIMIT_BYTES:,}; put"
            " large values into an array"
        )
    return data


def _check_depth(value: Any, what: str) -> None:
    """Raises ValueError for a value that is nested too deep, or that holds itself."""
    level = _containers([value])
    for _ in range(JSON_DEPTH):
        if not level:
            return
        # By identity: a value that holds itself several times would double with each level.
        distinct = {id(node): node for node in level}
        level = [child for node in distinct.values() for child in _containers(node)]
    if level:
        raise ValueError(
            f"{what} cannot be saved as JSON: it is nested deeper than {JSON_DEPTH}, or holds"
            " itself; flatten it"
        )


def _containers(node: Any) -> list[Any]:
    """Returns the lists and objects that a list or an object holds."""
    children = node.values() if isinstance(node, dict) else node
    return [child for child in children if isinstance(child, list | tuple | dict)]


def copy_json(value: Any, what: str) -> Any:
    """Returns a copy of a user's value, as a reader will have it; raises as `encode_json`."""
    return json.loads(encode_json(value, what))
