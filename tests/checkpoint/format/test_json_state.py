"""Items that are no trees: what a data iterator's state may hold, and what is taken for an
iterator.
"""

from __future__ import annotations

import collections
import enum
import json
import math
import random
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint import CheckpointError, Json, UnsupportedLeaf
from holdfast.checkpoint.format.json_state import State, decode, encode, is_iterator, state_of

LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
)
KEYS = st.text() | st.integers() | st.sampled_from(["$bytes", "$dict", "$"])
STATES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


@given(STATES)
def test_states_come_back_as_they_were(state: object) -> None:
    """Any nesting of JSON types, bytes, tuples and dicts with any keys, through JSON text, type by
    type.
    """
    back = decode(json.loads(json.dumps(encode(state, "data"))))
    assert back == state and repr(back) == repr(state)


def _there_and_back(value: object) -> Any:
    return decode(json.loads(json.dumps(encode(value, "data"))))


ARRAYS = [
    np.arange(6, dtype="i2").reshape(2, 3),
    np.float32(1.5),
    np.zeros((0, 2)),
    np.arange(3, dtype=">i4"),
    np.array([1.5, -2.0], ">f8"),
    np.array([1 + 2j], ">c8"),
    np.array(["ab", "é"]),
    np.array(["ab"], ">U2"),
    np.str_("text"),
    np.bytes_(b"bytes"),
    np.array([b"ab", b"c"]),
    np.array([b"abc"], "V3"),
    np.void(b"abc"),
    np.array([1, 2], "M8[ns]"),
    np.timedelta64(3, "s"),
    np.array([(1, 2.5)], [("a", "<i4"), ("b", ">f8")]),
    np.array([(1, 2.5)], [("a", "<i4"), ("b", ">f8")])[0],
    np.zeros(2, [("a", "<i2", (2,)), ("b", [("c", "S2")])]),
    np.ones(2, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    np.array([1.5], np.longdouble),
    np.array([3, -4], jnp.int4),
    np.arange(6)[::-2],
]


@pytest.mark.parametrize("value", ARRAYS, ids=repr)
def test_arrays_in_a_state(value: Any) -> None:
    """Arrays and scalars of numpy come back with their numbers, dtype, byte order and shape."""
    back = _there_and_back(value)
    assert type(back) is type(value)
    assert back.dtype == value.dtype
    assert np.array_equal(back, value)
    assert not isinstance(back, np.ndarray) or back.flags.writeable


def test_arrays_of_jax_in_a_state() -> None:
    """They come back as arrays of jax, weak where they were."""
    for value in (jnp.ones(3, jnp.bfloat16), jnp.asarray(1.5), jnp.int8(3), jnp.zeros((0, 2))):
        back = _there_and_back(value)
        assert isinstance(back, jax.Array)
        assert back.aval == value.aval
        assert np.array_equal(back, value)


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        -0.0,
        10**5000,
        -(2**63),
        bytearray(b"ab"),
        collections.OrderedDict(b=1, a=bytearray()),
        random.Random(1).getstate(),
        np.random.PCG64(1).state,
        {True: 1, None: 2, (1, "a"): 3, "$of": 4, np.int8(3): 5},
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_of_the_standard_library_in_a_state(value: Any) -> None:
    """They come back of the same types, to the last bit."""
    back = _there_and_back(value)
    assert type(back) is type(value)
    assert back == value or back != back
    if not isinstance(value, int):
        assert repr(back) == repr(value)


class _Point(NamedTuple):
    x: int


class _Mode(enum.StrEnum):
    FAST = "fast"


REFUSED = {
    "set": {2},
    "Counter": collections.Counter("a"),
    "defaultdict": collections.defaultdict(int),
    "_Point": _Point(1),
    "_Mode": _Mode.FAST,
    "MaskedArray": np.ma.masked_array([1, 2], [True, False]),
    "recarray": np.zeros(1, [("a", "i4")]).view(np.recarray),
    "ndarray of dtype object": np.array([object()]),
    "ndarray of dtype": np.zeros(1, [("a", jnp.bfloat16)]),
    "ndarray of dtype .*offsets": np.zeros(
        1, {"names": ["b", "a"], "formats": ["i4", "i2"], "offsets": [4, 0]}
    ),
    "complex": 1j,
    "memoryview": memoryview(b"a"),
    "PRNGKeyArray|array of jax": jax.random.key(0),
    "not valid UTF-8": "\ud800",
}


@pytest.mark.parametrize("found", REFUSED)
def test_what_cannot_be_saved_is_named(found: str) -> None:
    """The path and the type of what would come back as something else; never a pickle."""
    with pytest.raises(UnsupportedLeaf, match=rf"^data\.a\[1\] is .*({found})") as raised:
        encode({"a": [1, REFUSED[found]]}, "data")
    assert raised.value.leaf == "data.a[1]"


def test_keys_that_cannot_be_saved_are_named() -> None:
    """As values are."""
    with pytest.raises(UnsupportedLeaf, match=r"^data\.a \(key\) is a .*_Point"):
        encode({"a": {_Point(1): 1}}, "data")
    with pytest.raises(UnsupportedLeaf, match=r"^data \(key\) is the text .* not valid UTF-8"):
        encode({"\ud800": 1}, "data")


def test_a_state_that_holds_itself_is_refused() -> None:
    """As a Json item is; its iterator is named."""
    endless: list[Any] = []
    endless.append(endless)
    for state in (endless, {"a": endless}, (endless,)):
        with pytest.raises(ValueError, match=r"^the state of 'data' .* holds itself"):
            state_of("data", SimpleNamespace(get_state=lambda: state, set_state=print))  # noqa: B023


def test_states_that_nobody_wrote_are_errors_of_the_checkpoint() -> None:
    """What does not read is never guessed."""
    for state in (
        {"$pickle": "x"},
        {"$array": ["no-such-type", [1], "", False]},
        {"$array": ["f4,(", [1], "", False]},
        {"$array": ["O", [1], "AAAAAAAAAAA=", False]},
        {"$array": [[["a", "O"]], [1], "AAAAAAAAAAA=", False]},
        {"$array": [[["a"]], [1], "", False]},
        {"$bytes": 3},
        {"$bytes": "", "$of": "os.system"},
        {"$array": ["int64", [1], "AAAAAAAAAAA=", False], "$of": "jax.Array"},
    ):
        with pytest.raises(CheckpointError, match="does not read"):
            decode(state)


def test_states_of_before_read_as_before() -> None:
    """What older versions wrote: a dtype by its name, arrays of jax as numpy."""
    for state, value in (
        ({"$array": ["int16", [2], "AQACAA==", False]}, np.array([1, 2], np.int16)),
        ({"$array": ["bfloat16", [], "gD8=", False]}, np.array(1, jnp.bfloat16)),
        ({"$array": ["datetime64[ns]", [1], "AQAAAAAAAAA=", False]}, np.array([1], "M8[ns]")),
        ({"$array": ["float32", [], "AADAPw==", True]}, np.float32(1.5)),
    ):
        back = decode(state)
        assert type(back) is type(value)
        assert back.dtype == value.dtype
        assert np.array_equal(back, value)
    assert decode({"$bytes": "YQ=="}) == b"a"


def test_what_is_an_iterator() -> None:
    """An object with get_state and set_state, or state_dict and load_state_dict; not its class, not
    a dict, not a Json.
    """

    class Loader:
        state = 1

        def state_dict(self) -> dict[str, int]:
            return {"state": self.state}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.state = state["state"]

    loader = Loader()
    assert (
        is_iterator(loader)
        and not is_iterator(Loader)
        and not is_iterator({"get_state": 1})
        and not is_iterator(Json(1))
    )
    saved = state_of("data", loader)
    loader.state = 5
    assert State(decode(saved)).give(loader) is loader and loader.state == 1
