"""Shardings of shapes: the same on Orbax and on holdfast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.support.orbax_programs import run_both

SHAPES = [(), (3,), (8,), (16, 4), (4, 16), (12, 10), (9, 25), (8, 8, 8), (1, 2, 3), (0, 16)]


@pytest.mark.parametrize("devices", [None, 1, 4, 6])
def test_as_many_devices_as_the_axes_allow(tmp_path: Path, devices: int | None) -> None:
    """On all devices, or on those that are given."""
    given = {} if devices is None else {"devices": jax.devices()[:devices]}

    def program(ocp: Any, root: Path) -> Any:
        abstract = [jax.ShapeDtypeStruct(shape, np.int8) for shape in SHAPES]
        found = ocp.arrays.construct_maximal_shardings({"a": abstract}, **given)["a"]
        return [(each.mesh, each.spec) for each in found]

    run_both(program, tmp_path)
