"""Saves and restores do not depend on settings of jax that are for the caller's own computations,
and follow those that say where and as what arrays are made.
"""

from __future__ import annotations

import pytest

from tests.support.checkpointing import claims_of
from tests.support.paths import program

SETTINGS = (
    "transfer_guard",
    "transfer_guard of explicit transfers",
    "debug_nans",
    "debug_infs",
    "enable_x64",
    "default_device",
    "set_mesh",
    "set_mesh, explicit",
    "set_mesh of some devices",
    "disable_jit",
    "numpy_rank_promotion",
    "numpy_dtype_promotion",
    "debug_key_reuse",
    "checking_leaks",
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return claims_of(program("settings_of_jax"), tmp_path_factory.mktemp("claims"))


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_of_jax_changes_nothing(found: dict[str, str], setting: str) -> None:
    """Trees on all, some and single devices are saved, cast and restored under it, in each layout;
    NaNs are numbers like any.
    """
    assert found[setting] == ""


def test_a_setting_of_the_process_reaches_no_thread(found: dict[str, str]) -> None:
    """A manager's threads copy under a guard of the whole process, too."""
    assert found["a guard of the process"] == ""


def test_casts_stay_where_the_arrays_are(found: dict[str, str]) -> None:
    """On their devices, whatever mesh is set, and in the memory where they are; float64 that was
    made or is asked for stays so without x64 mode.
    """
    assert found["casts stay where they are"] == ""


def test_a_load_on_a_thread_takes_the_settings_along(found: dict[str, str]) -> None:
    """Mesh, default device and x64 mode are those of the caller of `load_async`."""
    assert found["settings travel"] == ""
