"""The null object of the local tier."""

from __future__ import annotations

import inspect

import pytest

from holdfast.checkpoint import StepNotFound
from holdfast.checkpoint.local_tier.no_tier import NoTier
from holdfast.checkpoint.local_tier.parts import LocalKey
from holdfast.checkpoint.local_tier.tier import LocalTier

KEY = LocalKey(7, 1, "0" * 16, 1)


def test_it_lists_nothing() -> None:
    """No step is listed, and nothing is counted."""
    tier = NoTier()
    tier.survey()
    tier.close(0.0)
    assert (tier.found(), tier.steps(), tier.copies(), tier.statistics()) == ([], [], {}, {})


def test_a_rollback_begins_its_branch_here() -> None:
    """The caller's part of a rollback is done, without a message."""
    calls: list[str] = []
    NoTier().roll_back(7, lambda: calls.append("begun"))
    assert calls == ["begun"]


def test_a_local_step_is_not_found() -> None:
    """What needs a local step says that there is none."""
    tier = NoTier()
    for ask in (
        lambda: tier.head(7),
        lambda: tier.structure(7),
        lambda: tier.open_step(KEY, "1"),
        lambda: tier.pass_over(KEY),
    ):
        with pytest.raises(StepNotFound, match="there is no local step 7"):
            ask()


def test_it_has_the_methods_of_the_tier() -> None:
    """Whoever has either may call the same, but for saving, which only a lane calls."""

    def public(kind: type) -> set[str]:
        methods = inspect.getmembers(kind, inspect.isfunction)
        return {name for name, _ in methods if not name.startswith("_")}

    assert public(LocalTier) - public(NoTier) <= {
        *("run", "forget_from"),
        *("wants", "started", "save", "raise_error", "join"),
    }
