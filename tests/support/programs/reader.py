"""A data iterator that a checkpoint can hold: its state is one number."""

from __future__ import annotations


class Reader:
    """A data iterator."""

    def __init__(self, at: int) -> None:
        self.at = at

    def get_state(self) -> int:
        return self.at

    def set_state(self, state: int) -> None:
        self.at = state
