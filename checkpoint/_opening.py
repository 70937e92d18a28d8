"""Opening a root together: the primary takes the claim, fences the dead and lists the steps; all others hear of it in one message."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from holdfast.coordination import HoldfastError
from holdfast.multihost import Group, ProcessSpec

from ._agreement import describe, told_error
from ._claims import Claims, Writer, this_writer
from ._errors import CheckpointError
from ._keeping import fence_others, list_steps
from ._layouts import find_steps
from ._options import Options
from ._storage import Storage


@dataclass(frozen=True)
class Opened:
    """What all processes know after the opening: the writer, the steps that are there, and other people's, with their folders' names."""

    writer: Writer
    steps: tuple[int, ...]
    foreign: Mapping[int, str] = field(default_factory=dict)


def open_root(storage: Storage, claims: Claims, group: Group, options: Options) -> Opened:
    """Opens a root for a group; every process calls it. Raises, on every process, what the primary ran into."""
    name = f"checkpoint/open/{hashlib.sha256(storage.root.encode()).hexdigest()[:16]}"
    if group.index:
        return _heard(group.broadcast(name, None, timeout_s=options.save_timeout_s))
    try:
        opened = _open(storage, claims, options)
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


def _open(storage: Storage, claims: Claims, options: Options) -> Opened:
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
    foreign = {step: name for step, (name, _) in find_steps(storage, foreign_only=True).items() if step not in steps}
    return Opened(writer, tuple(steps), foreign)


def _heard(data: bytes) -> Opened:
    told = json.loads(data)
    if "kind" in told:
        raise told_error(told["kind"], told["message"], {})
    return Opened(Writer(**told["writer"]), tuple(told["steps"]), {int(step): name for step, name in told["foreign"].items()})


__all__ = ["Opened", "open_root"]
