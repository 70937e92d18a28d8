"""Numbers in other dtypes, by value: what loses its range is refused, and digits may go."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import TreeMismatch, leaf_at
from .dtypes import Dtype, HostArray

_SMALL_FLOAT = 4  # bytes: all floats up to here are float32's too


class OutOfRange(ValueError):
    """Says which number a dtype cannot hold."""

    def __init__(self, number: object, dtype: Dtype) -> None:
        super().__init__(f"it holds {number!r}, which {dtype.name} cannot hold")
        self.number = number
        self.dtype = dtype

    def of_leaf(self, path: str) -> TreeMismatch:
        """Returns the error that names the leaf."""
        return TreeMismatch(
            f"{leaf_at(path)} holds {self.number!r}, which {self.dtype.name} cannot hold; ask for"
            " a dtype that does, and convert it yourself",
            leaf=path,
            expected=self.dtype.name,
            found=repr(self.number),
        )


def holds(dtype: Dtype, value: complex) -> bool:
    """Says whether a dtype has a Python number: an int as it is, of a float its range."""
    if isinstance(value, int):
        return _holds_int(dtype, value)
    if is_whole(dtype) or (isinstance(value, complex) and dtype.kind != "c"):
        return False
    return not _misfits(np.asarray(value), dtype).any()


def _holds_int(dtype: Dtype, value: int) -> bool:
    if dtype.kind == "b":
        return isinstance(value, bool)
    if is_whole(dtype):
        least, most = _bounds(dtype)
        return least <= value <= most
    try:
        held = _cast(np.asarray(float(value)), dtype)
    except OverflowError:
        return False
    return bool(held.item() == value)


def array_of(value: Any, dtype: Dtype | None) -> HostArray:
    """Returns a Python number that a dtype holds as an array without axes."""
    if isinstance(value, int) and dtype is not None and not is_whole(dtype):
        value = float(value)  # ml_dtypes takes no large int
    return np.asarray(value, dtype)


def converted(array: HostArray, dtype: Dtype) -> HostArray:
    """Returns a copy of an array in another dtype. Raises OutOfRange, which says which of its
    numbers the dtype cannot hold; a number may lose digits.
    """
    if array.size and not _fits_by_extremes(array, dtype):
        misfits = _misfits(array, dtype)
        if misfits.any():
            place = np.unravel_index(int(np.argmax(misfits)), array.shape)
            raise OutOfRange(array[place].item(), dtype)
    return _cast(array, dtype)


def converted_leaf(path: str, array: HostArray, dtype: Dtype) -> HostArray:
    """Returns the array of a leaf as `converted`; raises TreeMismatch naming the leaf."""
    try:
        return converted(array, dtype)
    except OutOfRange as error:
        raise error.of_leaf(path) from None


def _cast(array: HostArray, dtype: Dtype) -> HostArray:
    if not _is_native(array.dtype) and not _is_native(dtype) and array.dtype != dtype:
        array = _readable(array)  # ml_dtypes has no cast between some of its own
    with np.errstate(all="ignore"):
        return array.astype(dtype)


def _is_native(dtype: Dtype) -> bool:
    """Says whether a dtype is one of numpy's own."""
    return dtype.isbuiltin == 1


def is_whole(dtype: Dtype) -> bool:
    """Says whether a dtype has whole numbers alone."""
    return dtype.kind in "biu" or dtype.name.startswith(("int", "uint"))


def _bounds(dtype: Dtype) -> tuple[int, int]:
    """Returns the least and the most of whole numbers."""
    if dtype.kind == "b":
        return 0, 1
    iinfo: Any = ml_dtypes.iinfo
    info = iinfo(dtype)
    return int(info.min), int(info.max)


def _fits_by_extremes(array: HostArray, dtype: Dtype) -> bool:
    """Says whether the least and the most of an array show that all of it fits: no more than two
    passes. Where they do not show it, it may fit all the same.
    """
    source = array.dtype
    # What ml_dtypes calls safe is not: float8_e3m4 has no 100.
    if source == dtype or (
        _is_native(source) and _is_native(dtype) and np.can_cast(source, dtype, "safe")
    ):
        return True
    if "c" in (source.kind, dtype.kind) or dtype.kind == "b":
        return False
    if is_whole(source) and _holds_between(np.array(_bounds(source)), dtype):
        return True
    readable = _readable(array)
    return _holds_between(np.array([readable.min(), readable.max()]), dtype)


def _holds_between(extremes: HostArray, dtype: Dtype) -> bool:
    """Says whether a dtype has everything between two numbers."""
    if not is_whole(dtype):
        return _floats_hold(extremes, dtype)
    least, most = _bounds(dtype)
    return all(
        math.isfinite(number) and least <= math.trunc(number) <= most
        for number in extremes.tolist()
    )


def _readable(array: HostArray) -> HostArray:
    """Returns numbers in a dtype of numpy's own that has them all, and compares with any bound."""
    dtype = array.dtype
    if _is_native(dtype) and dtype != np.float16:
        return array
    if is_whole(dtype):
        return array.astype(np.int16)
    return array.astype(np.float32 if dtype.itemsize <= _SMALL_FLOAT else np.float64)


def _floats_hold(extremes: HostArray, dtype: Dtype) -> bool:
    """Says whether floats have everything between two finite numbers."""
    finfo: Any = ml_dtypes.finfo
    info = finfo(dtype)
    extremes = extremes.astype(np.float64)
    has_zero_and_sign = dtype.name != "float8_e8m0fnu"
    return bool(
        has_zero_and_sign
        and np.isfinite(extremes).all()
        and -float(info.max) <= extremes.min()
        and extremes.max() <= float(info.max)
    )


def _misfits(array: HostArray, dtype: Dtype) -> HostArray:
    """Returns which numbers of an array lose their range in a dtype."""
    if array.dtype.kind == "c" or dtype.kind == "c":
        part = np.dtype(f"f{dtype.itemsize // 2}")
        real: HostArray = _misfits(np.real(array), part)
        return real | _misfits(np.imag(array), part)
    array = _readable(array)
    if dtype.kind == "b":
        return np.asarray((array != 0) & (array != 1))
    return _outside(array, *_bounds(dtype)) if is_whole(dtype) else _lost(array, dtype)


def _lost(array: HostArray, dtype: Dtype) -> HostArray:
    """Returns which numbers of an array floats of a dtype do not have, nor near ones."""
    held = _readable(_cast(array, dtype))
    with np.errstate(all="ignore"):
        has_sign = (held == 0) | (np.signbit(held) == (array < 0))
        has_zero = (array != 0) | (held == 0)  # float8_e8m0fnu has none
        is_same = (held == array) | (np.isnan(held) & np.isnan(array))
    is_near = np.isfinite(held) & has_sign & has_zero
    misfits: HostArray = np.where(np.isfinite(array), ~is_near, ~is_same)
    return misfits


def _outside(array: HostArray, least: int, most: int) -> HostArray:
    """Returns which numbers are no whole ones between two bounds once their fractions are gone."""
    if array.dtype.kind != "f":
        return np.asarray((array < least) | (array > most))
    with np.errstate(all="ignore"):
        whole = np.trunc(array)
    # A bound may be rounded up in the array's own dtype; a NaN is neither above nor below.
    return np.asarray(~((whole >= least) & (whole < float(most) + 1)))
