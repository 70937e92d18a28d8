"""Numbers keep their range in another dtype, or are refused by value; digits may go."""

from __future__ import annotations

import math
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.arrays.ranges import OutOfRange, array_of, converted, holds
from tests.model.values import casting
from tests.model.values.leaves import STORABLE, filled

BORDERS = [0, 1, -1, 0.5, -0.9, 7, 9, 100, 127.9, 128, -128.9, -129, 255, 256, 448, 61439, 65504]
BORDERS += [65519, 65520, 2**24 + 1, 2**31 - 1, 2**31, -(2**31) - 1, 2**53 + 1, 2**63, 2**64, 1e-40]
BORDERS += [3.4e38, 1e300, -0.0, math.inf, -math.inf, math.nan]
DTYPES = st.sampled_from(STORABLE).map(np.dtype)
NUMBERS = st.one_of(st.sampled_from(BORDERS), st.integers(-(2**65), 2**65), st.floats())


@settings(max_examples=400)
@given(DTYPES, DTYPES, st.lists(NUMBERS, min_size=1, max_size=3))
@example(np.dtype("int64"), np.dtype("int32"), [2**31])
@example(np.dtype("float32"), np.dtype("int32"), [math.nan])
@example(np.dtype("float32"), np.dtype("int8"), [1, 300])
@example(np.dtype(ml_dtypes.uint4), np.dtype(ml_dtypes.int4), [9])
@example(np.dtype("float32"), np.dtype(ml_dtypes.float8_e4m3fn), [math.inf])
@example(np.dtype("int8"), np.dtype(ml_dtypes.float8_e3m4), [100])
def test_an_array_is_converted_by_value(
    source: np.dtype[Any], target: np.dtype[Any], numbers: list[Any]
) -> None:
    """All its numbers are within the other dtype, or one that is not is named; between any two
    dtypes that can be stored.
    """
    array = filled((len(numbers), 1), source, numbers)
    if source.kind == "c" and target.kind != "c":
        return  # refused before anything is read
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        may = source == target or all(casting.fits(each.item(), target) for each in array.flat)
        if not may:
            with pytest.raises(OutOfRange, match=f"which {target.name} cannot hold"):
                converted(array, target)
            return
        found = converted(array, target)
    assert found.shape == array.shape
    assert found.dtype == target
    assert found is not array
    casting.check_cast(array, found, "the array")


@settings(max_examples=400)
@given(DTYPES, st.one_of(NUMBERS, st.booleans(), st.complex_numbers()))
@example(np.dtype(ml_dtypes.int4), 9)
@example(np.dtype("float32"), 2**24 + 1)
@example(np.dtype("float32"), 2**70)
@example(np.dtype("bool"), 1)
@example(np.dtype(ml_dtypes.bfloat16), 2**63)
@example(np.dtype(ml_dtypes.float8_e4m3fn), math.inf)
@example(np.dtype(ml_dtypes.bfloat16), 1 + 2j)
@example(np.dtype("float16"), 10**5000)
def test_a_python_number_is_held_or_not(dtype: np.dtype[Any], number: Any) -> None:
    """An int is equal in the dtype; a float keeps its range."""
    assert holds(dtype, number) == casting.holds(number, dtype)
    if holds(dtype, number) and isinstance(number, int):
        assert array_of(number, dtype).item() == number


def test_an_empty_array_is_converted() -> None:
    """It has no least and no most."""
    assert converted(np.zeros((0, 3), np.int64), np.dtype("int8")).shape == (0, 3)
