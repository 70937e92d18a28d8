"""The `holdfast` command."""

from .entry import main

__all__ = ["main"]
