"""Errors of checkpoints: what is on disk, and why it cannot be had."""

from __future__ import annotations

from holdfast.coordination import HoldfastError


class CheckpointError(HoldfastError):
    """Is the root of what can go wrong with a checkpoint. `path` is the root, step folder or file that it is about."""

    path: str = ""
    step: int | None = None


class StepExists(CheckpointError):
    """Says that the step is already there; nothing was written."""


class StepNotFound(CheckpointError):
    """Says that no such step (or item) is there."""


class StepGone(CheckpointError):
    """Says that the step was deleted while it was being read."""


class SaveFailed(CheckpointError):
    """Says that a save did not commit, on which process it failed and, where a leaf is to blame, the leaf."""

    process: int | None = None
    leaf: str = ""


class CommitUnknown(CheckpointError):
    """Says that this process does not know whether the save was committed: it may yet appear, whole or not at all."""


class Corrupt(CheckpointError):
    """Says that stored bytes are not what was written: the file and, where known, the leaf."""

    file: str = ""
    leaf: str = ""


class TreeMismatch(CheckpointError):
    """Says that the checkpoint and what was asked for differ in structure, shape or dtype."""

    leaf: str = ""
    expected: str = ""
    found: str = ""


class UnsupportedLeaf(CheckpointError):
    """Says that a leaf of the tree is of a type that cannot be saved."""

    leaf: str = ""
    found: str = ""


class HostileCheckpoint(CheckpointError):
    """Says that a checkpoint asks for something no writer of ours writes: it is damaged on purpose or not ours."""

    file: str = ""


__all__ = [
    "CheckpointError",
    "CommitUnknown",
    "Corrupt",
    "HostileCheckpoint",
    "SaveFailed",
    "StepExists",
    "StepGone",
    "StepNotFound",
    "TreeMismatch",
    "UnsupportedLeaf",
]
