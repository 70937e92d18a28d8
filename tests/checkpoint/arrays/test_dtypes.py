"""Dtypes as they are stored: a list of names, and nothing else."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.arrays.dtypes import (
    _BY_NAME,
    SAFETENSORS_NAMES,
    can_store,
    dtype_named,
    name_of,
    stored_as,
)


@pytest.mark.parametrize("name", sorted(_BY_NAME))
def test_names_lead_to_dtypes_and_back(name: str) -> None:
    """Every dtype of the list is found by the name that it has itself, and can be stored."""
    dtype = dtype_named(name)
    assert dtype is not None and name_of(dtype) == dtype.name == name and can_store(dtype)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "float",
        "object",
        "str",
        "datetime64",
        "float128",
        ">f4",
        "<f4",
        "__class__",
        "finfo",
        "U8",
    ],
)
def test_other_names_lead_nowhere(name: str) -> None:
    """A name that is not in the list is no dtype, whatever numpy or ml_dtypes have under it."""
    assert dtype_named(name) is None


@pytest.mark.parametrize("dtype", [">f4", ">i8", "O", "U3", "M8[s]", "V3"])
def test_what_cannot_be_stored(dtype: str) -> None:
    """Big-endian numbers, objects, texts and times are not stored."""
    assert not can_store(np.dtype(dtype))


@given(st.sampled_from(sorted(_BY_NAME)), st.lists(st.integers(0, 7), max_size=4).map(tuple))
def test_a_chunk_keeps_its_bytes(name: str, shape: tuple[int, ...]) -> None:
    """The stored dtype and shape have as many bytes as the array; a dtype that safetensors lacks is
    U8.
    """
    dtype = _BY_NAME[name]
    stored, stored_shape = stored_as(dtype, shape)
    itemsize = {
        stored_name: np.dtype(_BY_NAME[own]).itemsize
        for own, stored_name in SAFETENSORS_NAMES.items()
    }[stored]
    assert math.prod(stored_shape) * itemsize == math.prod(shape) * dtype.itemsize
    assert (
        (stored, stored_shape) == (SAFETENSORS_NAMES[name], shape)
        if name in SAFETENSORS_NAMES
        else stored == "U8"
    )
