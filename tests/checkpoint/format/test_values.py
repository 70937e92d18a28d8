"""Python values in a record."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.format.values import decode_value, encode_value


@given(st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.text() | st.binary())
def test_python_values_are_exact(value: Any) -> None:
    """Values of any size come back as themselves, bit by bit."""
    kind, text = json.loads(json.dumps(encode_value(value)))
    found = decode_value(kind, text)
    assert (
        type(found) is type(value)
        and (found == value or found != found)
        and repr(found) == repr(value)
    )


@pytest.mark.parametrize(
    ("kind", "text"),
    [("bool", "yes"), ("int", "three"), ("complex", "1"), ("bytes", "?"), ("list", "[]")],
)
def test_other_texts_are_no_values(kind: str, text: str) -> None:
    """A text that `encode_value` does not make is a ValueError."""
    with pytest.raises(ValueError):
        decode_value(kind, text)
