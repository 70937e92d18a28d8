"""What is on disk, when, and is it whole."""

from .errors import (
    CheckpointError,
    CommitUnknown,
    Corrupt,
    HostileCheckpoint,
    SaveCancelled,
    SaveFailed,
    StepExists,
    StepGone,
    StepNotFound,
    TreeMismatch,
    UnsupportedLeaf,
)
from .format.json_state import Json
from .format.leaf_types import register_leaf_type
from .format.own_files import Files
from .format.tree import Node
from .layouts.inspection import ItemStructure, Structure
from .manager import CheckpointManager
from .oneshot import load, load_async, save, save_async, structure, verify
from .options import Local, Options, Progress, ProgressBar
from .policy import (
    AnyOf,
    AtSteps,
    EveryNSeconds,
    EveryNSteps,
    FirstSave,
    KeepAll,
    KeepAnyOf,
    KeepBest,
    KeepClosestTo,
    KeepEvery,
    KeepEverySeconds,
    KeepLast,
    KeepLatestFor,
    KeepPolicy,
    OnPreemption,
    PolicyContext,
    SavePolicy,
    StepFacts,
)
from .restoring.match import SAVED
from .restoring.restore import VerifyReport
from .saving.async_saver import SaveHandle
from .steps.garbage import Swept, sweep
from .storage.base import Storage
from .storage.path import register_storage
from .watch import iterate_steps, wait_for_new_step

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
    "Files",
    "FirstSave",
    "HostileCheckpoint",
    "ItemStructure",
    "Json",
    "KeepAll",
    "KeepAnyOf",
    "KeepBest",
    "KeepClosestTo",
    "KeepEvery",
    "KeepEverySeconds",
    "KeepLast",
    "KeepLatestFor",
    "KeepPolicy",
    "Local",
    "Node",
    "OnPreemption",
    "Options",
    "PolicyContext",
    "Progress",
    "ProgressBar",
    "SaveCancelled",
    "SaveFailed",
    "SaveHandle",
    "SavePolicy",
    "StepExists",
    "StepFacts",
    "StepGone",
    "StepNotFound",
    "Storage",
    "Structure",
    "Swept",
    "TreeMismatch",
    "UnsupportedLeaf",
    "VerifyReport",
    "iterate_steps",
    "load",
    "load_async",
    "register_leaf_type",
    "register_storage",
    "save",
    "save_async",
    "structure",
    "sweep",
    "verify",
    "wait_for_new_step",
]
