"""Arrays on every kind of mesh of today's jax, in one process with 8 devices: saved, described and
restored.
"""

from __future__ import annotations

import pytest

from tests.support.checkpointing import claims_of
from tests.support.paths import program


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return claims_of(program("meshes_of_today"), tmp_path_factory.mktemp("claims"))


@pytest.mark.parametrize("claim", ["as_saved", "in_orbax"])
def test_shardings_come_back_whole(found: dict[str, str], claim: str) -> None:
    """Axis types, reduced axes, memory and device: with SAVED, a structure, a like, and after a
    conversion; in Orbax's layout too, which Orbax reads.
    """
    assert found[claim] == ""


def test_an_abstract_mesh_means_the_mesh_that_is_set(found: dict[str, str]) -> None:
    """Where none is set, or another, the error says so and names the leaf."""
    assert found["abstract"] == ""


def test_partial_sums_are_refused(found: dict[str, str]) -> None:
    """An unreduced array is no array of numbers yet; nothing is written."""
    assert found["unreduced"] == ""


def test_axes_may_be_named_by_anything(found: dict[str, str]) -> None:
    """By numbers, or by an object as in `jax.pmap`: saved, cast and restored."""
    assert found["odd_names"] == ""
