"""Small programs that are written for Orbax, run on Orbax and on holdfast by the change of import
alone, and their results compared.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

BUILT_IN = (KeyError, FileNotFoundError, FileExistsError, ValueError, TypeError)


def outcome(call: Callable[[], Any]) -> Any:
    """Returns what a call gives, or which of the built-in errors it raises."""
    try:
        return call()
    except BUILT_IN as error:
        return next(kind.__name__ for kind in BUILT_IN if isinstance(error, kind))


def _collect_what_is_left() -> None:
    """Collects the reads that Orbax abandons where one has failed: each would tell of itself in
    whichever test it is collected.
    """
    hook = sys.unraisablehook
    sys.unraisablehook = lambda unraisable: None
    try:
        gc.collect()
    finally:
        sys.unraisablehook = hook


def run_both(program: Callable[[Any, Path], Any], tmp_path: Path, *, v1: bool = False) -> Any:
    """Runs `program(ocp, folder)` with Orbax and with holdfast, asserts the same results, and
    returns those of holdfast.
    """
    import orbax.checkpoint as real
    from orbax.checkpoint.experimental import v1 as real_v1

    from holdfast.compat import orbax as ours
    from holdfast.compat.orbax import v1 as ours_v1

    try:
        expected = program(real_v1 if v1 else real, _made(tmp_path / "orbax"))
    finally:
        _collect_what_is_left()
    found = program(ours_v1 if v1 else ours, _made(tmp_path / "holdfast"))
    assert_equal(found, expected)
    return found


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def assert_equal(found: Any, expected: Any, at: str = "") -> None:
    """Asserts two results equal: containers, types, dtypes, bits, shardings. A Composite of either
    is a mapping.
    """
    if hasattr(expected, "items") and hasattr(expected, "keys"):
        assert isinstance(found, Mapping) and set(found) == set(expected.keys()), (
            f"{at}: {found!r} for {expected!r}"
        )
        for key in expected.keys():  # noqa: SIM118 (Orbax's Composite has keys and no iterator in some versions)
            assert_equal(found[key], expected[key], f"{at}.{key}")
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected) and len(found) == len(expected), (
            f"{at}: {found!r} for {expected!r}"
        )
        for index, (one, two) in enumerate(zip(found, expected, strict=True)):
            assert_equal(one, two, f"{at}[{index}]")
    elif isinstance(expected, jax.Array | np.ndarray | np.generic):
        assert isinstance(found, jax.Array) == isinstance(expected, jax.Array), (
            f"{at}: {type(found)} for {type(expected)}"
        )
        assert found.dtype == expected.dtype and found.shape == expected.shape, (
            f"{at}: {found!r} for {expected!r}"
        )
        if isinstance(expected, jax.Array):
            assert found.sharding == expected.sharding, (
                f"{at}: {found.sharding} for {expected.sharding}"
            )
        if isinstance(expected, jax.Array) and jax.numpy.issubdtype(
            expected.dtype, jax.dtypes.prng_key
        ):
            found = jax.random.key_data(found)
            expected = jax.random.key_data(expected)
        assert np.asarray(found).tobytes() == np.asarray(expected).tobytes(), (
            f"{at}: {found!r} for {expected!r}"
        )
    else:
        assert type(found) is type(expected) and found == expected, (
            f"{at}: {found!r} for {expected!r}"
        )
