"""Items that are no trees of arrays: JSON values, and the states of data iterators.

An iterator has one state a process. What JSON lacks in it becomes an object with one member, whose
name begins with `$`; never a pickle.
"""

from __future__ import annotations

import base64
import collections
import json
import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import ml_dtypes
import numpy as np

from ..arrays.dtypes import Dtype, HostArray, as_weak
from ..arrays.jax_settings import own_settings
from ..errors import CheckpointError, UnsupportedLeaf
from .limits import MALFORMED, shown
from .tree import type_name

_MOST_BITS = 10_000  # of an int that every Python writes and reads as a decimal number
_OF = "$of"  # the member that says of which class a value is, where its first member does not
_SCALARS = (type(None), bool, int, float, bytes, bytearray)


@dataclass(frozen=True)
class Json:
    """Marks an item of `save(items=...)` as JSON: `Json({"learning_rate": 1e-3})`.

    A restore returns the value itself, as JSON has it: a tuple as a list, a number of numpy's as
    Python's. Keys are text.
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
    """Returns the state of an iterator, as JSON types; raises UnsupportedLeaf as `encode`, and
    ValueError for one that holds itself.
    """
    state = value.get_state() if isinstance(value, _Stateful) else value.state_dict()
    try:
        return encode(state, item)
    except RecursionError:
        raise ValueError(
            f"the state of {item!r} is nested too deep, or holds itself; flatten it"
        ) from None


@dataclass(frozen=True)
class State:
    """A state that was read, and that its iterator is to have once all else of a restore is
    there.
    """

    value: Any

    def give(self, iterator: Any) -> Any:
        """Gives the state to an iterator; returns the iterator."""
        if isinstance(iterator, _Stateful):
            iterator.set_state(self.value)
        else:
            iterator.load_state_dict(self.value)
        return iterator


def encode(value: Any, path: str) -> Any:
    """Returns `value` as JSON types, of which `decode` makes an equal value of the same type.

    Raises UnsupportedLeaf, whose message begins with `path`, for a value of any other type.
    """
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return _encode_array(value, path)
    # By the class itself: one that is derived from it would come back as something else.
    kind = type(value)
    if kind in (list, tuple):
        encoded = [encode(element, f"{path}[{index}]") for index, element in enumerate(value)]
        return encoded if kind is list else {"$tuple": encoded}
    if kind in (dict, collections.OrderedDict):
        return _encode_dict(value, path)
    if kind is str:
        return _encode_text(value, path)
    if kind in _SCALARS:
        return _encode_scalar(value)
    raise _unsupported(path, value)


def _encode_scalar(value: Any) -> Any:
    match value:
        case None | bool():
            return value
        case int():
            return value if value.bit_length() <= _MOST_BITS else {"$int": hex(value)}
        case float():
            return value if math.isfinite(value) else {"$float": repr(value)}
    data = {"$bytes": base64.b64encode(value).decode()}
    return data if type(value) is bytes else data | {_OF: "bytearray"}


def _encode_text(value: str, path: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UnsupportedLeaf(
            f"{path} is the text {value!r:.100}, which is not valid UTF-8; save its bytes",
            leaf=path,
            found="str",
        ) from None
    return value


def _encode_array(value: Any, path: str) -> dict[str, Any]:
    """Returns an array, or a scalar, of numpy's or of jax's, with what has its dtype in it."""
    array = _as_numpy(value, path)
    dtype = _encode_dtype(array.dtype)
    if dtype is None:
        raise _unsupported(path, value, f" of dtype {array.dtype}")
    data = base64.b64encode(array.tobytes()).decode()
    encoded: dict[str, Any] = {
        "$array": [dtype, list(array.shape), data, isinstance(value, np.generic)]
    }
    if isinstance(value, jax.Array):
        encoded[_OF] = "weak jax.Array" if value.weak_type else "jax.Array"
    return encoded


def _as_numpy(value: Any, path: str) -> HostArray:
    if isinstance(value, np.ndarray) and type(value) not in (np.ndarray, np.memmap):
        # Other classes have more than their data: a mask, names of fields.
        raise _unsupported(path, value)
    try:
        with own_settings():
            return np.asarray(value)
    except (TypeError, RuntimeError) as error:
        raise UnsupportedLeaf(
            f"{path} is an array of jax's that numpy cannot have: {error}; leave it out, or save"
            " the data of a key (jax.random.key_data)",
            leaf=path,
            found=type(value).__name__,
        ) from error


def _encode_dtype(dtype: Dtype) -> Any:
    """Returns a dtype as a text, or one with fields as a list of them, as npy files have it; None
    for one that it does not describe.
    """
    if dtype.isnative and (dtype.kind in "biufc" or dtype.name in vars(ml_dtypes)):
        return dtype.name
    if dtype.hasobject:
        return None
    try:
        described = np.lib.format.dtype_to_descr(dtype)
        # A dtype of ml_dtypes within fields would become bytes.
        is_whole = _decode_dtype(json.loads(json.dumps(described))) == dtype
    except ValueError:  # fields that overlap, or in another order than they lie
        return None
    return described if is_whole else None


def _decode_dtype(described: Any) -> Dtype:
    if isinstance(described, str):
        return jax.numpy.dtype(described)
    return np.lib.format.descr_to_dtype(_as_fields(described))


def _as_fields(described: Any) -> Any:
    """Returns fields as numpy takes them: JSON has no tuples."""
    if isinstance(described, str):
        return described
    return [
        (tuple(name) if isinstance(name, list) else name, _as_fields(kind), *map(tuple, shape))
        for name, kind, *shape in described
    ]


def _encode_dict(value: dict[Any, Any], path: str) -> Any:
    if type(value) is collections.OrderedDict:
        return {"$dict": _encode_pairs(value, path), _OF: "OrderedDict"}
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {
            _encode_text(key, f"{path} (key)"): encode(member, f"{path}.{key}")
            for key, member in value.items()
        }
    return {"$dict": _encode_pairs(value, path)}


def _encode_pairs(value: dict[Any, Any], path: str) -> list[Any]:
    return [
        [
            encode(key, f"{path} (key)"),
            encode(member, f"{path}.{key if type(key) is str else shown(key)}"),
        ]
        for key, member in value.items()
    ]


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
        decoded = _DECODERS[kind](value[kind])
        return _CONVERTERS[value[_OF]](decoded) if _OF in value else decoded
    except MALFORMED as error:
        raise CheckpointError(
            f"an iterator's state holds {kind!r}, which does not read: {error}"
        ) from error


def _decode_array(fields: Any) -> Any:
    described, shape, data, scalar = fields
    values = np.frombuffer(base64.b64decode(data), dtype=_decode_dtype(described))
    array = values.reshape(shape).copy()
    return array[()] if scalar else array


def _to_jax(array: HostArray) -> jax.Array:
    if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
        raise ValueError(f"an array of {array.dtype}, which jax has only with jax_enable_x64")
    with own_settings():
        return jax.numpy.asarray(array)


_DECODERS: dict[str, Any] = {
    "$bytes": base64.b64decode,
    "$array": _decode_array,
    "$int": lambda text: int(text, 16),
    "$float": float,
    "$tuple": lambda elements: tuple(decode(element) for element in elements),
    "$dict": lambda pairs: {decode(key): decode(member) for key, member in pairs},
}
# By what `_OF` says. Older readers pass over it.
_CONVERTERS: dict[str, Any] = {
    "bytearray": bytearray,
    "OrderedDict": collections.OrderedDict,
    "jax.Array": _to_jax,
    "weak jax.Array": lambda array: as_weak(_to_jax(array)),
}


def _unsupported(path: str, value: Any, more: str = "") -> UnsupportedLeaf:
    name = type_name(type(value)).removeprefix("builtins:")
    return UnsupportedLeaf(
        f"{path} is a {name}{more}, which the state of an iterator cannot hold; expected None,"
        " numbers, texts, bytes, lists, tuples, dicts and arrays of numpy or jax, of no class of"
        " one's own",
        leaf=path,
        found=name,
    )
