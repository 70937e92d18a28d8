"""Stands in for the local tier of a manager that has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from ..agreement.save_protocol import BranchStart
from ..errors import StepNotFound
from ..steps.root_report import HostCopies
from .parts import LocalKey


class NoTier:
    """Answers for hosts that keep no steps. What needs a local step raises StepNotFound."""

    # --- listing

    def survey(self) -> None:
        """Looks nowhere."""

    def found(self) -> list[LocalKey]:
        """Returns an empty list, as `steps` does."""
        return []

    def steps(self) -> list[int]:
        """Returns an empty list."""
        return []

    def copies(self) -> dict[int, HostCopies]:
        """Returns an empty dict."""
        return {}

    def head(self, step: int) -> NoReturn:
        """Raises StepNotFound, as all that needs a local step."""
        raise StepNotFound(f"there is no local step {step}", step=step)

    def structure(self, step: int) -> NoReturn:
        """Raises StepNotFound."""
        self.head(step)

    # --- rollback and restoring

    def roll_back(self, step: int, begin: Callable[[], None]) -> None:
        """Calls `begin`: without local steps no other process has to wait for it."""
        begin()

    def leave(self, branch: BranchStart, step: int) -> None:
        """Forgets nothing."""

    def pass_over(self, key: LocalKey) -> NoReturn:
        """Raises StepNotFound."""
        self.head(key.step)

    def open_step(self, key: LocalKey, question: str) -> NoReturn:
        """Raises StepNotFound."""
        self.head(key.step)

    def restore(self, storage: Any, restores: Any) -> NoReturn:
        """Raises AssertionError: this tier opens no step."""
        raise AssertionError("no local tier has opened a step")

    # --- the end

    def statistics(self) -> dict[str, Any]:
        """Returns an empty dict."""
        return {}

    def close(self, timeout_s: float) -> None:
        """Returns at once."""
