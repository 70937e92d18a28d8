"""What is on disk, when, and is it whole."""

from .errors import (
    CheckpointError,
    CommitUnknown,
    Corrupt,
    HostileCheckpoint,
    ReplicasDiffer,
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
from .oneshot import convert, load, load_async, save, save_async, structure, verify
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
    SaveCosts,
    SavePolicy,
    StepFacts,
)
from .restoring.match import SAVED
from .restoring.restore import VerifyReport
from .restoring.surgery_rules import (
    Add,
    Cast,
    Drop,
    Fuse,
    Rename,
    Repeat,
    Reshape,
    Split,
    Stack,
    Transpose,
    Unstack,
)
from .saving.async_saver import SaveHandle
from .scheduling.goodput import SaveForGoodput
from .steps.garbage import Swept, sweep
from .storage.base import Storage
from .storage.path import register_storage
from .watch import iterate_steps, wait_for_new_step

__all__ = [
    "SAVED",
    "Add",
    "AnyOf",
    "AtSteps",
    "Cast",
    "CheckpointError",
    "CheckpointManager",
    "CommitUnknown",
    "Corrupt",
    "Drop",
    "EveryNSeconds",
    "EveryNSteps",
    "Files",
    "FirstSave",
    "Fuse",
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
    "Rename",
    "Repeat",
    "ReplicasDiffer",
    "Reshape",
    "SaveCancelled",
    "SaveCosts",
    "SaveFailed",
    "SaveForGoodput",
    "SaveHandle",
    "SavePolicy",
    "Split",
    "Stack",
    "StepExists",
    "StepFacts",
    "StepGone",
    "StepNotFound",
    "Storage",
    "Structure",
    "Swept",
    "Transpose",
    "TreeMismatch",
    "Unstack",
    "UnsupportedLeaf",
    "VerifyReport",
    "convert",
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
