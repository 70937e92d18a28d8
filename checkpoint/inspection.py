"""Looks at checkpoints without a manager: opening, verifying."""

from __future__ import annotations

import logging
import os
import re

from .errors import StepNotFound
from .format.record import Record, read_record
from .layouts.detect import open_source
from .restoring.restore import VerifyReport, verify_step
from .storage.base import Storage
from .storage.path import join, open_storage
from .storage.tombstone import RECORD_NAME

log = logging.getLogger("holdfast.checkpoint")
_STEP = re.compile(r"0|[1-9][0-9]{0,17}")


def verify(path: str | os.PathLike[str]) -> VerifyReport:
    """Reads every byte of the checkpoint in `path` (of a root: its latest step) and checks it; raises as `load` does."""
    try:
        return verify_step(*open_checkpoint(path))
    except StepNotFound:
        return open_source(path).verify()


def open_checkpoint(path: str | os.PathLike[str]) -> tuple[Storage, str, Record]:
    """Returns the store, the step's folder in it and the record of the checkpoint that `path` means."""
    storage = open_storage(path)
    try:
        return storage, "", read_record(storage, "")
    except StepNotFound:
        steps = sorted((entry.name.rstrip("/") for entry in storage.list("") if _STEP.fullmatch(entry.name.rstrip("/"))), key=int)
        for name in reversed(steps):
            if any(entry.name == f"{name}/{RECORD_NAME}" for entry in storage.list(name)):
                log.info("%s is a root of %d steps: taking the latest, %s", storage.root, len(steps), join(storage.root, name))
                return storage, name, read_record(storage, name)
        raise
