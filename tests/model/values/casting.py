"""What a number becomes in another dtype, number by number: the model of a cast."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from .comparing import Different

TARGETS = [
    np.dtype(name)
    for name in (
        *("bool", "int8", "uint8", "int16", "int32", "uint32", "float16", "float32", "complex64"),
        *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.int4),
    )
]


def _is_whole(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "bui" or dtype.name.startswith(("int", "uint"))


def _bounds(dtype: np.dtype[Any]) -> tuple[int, int]:
    if dtype.kind == "b":
        return 0, 1
    info = ml_dtypes.iinfo(dtype)
    return int(info.min), int(info.max)


def fits(number: Any, dtype: np.dtype[Any]) -> bool:
    """Says whether a number keeps its range in a dtype: digits may go."""
    if isinstance(number, complex):
        if dtype.kind != "c":
            return False
        part = np.dtype(f"f{dtype.itemsize // 2}")
        return fits(number.real, part) and fits(number.imag, part)
    if dtype.kind == "c":
        return fits(number, np.dtype(f"f{dtype.itemsize // 2}"))
    if _is_whole(dtype):
        least, most = _bounds(dtype)
        if not math.isfinite(number):
            return False
        return number in (0, 1) if dtype.kind == "b" else least <= math.trunc(number) <= most
    with np.errstate(all="ignore"):
        held = float(np.asarray(float(number)).astype(dtype))
    if math.isfinite(number):
        return math.isfinite(held) and (held == 0 or (held > 0) == (number > 0))
    return repr(held) == repr(float(number))


def holds(number: Any, dtype: np.dtype[Any]) -> bool:
    """Says whether a Python number may come back in a dtype: an int as itself."""
    kinds = "b" if isinstance(number, bool) else ""
    whole = _is_whole(dtype) and dtype.kind != "b"
    if isinstance(number, int):
        if dtype.kind == "b":
            return bool(kinds)
        if whole:
            least, most = _bounds(dtype)
            return least <= number <= most
        try:
            with np.errstate(all="ignore"):
                held = np.asarray(float(number)).astype(dtype).item()
        except OverflowError:
            return False
        return bool(held == number)
    if whole or dtype.kind == "b" or (isinstance(number, complex) and dtype.kind != "c"):
        return False
    return fits(number, dtype)


def check_cast(wanted: Any, found: Any, where: str) -> None:
    """Raises Different unless an array has the numbers of another, as far as its dtype has them."""
    for number, number_back in zip(wanted.reshape(-1), found.reshape(-1), strict=True):
        held = number_back.item()
        exact = number.item() if hasattr(number, "item") else number
        if not fits(exact, found.dtype):
            raise Different(f"{where}: {exact!r} came back as {held!r} in {found.dtype}")
        if _is_whole(found.dtype):
            is_near = int(held) == math.trunc(exact)
        else:
            with np.errstate(all="ignore"):
                plain = float(exact) if isinstance(exact, int) else exact
                rounded = np.asarray(plain).astype(found.dtype).item()
            is_near = repr(complex(held)) == repr(complex(rounded))
        if not is_near:
            raise Different(f"{where}: {exact!r} came back as {held!r} in {found.dtype}")
