"""What is on disk, when, and is it whole."""

from ._bar import ProgressBar
from ._engine import SAVED, Report
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
from ._evaluate import iterate_steps, wait_for_new_step
from ._items import Json
from ._keeping import Swept, sweep
from ._manager import CheckpointManager
from ._oneshot import load, save, verify
from ._options import Options, Progress
from ._policy import (
    AnyOf,
    AtSteps,
    EveryNSeconds,
    EveryNSteps,
    Facts,
    KeepAll,
    KeepAnyOf,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepPolicy,
    OnPreemption,
    SavePolicy,
    StepFacts,
)
from ._tree import Node

__all__ = [
    "SAVED",
    "AnyOf",
    "AtSteps",
    "CheckpointError",
    "CheckpointManager",
    "CommitUnknown",
    "Corrupt",
    "EveryNSeconds",
    "EveryNSteps",
    "Facts",
    "HostileCheckpoint",
    "Json",
    "KeepAll",
    "KeepAnyOf",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepPolicy",
    "Node",
    "OnPreemption",
    "Options",
    "Progress",
    "ProgressBar",
    "Report",
    "SaveFailed",
    "SavePolicy",
    "StepExists",
    "StepFacts",
    "StepGone",
    "StepNotFound",
    "Swept",
    "TreeMismatch",
    "UnsupportedLeaf",
    "iterate_steps",
    "load",
    "save",
    "sweep",
    "verify",
    "wait_for_new_step",
]
