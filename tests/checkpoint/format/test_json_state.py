"""Items that are no trees: what a data iterator's state may hold, and what is taken for an
iterator.
"""

from __future__ import annotations

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint import CheckpointError, Json, UnsupportedLeaf
from holdfast.checkpoint.format.json_state import decode, encode, give_state, is_iterator, state_of

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


def test_arrays_in_a_state() -> None:
    """numpy and jax arrays and numpy numbers come back as numpy, with dtype and shape."""
    for value in (
        np.arange(6, dtype=">i2").reshape(2, 3).astype("i2"),
        np.float32(1.5),
        np.zeros((0, 2)),
        jnp.ones(3, jnp.bfloat16),
    ):
        back = decode(json.loads(json.dumps(encode(value, "data"))))
        assert (
            type(back) in (np.ndarray, np.float32)
            and back.dtype == value.dtype
            and np.array_equal(back, value)
        )
    assert math.isnan(decode(json.loads(json.dumps(encode(math.nan, "data")))))


def test_what_cannot_be_saved_is_named() -> None:
    """The path and the type of what JSON cannot hold; never a pickle. A state that nobody wrote is
    an error of the tree.
    """
    with pytest.raises(UnsupportedLeaf, match=r"data\.a\[1\] is a set"):
        encode({"a": [1, {2}]}, "data")
    with pytest.raises(UnsupportedLeaf, match="data is a ndarray"):
        encode(np.array([object()]), "data")
    for state in ({"$pickle": "x"}, {"$array": ["no-such-type", [1], "", False]}, {"$bytes": 3}):
        with pytest.raises(CheckpointError, match="does not read"):
            decode(state)


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
    assert give_state(loader, saved) is loader and loader.state == 1
