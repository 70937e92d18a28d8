"""Opening a root together: the primary takes the claim, fences the dead and lists the steps; all others hear of it in one message."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

from holdfast.coordination import HoldfastError
from holdfast.multihost import Group, ProcessSpec

from ..errors import CheckpointError, describe, told_error
from ..format.files import list_steps
from ..options import Options
from ..storage.base import Storage
from .claims import Claims, Writer, this_writer
from .garbage import fence_others


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
        return _heard(group.broadcast(name, None, timeout_s=options.save_timeout_s))
    try:
        opened = _open(storage, claims, options, find_foreign)
    except Exception as error:
        failure = error if isinstance(error, HoldfastError) else CheckpointError(f"cannot open {storage.root}: {describe(error)}")
        told = {"kind": type(failure).__name__, "message": failure.message}
        group.broadcast(name, json.dumps(told).encode(), timeout_s=options.save_timeout_s)
        if failure is error:
            raise
        raise failure from error
    told_all = {"writer": asdict(opened.writer), "steps": opened.steps, "foreign": dict(opened.foreign)}
    group.broadcast(name, json.dumps(told_all).encode(), timeout_s=options.save_timeout_s)
    return opened


def _open(storage: Storage, claims: Claims, options: Options, find_foreign: Callable[[Storage], dict[int, str]] | None) -> Opened:
    spec = ProcessSpec.from_env(os.environ)
    writer = this_writer(spec.job_id, spec.attempt) if spec else this_writer()
    if not options.read_only:
        claims.take(writer)
        try:
            fence_others(claims, writer)
        except BaseException:
            claims.fence(writer.id)
            raise
    steps = list_steps(storage)
    foreign = find_foreign(storage) if find_foreign is not None else {}
    return Opened(writer, tuple(steps), {step: name for step, name in foreign.items() if step not in steps})


def _heard(data: bytes) -> Opened:
    told = json.loads(data)
    if "kind" in told:
        raise told_error(told["kind"], told["message"], {})
    return Opened(Writer(**told["writer"]), tuple(told["steps"]), {int(step): name for step, name in told["foreign"].items()})
