"""Copies parts of peers into this host's folder: each byte checked, at a bounded rate."""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from holdfast.multihost.peers.peer_connection import PeerConnection, PeerFailed

from ..agreement.save_protocol import PartGivenUp
from ..errors import SaveFailed
from ..format.item_report import FileReport
from ..options import Local
from ..restoring.reader import ItemReader
from ..saving.stager import OneSave
from ..storage import base
from .host_folder import HostFolder
from .meeting import Meeting
from .parts import LocalKey, Part
from .peer_storage import UnlistedFiles

PIECE_BYTES = 4 << 20  # of a copy, held at a time: what is larger stays with the allocator


class Throttle:
    """Lets at most `rate_bytes_s` go, on the average since it last stood idle. For one thread.

    Copies leave the network and the disks to others.
    """

    def __init__(
        self,
        rate_bytes_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate_bytes_s = rate_bytes_s
        self._clock = clock
        self._sleep = sleep
        self._free_s = clock()  # when what went before is paid for

    def take(self, nbytes: int) -> None:
        """Waits until so many bytes more may go."""
        now = self._clock()
        if self._free_s > now:
            self._sleep(self._free_s - now)
        self._free_s = max(self._free_s, now) + nbytes / self._rate_bytes_s


class PartCopier:
    """Pulls the parts of the processes that this one copies from. For one thread."""

    def __init__(self, local: Local, meeting: Meeting) -> None:
        self._local = local
        self._meeting = meeting
        self._throttle = Throttle(local.rate_bytes_s or math.inf)

    def copy(self, owner: int, key: LocalKey, folder: HostFolder, save: OneSave) -> Part:
        """Copies a part of a peer and publishes the copy in the folder. Blocks.

        Raises PartGivenUp, PeerFailed, SaveFailed, Corrupt, OSError.
        """
        try:
            return self._copy(owner, key, folder, save)
        except PeerFailed as error:
            raise PeerFailed(
                errno.EIO, f"process {owner}'s part was not copied: {error.strerror}"
            ) from error

    def _copy(self, owner: int, key: LocalKey, folder: HostFolder, save: OneSave) -> Part:
        meeting = self._meeting

        def remaining_s() -> float:
            return save.remaining_s or 0.001

        with PeerConnection(
            meeting.peers[owner].address, meeting.secret, meeting.tls, timeout_s=remaining_s()
        ) as peer:
            part, data = _fetch_part(peer, owner, key, folder.run, remaining_s())
            self._check_rate(sum(part.files.values()), save)
            self._copy_files(peer, part, folder, remaining_s)
        # Last, and only here: a part without all of its files is none.
        folder.publish(part, data)
        return part

    def _copy_files(
        self, peer: PeerConnection, part: Part, folder: HostFolder, remaining_s: Callable[[], float]
    ) -> None:
        source = _PartSource(peer, part, self._throttle, remaining_s)
        try:
            for reader, report in part.readers(source, step_bytes=PIECE_BYTES):
                for file in report.files:
                    copy_file(reader, file, folder)
        except BaseException:
            # The next copy writes over these files: making files anew costs more than writing.
            folder.storage.spare(part.files)
            raise

    def _check_rate(self, nbytes: int, save: OneSave) -> None:
        """Refuses to begin what cannot be done in time."""
        rate = self._local.rate_bytes_s
        left_s = save.remaining_s
        if rate is not None and nbytes / rate > left_s:
            raise SaveFailed(
                f"a copy of {nbytes:,} bytes takes {nbytes / rate:,.0f} s at"
                f" rate_bytes_s={rate:,.0f}, and {left_s:,.0f} s are left of"
                f" timeout_s={self._local.timeout_s:g}; expected a rate that suffices"
            )


@dataclass(frozen=True)
class _PartSource(UnlistedFiles):
    """The files of a peer's part as a store to read from, at a bounded rate. For one thread."""

    max_concurrency = 1

    peer: PeerConnection
    part: Part
    throttle: Throttle
    remaining_s: Callable[[], float]

    @property
    def root(self) -> str:
        return self.peer.address

    def read_sized(
        self, name: str, offset: int, buffers: Sequence[memoryview]
    ) -> tuple[int, int | None]:
        """Fills the buffers; of the file there is as much as its part says: see TellsSizes."""
        return self.read(name, offset, buffers), self.part.files[name]

    def read(self, name: str, offset: int, buffers: Sequence[memoryview]) -> int:
        self.throttle.take(sum(buffer.nbytes for buffer in buffers))
        return self.peer.read(name, offset, buffers, self.remaining_s())

    def fetch(self, name: str, limit_bytes: int) -> bytes:
        """Raises FileNotFoundError: a part is no step, and has no record."""
        raise FileNotFoundError(errno.ENOENT, "there is no record", name)


def _fetch_part(
    peer: PeerConnection, owner: int, key: LocalKey, run: str, timeout_s: float
) -> tuple[Part, bytes]:
    """Returns a peer's part once it is published, and its text."""
    name = key.part_name(owner)
    try:
        data = peer.wait(name, timeout_s)
    except FileNotFoundError:
        raise PartGivenUp(f"process {owner} has given its part of step {key.step} up") from None
    part = Part.from_bytes(data, f"{peer.address}: {name}")
    # The peer may serve the folder of another run, or an earlier life of this step.
    if (part.run, part.key, part.process) != (run, key, owner):
        raise PeerFailed(
            errno.EIO,
            f"process {owner} gave process {part.process}'s part of {part.key}, where its own of"
            f" {key} was asked for",
        )
    return part, data


def copy_file(reader: ItemReader, report: FileReport, folder: HostFolder) -> None:
    """Copies one file of a part and checks every byte of it against its report."""
    folder.storage.write(reader.name_of(report), report.size, _placed(reader.pieces(report)))


def _placed(pieces: Iterable[memoryview]) -> Iterator[base.Part]:
    """Yields the pieces of a file with their offsets."""
    offset = 0
    for piece in pieces:
        yield offset, [piece]
        offset += piece.nbytes
