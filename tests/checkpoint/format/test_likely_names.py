"""Renames are proposed for what was renamed, and for nothing that only looks alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from holdfast.checkpoint import TreeMismatch, convert, load, save

W = np.ones((4, 4), np.float32)
B = np.ones(4, np.float32)
PARAMS = {"w": W, "b": B}


def layers(stem: str, numbers: range = range(2)) -> dict[str, Any]:
    return {f"{stem}{number}": {"w": W} for number in numbers}


class Old(NamedTuple):
    weights: Any


class New(NamedTuple):
    weight: Any


def same_class(**fields: Any) -> Any:
    """Returns a state of a class that was edited: its module and name are what they were."""
    made = NamedTuple("Edited", [(name, Any) for name in fields])  # type: ignore[misc]
    made.__module__ = __name__
    return made(**fields)


RENAMED: dict[str, tuple[Any, Any, dict[str, str]]] = {
    "a short name": (
        {"params": PARAMS},
        {"params": {"weight": W, "bias": B}},
        {"params.b": "params.bias", "params.w": "params.weight"},
    ),
    "numbered layers": (
        layers("encoder_"),
        layers("encoder"),
        {"encoder_0.w": "encoder0.w", "encoder_1.w": "encoder1.w"},
    ),
    "a wrapper": (
        {"module": layers("a")},
        layers("a"),
        {"module.a0.w": "a0.w", "module.a1.w": "a1.w"},
    ),
    "a field of a class": (
        same_class(kernels=PARAMS),
        same_class(kernel=PARAMS),
        {"kernels.b": "kernel.b", "kernels.w": "kernel.w"},
    ),
}


@pytest.mark.parametrize("case", RENAMED)
def test_what_was_renamed_is_proposed(case: str, tmp_path: Path) -> None:
    """And what is proposed restores."""
    saved, like, expected = RENAMED[case]
    save(tmp_path / "c", saved)
    with pytest.raises(TreeMismatch) as caught:
        load(tmp_path / "c", like)
    assert str(caught.value).endswith(f"for what was renamed pass rename={expected}")
    restored = load(tmp_path / "c", like, rename=expected)
    assert jax.tree.structure(restored) == jax.tree.structure(like)


def adam(params: Any) -> Any:
    return optax.adam(1e-3).init(params)


def momentum(params: Any) -> Any:
    return optax.sgd(1e-3, momentum=0.9).init(params)


def as_dicts(state: Any) -> Any:
    return {"mu": state[0].mu, "nu": state[0].nu}


ACCIDENTS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "another optimizer": (lambda: {"opt": adam(PARAMS)}, lambda: {"opt": momentum(PARAMS)}),
    "and back": (lambda: {"opt": momentum(PARAMS)}, lambda: {"opt": adam(PARAMS)}),
    "another optimizer's dicts": (
        lambda: {"opt": [as_dicts(adam(PARAMS))]},
        lambda: {"opt": momentum(PARAMS)},
    ),
    "moments by hand": (
        lambda: {"opt": {"m": PARAMS, "v": PARAMS}},
        lambda: {"opt": {"velocity": PARAMS}},
    ),
    "moments as params": (lambda: as_dicts(adam(PARAMS)), lambda: PARAMS),
    "another layer": (lambda: layers("dense_"), lambda: layers("dense_", range(2, 4))),
    "another shape": (lambda: {"w": W}, lambda: {"weight": B}),
    "another class": (lambda: Old(PARAMS), lambda: New(PARAMS)),
    "another name": (lambda: {"dense": {"kernel": W}}, lambda: {"dense": {"weight": W}}),
}


@pytest.mark.parametrize("layout", ["holdfast", "orbax"])
@pytest.mark.parametrize("case", ACCIDENTS)
def test_what_looks_alike_is_not(case: str, layout: str, tmp_path: Path) -> None:
    """In no layout, whether it keeps classes or not."""
    make, like = ACCIDENTS[case]
    save(tmp_path / "c", jax.tree.map(jnp.asarray, make()), step=1)
    path = convert(tmp_path / "c", tmp_path / "o", layout) if layout == "orbax" else tmp_path / "c"
    with pytest.raises(TreeMismatch, match="not in the checkpoint") as caught:
        load(path, like())
    assert "rename" not in str(caught.value)


def test_a_mistyped_rename_is_corrected_and_no_more(tmp_path: Path) -> None:
    """A name of another state is none that was meant."""
    save(tmp_path / "c", {"opt": adam(PARAMS)})
    with pytest.raises(TreeMismatch, match=r"perhaps rename=\{'opt\.0\.nu\.w': 'x'\}"):
        load(tmp_path / "c", rename={"opt.0.nu.W": "x"})
    with pytest.raises(TreeMismatch, match="write names of the checkpoint on the left"):
        load(tmp_path / "c", rename={"opt.0.trace.w": "x"})
