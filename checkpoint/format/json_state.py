"""Items that are no trees of arrays: JSON values, and the states of data iterators.

An iterator has one state a process. What JSON lacks in it becomes an object with one member, whose
name begins with `$`; never a pickle.
"""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from ..errors import CheckpointError, UnsupportedLeaf


@dataclass(frozen=True)
class Json:
    """Marks an item of `save(items=...)` as JSON: `Json({"learning_rate": 1e-3})`.

    A restore returns the value itself.
    In a group it is one value, equal on all processes, and the primary writes it; with
    `per_process` each process writes its own and gets it back, on as many processes as saved;
    `restore(..., process=i)` gives that of another.
    """

    value: Any
    per_process: bool = False


@runtime_checkable
class _Stateful(Protocol):
    def get_state(self) -> Any: ...
    def set_state(self, state: Any) -> Any: ...


@runtime_checkable
class _StateDict(Protocol):
    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


def is_iterator(value: Any) -> bool:
    """Returns whether an item is a data iterator: it has a state, and is no tree of jax."""
    if not isinstance(value, _Stateful | _StateDict) or isinstance(value, type):
        return False
    return bool(jax.tree_util.all_leaves([value]))


def is_tree(value: Any) -> bool:
    """Returns whether an item is a tree: no JSON and no iterator."""
    return not isinstance(value, Json) and not is_iterator(value)


def state_of(item: str, value: Any) -> Any:
    """Returns the state of an iterator, as JSON types; raises UnsupportedLeaf as `encode`."""
    state = value.get_state() if isinstance(value, _Stateful) else value.state_dict()
    return encode(state, item)


def give_state(value: Any, state: Any) -> Any:
    """Gives a saved state back to an iterator; returns the iterator."""
    if isinstance(value, _Stateful):
        value.set_state(decode(state))
    else:
        value.load_state_dict(decode(state))
    return value


def encode(value: Any, path: str) -> Any:
    """Returns `value` as JSON types. Raises UnsupportedLeaf, whose message begins with `path`."""
    if type(value) is float and not math.isfinite(value):
        return {"$float": repr(value)}  # JSON has no such number
    if value is None or isinstance(value, bool | str) or type(value) in (int, float):
        return value
    if isinstance(value, bytes | bytearray):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return {"$array": _encode_array(value, path)}
    if isinstance(value, list | tuple):
        encoded = [encode(element, f"{path}[{index}]") for index, element in enumerate(value)]
        return encoded if isinstance(value, list) else {"$tuple": encoded}
    if isinstance(value, dict):
        return _encode_dict(value, path)
    raise _unsupported(path, value)


def _encode_array(value: Any, path: str) -> list[Any]:
    array = np.asarray(value)
    if array.dtype.hasobject:
        raise _unsupported(path, value)
    data = base64.b64encode(array.tobytes()).decode()
    return [array.dtype.name, list(array.shape), data, isinstance(value, np.generic)]


def _encode_dict(value: dict[Any, Any], path: str) -> Any:
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: encode(member, f"{path}.{key}") for key, member in value.items()}
    pairs = [
        [encode(key, f"{path} (key)"), encode(member, f"{path}.{key}")]
        for key, member in value.items()
    ]
    return {"$dict": pairs}


def decode(value: Any) -> Any:
    """Reverses `encode`. Raises CheckpointError for a value that `encode` does not make."""
    if isinstance(value, list):
        return [decode(element) for element in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value), "")
    if not kind.startswith("$"):
        return {key: decode(member) for key, member in value.items()}
    try:
        return _DECODERS[kind](value[kind])
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"an iterator's state holds {kind!r}, which does not read: {error}"
        ) from error


def _decode_array(fields: Any) -> Any:
    name, shape, data, scalar = fields
    array = np.frombuffer(base64.b64decode(data), dtype=jax.numpy.dtype(name)).reshape(shape).copy()
    return array[()] if scalar else array


_DECODERS: dict[str, Any] = {
    "$bytes": base64.b64decode,
    "$array": _decode_array,
    "$float": float,
    "$tuple": lambda elements: tuple(decode(element) for element in elements),
    "$dict": lambda pairs: {decode(key): decode(member) for key, member in pairs},
}


def _unsupported(path: str, value: Any) -> UnsupportedLeaf:
    return UnsupportedLeaf(
        f"{path} is a {type(value).__name__}, which a JSON item cannot hold; expected JSON types,"
        " bytes, tuples, numpy arrays or numbers",
        leaf=path,
        found=type(value).__name__,
    )
