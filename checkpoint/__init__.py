"""What is on disk, when, and is it whole."""

from ._errors import (
    CheckpointError,
    CommitUnknown,
    Corrupt,
    HostileCheckpoint,
    SaveFailed,
    StepExists,
    StepGone,
    StepNotFound,
    TreeMismatch,
    UnsupportedLeaf,
)

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
