"""The record of a step for all processes of a group: the store is asked once, unless it is too
large for one service to send to all.
"""

from __future__ import annotations

import zlib

from crc32c import crc32c

from holdfast.multihost import Group

from ..errors import StepGone
from ..format.limits import RECORD_LIMIT_BYTES
from ..format.record import Record, fetch_record, parse_fetched, read_record
from ..storage.base import Storage
from ..storage.path import join
from ..storage.tombstone import RECORD_NAME

MESSAGE_BYTES = (
    256 << 10
)  # of a compressed record: 1 GB from the primary's service to 4,096 processes

_RECORD = b"record"
_CHECKSUM = b"checksum"
_NOTHING = b"nothing"  # kinds of messages


def read_record_together(
    storage: Storage, step_dir: str, group: Group, name: str, *, timeout_s: float
) -> Record:
    """Returns a step's record on every process of a group, which all call it alike; `name` is that
    of its message. Blocks.

    The primary reads it and sends it on, compressed. Where that is more than MESSAGE_BYTES, each
    reads it from the store, and raises StepGone if it is no longer the same. Where the primary
    cannot read it, each finds out for itself. Raises as `read_record` does, and BarrierTimeout or
    ProcessLost where the primary does not answer within `timeout_s`.
    """
    if group.count == 1:
        return read_record(storage, step_dir)
    if group.index == 0:
        return _read_and_send(storage, step_dir, group, name, timeout_s)
    path = join(storage.root, step_dir, RECORD_NAME)
    kind, _, body = group.broadcast(name, None, timeout_s=timeout_s).partition(b":")
    if kind == _RECORD:
        data = zlib.decompressobj().decompress(body, RECORD_LIMIT_BYTES)
    else:
        data = fetch_record(storage, step_dir)
        if kind == _CHECKSUM and crc32c(data) != int(body):
            raise StepGone(
                f"{path}: the step was overwritten while it was being read; restore it again",
                path=path,
            )
    return parse_fetched(data, storage, step_dir)


def _read_and_send(
    storage: Storage, step_dir: str, group: Group, name: str, timeout_s: float
) -> Record:
    message = _NOTHING
    try:
        data = fetch_record(storage, step_dir)
        record = parse_fetched(data, storage, step_dir)
        packed = zlib.compress(data, 1)
        message = (
            _RECORD + b":" + packed
            if len(packed) <= MESSAGE_BYTES
            else b"%s:%d" % (_CHECKSUM, crc32c(data))
        )
        return record
    finally:
        group.broadcast(name, message, timeout_s=timeout_s)
