"""Opens a root together: the primary takes the claim, fences the dead and lists the steps; one message brings it to all others."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

from holdfast.coordination import HoldfastError
from holdfast.multihost import Group, ProcessSpec

from ..errors import CheckpointError, error_from_message, error_text, error_to_message
from ..format.files import StepNames, list_steps, read_step_names
from ..options import Options
from ..storage.base import Storage
from .claims import FOLDER, Claims, Writer, this_writer
from .garbage import fence_others

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Opened:
    """What all processes know after the opening: the writer, the steps that are there, and other people's, with their folders' names."""

    writer: Writer
    steps: tuple[int, ...]
    foreign: Mapping[int, str] = field(default_factory=dict)


def open_root(
    storage: Storage, claims: Claims, group: Group, options: Options, *, find_foreign: Callable[[Storage], dict[int, str]] | None = None
) -> Opened:
    """Opens a root for a group; every process calls it. Raises, on every process, what the primary ran into.

    `find_foreign` returns the steps of other libraries' layouts, which this wing does not know.
    """
    name = f"checkpoint/open/{hashlib.sha256(storage.root.encode()).hexdigest()[:16]}"
    if group.index:
        return _from_bytes(group.broadcast(name, None, timeout_s=options.save_timeout_s))
    try:
        opened = _open(storage, claims, options, find_foreign)
    except Exception as error:
        failure = error if isinstance(error, HoldfastError) else CheckpointError(f"cannot open {storage.root}: {error_text(error)}")
        group.broadcast(name, json.dumps({"error": error_to_message(failure)}).encode(), timeout_s=options.save_timeout_s)
        if failure is error:
            raise
        raise failure from error
    group.broadcast(name, json.dumps(asdict(opened)).encode(), timeout_s=options.save_timeout_s)
    return opened


def _from_bytes(data: bytes) -> Opened:
    """Returns what the primary broadcast, or raises its error."""
    message = json.loads(data)
    if "error" in message:
        raise error_from_message(*message["error"])
    foreign = {int(step): name for step, name in message["foreign"].items()}
    return Opened(Writer(**message["writer"]), tuple(message["steps"]), foreign)


def _open(storage: Storage, claims: Claims, options: Options, find_foreign: Callable[[Storage], dict[int, str]] | None) -> Opened:
    spec = ProcessSpec.from_env(os.environ)
    writer = this_writer(spec.job_id, spec.attempt) if spec else this_writer()
    if not options.read_only:
        _check_step_names(storage)
        claims.take(writer)
        try:
            fence_others(claims, writer)
        except BaseException:
            claims.fence(writer.id)
            raise
    steps = list_steps(storage)
    foreign = find_foreign(storage) if find_foreign is not None else {}
    return Opened(writer, tuple(steps), {step: name for step, name in foreign.items() if step not in steps})


def _check_step_names(storage: Storage) -> None:
    """Raises CheckpointError where a root calls its steps by names that this version reads and does not write."""
    names = read_step_names(storage)
    if names != StepNames():
        message = f"{storage.root} calls its steps like {names.name_of(7)}, and this version writes them as 7: open it with read_only=True"
        raise CheckpointError(message, path=storage.root)


def give_up_claim(storage: Storage, claims: Claims, writer: Writer) -> None:
    """Removes the claim of a single save, and the folder of claims where it is empty; what cannot be removed is left to the next writer."""
    try:
        claims.fence(writer.id)
        storage.delete([f"{FOLDER}/"])
    except OSError as error:
        _log.warning("the claim on %s could not be removed, the next writer does it: %s", storage.root, error)
