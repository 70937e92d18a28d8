"""Reads local steps: their heads and records from whoever has the parts, to restore from."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable

from holdfast.multihost import Group

from ..agreement.exchange import ask_primary
from ..errors import CheckpointError, Corrupt, error_text
from ..format.limits import RECORD_LIMIT_BYTES
from ..format.record import Record, parse_record
from .host_folder import HostFolder
from .inventory import FoundStep, record_of
from .meeting import Meeting
from .parts import Part, StepHead
from .peer_storage import PeerConnection, Peers, PeerStorage


class StepReader:
    """Opens the local steps of a survey. For one thread; `folder` returns this host's."""

    def __init__(
        self, group: Group, meeting: Meeting, folder: Callable[[], HostFolder], timeout_s: float
    ) -> None:
        self._group = group
        self._meeting = meeting
        self._folder = folder
        self._timeout_s = timeout_s  # of one answer of a peer

    def open(self, step: FoundStep, name: str, timeout_s: float) -> tuple[PeerStorage, Record]:
        """Returns a step to read from; every process calls it. Blocks.

        `name` is that of the message. Raises CheckpointError, on every process.
        """

        def packed_record() -> str:
            # The primary alone has the reports of all parts, and builds the record of them.
            record = record_of(step, self.head(step))
            return base64.b64encode(zlib.compress(record, 1)).decode()

        packed: str = ask_primary(self._group, name, packed_record, timeout_s)
        record = zlib.decompressobj().decompress(base64.b64decode(packed), RECORD_LIMIT_BYTES)
        storage = self._storage_of(step, record)
        return storage, parse_record(record, f"{storage.root}/{step.key.folder}")

    def _storage_of(self, step: FoundStep, record: bytes) -> PeerStorage:
        meeting = self._meeting
        addresses = {rank: peer.address for rank, peer in enumerate(meeting.peers)}
        peers = Peers(addresses, meeting.secret, self._timeout_s, meeting.tls)
        # Each begins with another holder: all would ask the same one first.
        turns = [meeting.index % len(ranks) for ranks in step.holders]
        holders = [
            [*ranks[turn:], *ranks[:turn]] for turn, ranks in zip(turns, step.holders, strict=True)
        ]
        return PeerStorage(
            self._folder().storage,
            step.key.folder,
            record,
            holders,
            own=frozenset({meeting.lister}),
            peers=peers,
        )

    def head(self, step: FoundStep) -> StepHead:
        """Reads process 0's part, from whoever has it as its inventory said. Raises Corrupt."""
        name = step.key.part_name(0)
        failures: list[str] = []
        for rank in sorted(step.holders[0], key=lambda rank: rank != self._meeting.lister):
            try:
                part = Part.from_bytes(self._part_text(rank, name), name)
            except (OSError, CheckpointError) as error:
                failures.append(f"process {rank}: {error_text(error)}")
                continue
            head = _head_of(part, step)
            if head is not None:
                return head
            failures.append(f"process {rank} gave another part")
        raise Corrupt(
            f"local step {step.key.step}: the part of process 0 cannot be read:"
            f" {'; '.join(failures)}",
            step=step.key.step,
        )

    def _part_text(self, rank: int, name: str) -> bytes:
        meeting = self._meeting
        if rank == meeting.lister:
            return self._folder().storage.fetch(name, RECORD_LIMIT_BYTES)
        address = meeting.peers[rank].address
        with PeerConnection(address, meeting.secret, meeting.tls) as peer:
            return peer.wait(name, self._timeout_s)


def _head_of(part: Part, step: FoundStep) -> StepHead | None:
    """Returns the head of the part that the survey found; None for another one."""
    is_the_same = not step.reports or part.summary().report == step.reports[0]
    return part.head if part.key == step.key and is_the_same else None
