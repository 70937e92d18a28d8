"""Static data of a tree's nodes, in a canonical form of JSON types, and how two are compared. Pure.

A class that is registered without keys has its children by position; what a position means may be
said by its static data alone. In the canonical form a text, a number or None is [type, text] as
other values are, a tuple or list is {"tuple": [...]}, a dict {"dict": [[key, value], ...]} by
rising keys. What is made of anything else is null, and equal to all: a function has an address.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from .values import decode_value, encode_value

LIMIT_BYTES = 4096  # of what a record has for one node; a digest stands for more
_MAX_DEPTH = 20
_SHOWN = 200  # characters
_TYPES = (str, bytes, bool, int, float, complex)
_KINDS = {each.__name__ for each in _TYPES}
_NUMBERS = _KINDS - {"str", "bytes"}
_NONE = ["none", ""]


def canonical_static_data(value: Any) -> Any:
    """Returns the canonical form of a node's static data; null where there are none."""
    form = None if value is None else _canonical(value, 0)
    text = json.dumps(form, separators=(",", ":"))
    if len(text) <= LIMIT_BYTES:
        return form
    return {"sha256": hashlib.sha256(text.encode()).hexdigest()}


def _canonical(value: Any, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        return None
    if value is None:
        return _NONE
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, _TYPES):
        return list(encode_value(_plain(value)))
    if isinstance(value, tuple | list):
        return {"tuple": [_canonical(each, depth + 1) for each in value]}
    if not isinstance(value, dict):
        return None
    pairs = [[_canonical(key, depth + 1), _canonical(value[key], depth + 1)] for key in list(value)]
    if any(key is None for key, _ in pairs):
        return None
    return {"dict": sorted(pairs, key=lambda pair: json.dumps(pair[0]))}


def _plain(value: Any) -> Any:
    """Returns the number or text that a value of a derived class is, as an enum's is."""
    base: Any = next(base for base in _TYPES if isinstance(value, base))
    return str.__str__(value) if base is str else base.__new__(base, value)


def are_alike(one: Any, other: Any) -> bool:
    """Says whether two canonical forms are of equal static data, as far as is known."""
    if one is None or other is None or one == other:
        return True
    match one, other:
        case [kind, _], [other_kind, _]:
            return {kind, other_kind} <= _NUMBERS and decode_value(*one) == decode_value(*other)
        case {"tuple": parts}, {"tuple": others}:
            return _are_all_alike(parts, others)
        case {"dict": pairs}, {"dict": others}:
            return len(pairs) == len(others) and all(map(_are_all_alike, pairs, others))
    return False


def _are_all_alike(parts: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(parts) == len(others) and all(map(are_alike, parts, others))


def show_static_data(form: Any) -> str:
    """Returns a canonical form for people."""
    shown = _show(form)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."


def _show(form: Any) -> str:
    match form:
        case ["none", _]:
            return "None"
        case [kind, text]:
            return repr(decode_value(kind, text))
        case {"tuple": parts}:
            return f"({', '.join(map(_show, parts))})"
        case {"dict": pairs}:
            return "{" + ", ".join(f"{_show(key)}: {_show(value)}" for key, value in pairs) + "}"
        case {"sha256": digest}:
            return f"data with the SHA-256 {digest[:16]}"
    return "..."


def parse_static_data(form: Any, depth: int = 0) -> Any:
    """Returns a canonical form of a record; what a later version may have put there is null.

    Raises ValueError for a form of this version that its writer does not make.
    """
    below = functools.partial(parse_static_data, depth=depth + 1)
    match form:
        case ["none", ""]:
            return form
        case [str(kind), str(text)] if kind in _KINDS:
            decode_value(kind, text)
            return form
        case {} if len(form) != 1 or depth > _MAX_DEPTH:
            return None
        case {"tuple": [*parts]}:
            return {"tuple": [below(part) for part in parts]}
        case {"dict": [*pairs]}:
            return {"dict": [[below(key), below(value)] for key, value in pairs]}
        case {"sha256": str()}:
            return form
    return None
