"""Reads a local step from wherever the copies of its parts are: its record is built from them."""

from __future__ import annotations

import base64
import contextlib
import zlib
from collections.abc import Iterator

from holdfast.multihost.peers.peer_connection import PeerConnection, Peers

from ..agreement.exchange import ask_primary
from ..agreement.group_record import MESSAGE_BYTES
from ..errors import CheckpointError, Corrupt, error_text, is_shortage
from ..format.limits import RECORD_LIMIT_BYTES
from ..format.record import parse_record
from ..layouts.holdfast import HoldfastCheckpoint
from .host_place import HostPlace
from .inventory import FoundStep, record_of
from .parts import Part, StepHead
from .peer_storage import PeerStorage


@contextlib.contextmanager
def open_step(place: HostPlace, step: FoundStep, question: str) -> Iterator[HoldfastCheckpoint]:
    """Opens a local step to read from; every process calls it, with the same `question`. Blocks.

    Raises, on every process, why there is no record of the step; PeerFailed where this process
    could not fetch it.
    """
    folder = step.key.folder
    text_name = f"{folder}/record"
    told: str = ask_primary(
        place.root.group,
        f"{place.messages}/record",
        lambda: _pack_record(place, step, text_name),
        place.root.options.restore_timeout_s,
        question=question,
    )
    packed = base64.b64decode(told) if told else _text_of(place, 0, text_name)
    data = zlib.decompressobj().decompress(packed, RECORD_LIMIT_BYTES)
    with contextlib.closing(_storage_of(place, step, data)) as storage:
        record = parse_record(data, f"{storage.root}/{folder}")
        yield HoldfastCheckpoint(storage, folder, record)


def _pack_record(place: HostPlace, step: FoundStep, text_name: str) -> str:
    """Returns the record as a text, "" where each process has to fetch it by its name."""
    # The primary alone has the reports of all parts, and builds the record of them.
    packed = zlib.compress(record_of(step, read_head(place, step)), 1)
    server = place.meeting.server
    if len(packed) <= MESSAGE_BYTES or server is None:
        return base64.b64encode(packed).decode()
    # Larger than what one service sends to all: each fetches it.
    server.offer(text_name, packed)
    return ""


def read_head(place: HostPlace, step: FoundStep) -> StepHead:
    """Reads process 0's part, from whoever has it as its inventory said. Raises Corrupt."""
    name = step.key.part_name(0)
    failures: list[str] = []
    for rank in sorted(step.holders[0], key=lambda rank: rank != place.meeting.lister):
        try:
            part = Part.from_bytes(_part_text(place, rank, name), name)
        except (OSError, CheckpointError) as error:
            if is_shortage(error):
                raise
            failures.append(f"process {rank}: {error_text(error)}")
            continue
        head = _head_of(part, step)
        if head is not None:
            return head
        failures.append(f"process {rank} gave another part")
    raise Corrupt(
        f"local step {step.key.step}: the part of process 0 cannot be read: {'; '.join(failures)}",
        step=step.key.step,
    )


def _head_of(part: Part, step: FoundStep) -> StepHead | None:
    """Returns the head of the part that the survey found; None for another one."""
    is_the_same = not step.reports or part.summary().report == step.reports[0]
    return part.head if part.key == step.key and is_the_same else None


def _part_text(place: HostPlace, rank: int, name: str) -> bytes:
    if rank == place.meeting.lister:
        return place.folders.current().storage.fetch(name, RECORD_LIMIT_BYTES)
    return _text_of(place, rank, name)


def _text_of(place: HostPlace, rank: int, name: str) -> bytes:
    meeting = place.meeting
    timeout_s = place.local.timeout_s
    address = meeting.peers[rank].address
    with PeerConnection(address, meeting.secret, meeting.tls, timeout_s=timeout_s) as peer:
        return peer.wait(name, timeout_s)


def _storage_of(place: HostPlace, step: FoundStep, record: bytes) -> PeerStorage:
    meeting = place.meeting
    addresses = dict(enumerate(peer.address for peer in meeting.peers))
    peers = Peers(addresses, meeting.secret, place.local.timeout_s, meeting.tls)
    holders = []
    for ranks in step.holders:
        # Each begins with another holder: all would ask the same one first.
        turn = meeting.index % len(ranks)
        holders.append([*ranks[turn:], *ranks[:turn]])
    return PeerStorage(
        place.folders.current().storage,
        step.key.folder,
        record,
        holders,
        own=frozenset({meeting.lister}),
        peers=peers,
    )
