"""The record of a step for all processes of a group: the store is asked once, unless it is too
large for one service to send to all.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Self

from crc32c import crc32c

from holdfast.multihost import Group

from ..errors import StepGone
from ..format.limits import RECORD_LIMIT_BYTES
from ..format.record import Record, fetch_record, parse_fetched, read_record
from ..storage.base import Storage
from ..storage.path import join
from ..storage.tombstone import RECORD_NAME
from .exchange import hear

# of a compressed record: 1 GB from the primary's service to 4,096 processes
MESSAGE_BYTES = 256 << 10
_RECORD = b"record:"
_ROOMY_RECORD = b"record, and room for it:"
_CHECKSUM = b"checksum:"


@dataclass(frozen=True)
class RecordMessage:
    """The record as the primary sends it: whole, or its checksum, or nothing of it. With a whole
    one it says whether each process `has_room` for what it is to read.

    A record is much larger than all else of the message, so its bytes go as they are, compressed.
    """

    question: str
    record: bytes | None = None
    crc: int | None = None
    has_room: bool = False

    def to_bytes(self) -> bytes:
        """Returns the kind of the message, and what it says."""
        text = b""
        if self.record is not None:
            kind = _ROOMY_RECORD if self.has_room else _RECORD
            text = kind + zlib.compress(self.record, 1)
        elif self.crc is not None:
            text = b"%s%d" % (_CHECKSUM, self.crc)
        return b"%s\n%s" % (self.question.encode(), text)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Reads what `to_bytes` wrote, up to RECORD_LIMIT_BYTES."""
        head, _, text = data.partition(b"\n")
        question = head.decode()
        for kind in (_RECORD, _ROOMY_RECORD):
            if text.startswith(kind):
                body = zlib.decompressobj().decompress(text[len(kind) :], RECORD_LIMIT_BYTES)
                return cls(question, body, has_room=kind == _ROOMY_RECORD)
        return cls(question, crc=int(text[len(_CHECKSUM) :])) if text else cls(question)


class SentRecord(NamedTuple):
    """A record as all processes have it, and whether the primary has found room for it."""

    record: Record
    has_room: bool = False


def read_record_together(
    storage: Storage,
    step_dir: str,
    group: Group,
    name: str,
    *,
    question: str = "",
    timeout_s: float,
    find_room: Callable[[Record], bool] = lambda record: False,
) -> SentRecord:
    """Returns a step's record on every process of a group, which all call it alike. Blocks.

    The primary reads it and sends it on, compressed, by a message of that `name`, to those that ask
    the same `question`, even for another folder: they find out as they agree. Where that is
    more than MESSAGE_BYTES, each reads it from the store, and raises StepGone if it is no longer
    the same. Where the primary cannot read it, each finds out for itself. Raises as `read_record`
    does, and BarrierTimeout or ProcessLost where the primary does not answer within `timeout_s`.

    `find_room` says, at the primary, whether each process has the memory for what it is to read;
    all hear it alike, False where the record is not sent.
    """
    if group.count == 1:
        return SentRecord(read_record(storage, step_dir))
    if group.index:
        heard = hear(group, name, question, RecordMessage.from_bytes, timeout_s)
        data = heard.record
        if data is None:
            data = fetch_record(storage, step_dir)
            if heard.crc is not None and crc32c(data) != heard.crc:
                path = join(storage.root, step_dir, RECORD_NAME)
                raise StepGone(
                    f"{path}: the step was overwritten while it was being read; restore it again",
                    path=path,
                )
        return SentRecord(parse_fetched(data, storage, step_dir), heard.has_room)
    message = RecordMessage(question).to_bytes()
    try:
        data = fetch_record(storage, step_dir)
        record = parse_fetched(data, storage, step_dir)
        has_room = find_room(record)
        message = RecordMessage(question, data, has_room=has_room).to_bytes()
        if len(message) > MESSAGE_BYTES:
            has_room = False
            message = RecordMessage(question, crc=crc32c(data)).to_bytes()
        return SentRecord(record, has_room)
    finally:
        group.broadcast(name, message, timeout_s=timeout_s)
