"""The local steps of a root as one process knows them: surveyed, saved, and read to restore."""

from __future__ import annotations

import base64
import logging
import threading
import zlib

from ..agreement.exchange import ask_primary
from ..agreement.group_record import MESSAGE_BYTES
from ..agreement.save_protocol import (
    BranchStart,
    SaveResult,
    local_saves_to_delete,
)
from ..errors import (
    CheckpointError,
    Corrupt,
    StepGone,
    StepNotFound,
    error_text,
    naming_path,
)
from ..format.limits import RECORD_LIMIT_BYTES
from ..format.record import Record, parse_record
from ..peers.peer_connection import PeerConnection, Peers
from ..saving.commit import run_protocol
from ..saving.stager import OneSave
from ..steps.lineage import Branch, read_branches, run_of
from ..steps.root_report import HostCopies
from ..storage.base import Storage
from .host_folder import HostFolder
from .inventory import FoundStep, Inventory, record_of, survey
from .local_save import HostPlace, LocalSave
from .parts import LocalKey, Part, StepHead, has_left
from .peer_storage import PeerStorage

_log = logging.getLogger(__name__)


class LocalSteps:
    """The local steps that may come back, best first. Thread-safe.

    `off` is why no local saves are made, or "". `is_unsure`: see `agreement.save_protocol`.
    """

    def __init__(self, root: Storage, place: HostPlace) -> None:
        self._root = root
        self._place = place
        self._lock = threading.Lock()
        self._found: list[FoundStep] = []  # with reports at the primary alone
        self._passed_over: set[LocalKey] = set()
        self.off = place.meeting.why_off
        self.copied_bytes = 0
        self.is_unsure = False  # from an outcome that was not heard until the next survey

    def survey(self, name: str, timeout_s: float) -> None:
        """Finds out what there is; every process calls it. Blocks. `name` is of its messages."""
        group = self._place.group
        fields = ask_primary(group, f"{name}/branches", self._read_branches, timeout_s)
        branches = [Branch(**each) for each in fields]
        own = Inventory(error=self.off or self._place.meeting.own_error)
        if not own.error:
            own = self._list(run_of(branches))
        verdict = survey(group, name, own, branches, timeout_s)
        with self._lock:
            self.off = self.off or verdict.why_off
            self._found = list(verdict.steps)
            self.is_unsure = False

    def _read_branches(self) -> list[Branch]:
        with naming_path(self._root.root):
            return read_branches(self._root)

    def _list(self, run: str) -> Inventory:
        """Returns what this process lists of its folder, and serves it."""
        if not run:
            return Inventory()
        place = self._place
        try:
            folder = place.folders.open(run)
            parts = folder.scan() if place.meeting.is_lister else []
        except CheckpointError as error:
            return Inventory(error=f"process {place.group.index}: {error_text(error)}")
        except OSError as error:
            _log.warning("%s cannot be listed, and counts as empty: %s", place.path, error)
            return Inventory()
        for part in parts:
            place.serve(part, folder)
        return Inventory([part.summary() for part in parts])

    def save(self, save: OneSave) -> SaveResult:
        """Does a local save with all processes. Blocks for its time; a failure is in the result."""
        is_unsure = self.is_unsure
        known = None if is_unsure else [step.key for step in self.restorable()]
        work = LocalSave(self._place, save, known)
        result = run_protocol(save, work, is_unsure=is_unsure)
        self._take_note(work, result)
        if work.branch is not None:
            # Its file is durable, whatever became of the save.
            self.leave(work.branch)
        if work.key is not None and work.folder is not None:
            try:
                goes = self._ended(work.key, work.folder, result)
                work.delete(goes, [step.key for step in self.restorable()], result)
            except OSError as error:  # it is tried again after the next save
                path = work.folder.path
                _log.warning("local steps in %s could not be deleted yet: %s", path, error)
        if result.survey:
            self._survey_after(save)
        return result

    def _survey_after(self, save: OneSave) -> None:
        """Surveys on the saving thread, since some process does not know what there is.

        Until then that process keeps all that it has: without a survey its memory would fill up.
        """
        # A name of its own: a process that did not hear of this survey is in step at the next.
        name = f"{self._place.messages}/{save.key.save_id}"
        try:
            self.survey(name, self._place.local.timeout_s)
        except Exception as error:
            _log.warning("no survey after the local save of step %d: %s", save.step, error)

    def _ended(self, key: LocalKey, folder: HostFolder, result: SaveResult) -> list[LocalKey]:
        """Knows a save that has ended; returns the local saves of this process that go now."""
        keep = self._place.local.keep
        known = self.restorable()
        if result.error is None:
            with self._lock:
                self._found = [FoundStep(key, [], self._place.meeting.holders()), *known][:keep]
        return local_saves_to_delete(
            key,
            result,
            known=[step.key for step in known],
            written=folder.saves(),
            keep=keep,
            is_unsure=self.is_unsure,
        )

    def _take_note(self, work: LocalSave, result: SaveResult) -> None:
        """Notes why the tier ends, and that an outcome was not heard."""
        with self._lock:
            self.copied_bytes += work.copied_bytes
            self.off = self.off or result.lane_off
            # What was not heard is neither yes nor no: a survey looks.
            self.is_unsure = self.is_unsure or result.is_unclear

    def restorable(self) -> list[FoundStep]:
        """Returns the local steps that may come back, but for those that did not restore."""
        with self._lock:
            return [step for step in self._found if step.key not in self._passed_over]

    def copies(self) -> dict[int, HostCopies]:
        """Returns where the parts of each of these steps are."""
        hosts = self._place.meeting.hosts
        return {
            step.key.step: HostCopies(step.survives(hosts), step.holders)
            for step in reversed(self.restorable())
        }

    def newest_survives(self) -> int:
        """Returns how many hosts may be lost before the newest local step is."""
        with self._lock:
            newest = self._found[0] if self._found else None
        return 0 if newest is None else newest.survives(self._place.meeting.hosts)

    def pass_over(self, key: LocalKey) -> None:
        """Notes that a local step could not be restored."""
        with self._lock:
            self._passed_over.add(key)

    def replace(self, step: int) -> None:
        """Lets no local save of a step come back: the store has another of that number by now."""
        with self._lock:
            self._passed_over.update(found.key for found in self._found if found.key.step == step)

    def leave(self, branch: BranchStart) -> None:
        """Knows no local step any more that a branch has left."""
        with self._lock:
            self._found = [found for found in self._found if not has_left(branch, found.key)]

    def forget_from(self, step: int) -> None:
        """Knows no local step from `step` on any more; the root says by now that they are dead."""
        with self._lock:
            self._found = [found for found in self._found if found.key.step < step]

    # --- reading

    def head(self, step: int) -> StepHead:
        """Returns what process 0's part of a local step says. Raises StepNotFound, Corrupt."""
        with self._lock:
            found = next((found for found in self._found if found.key.step == step), None)
        if found is None:
            raise StepNotFound(f"there is no local step {step}", step=step)
        return self._head(found)

    def open(self, key: LocalKey, question: str) -> tuple[PeerStorage, Record]:
        """Returns a step to read from; every process calls it, with the same `question`. Blocks.

        Raises, on every process, why there is no record of the step; PeerFailed where this process
        could not fetch it, StepGone where a durable save has replaced or left the step meanwhile.
        """
        with self._lock:
            step = next((step for step in self._found if step.key == key), None)
        if step is None:
            raise StepGone(
                f"local step {key.step} is no longer one of the root's: a durable save has replaced"
                " it, or left it behind; restore again",
                step=key.step,
            )
        name = f"{self._place.messages}/record"
        timeout_s = self._place.options.restore_timeout_s
        text_name = f"{key.folder}/record"

        def pack() -> str:
            # The primary alone has the reports of all parts, and builds the record of them.
            packed = zlib.compress(record_of(step, self._head(step)), 1)
            server = self._place.meeting.server
            if len(packed) <= MESSAGE_BYTES or server is None:
                return base64.b64encode(packed).decode()
            # Larger than what one service sends to all: each fetches it.
            server.offer(text_name, packed)
            return ""

        told: str = ask_primary(self._place.group, name, pack, timeout_s, question=question)
        packed = base64.b64decode(told) if told else self._text_of(0, text_name)
        record = zlib.decompressobj().decompress(packed, RECORD_LIMIT_BYTES)
        storage = self._storage_of(step, record)
        return storage, parse_record(record, f"{storage.root}/{step.key.folder}")

    def _storage_of(self, step: FoundStep, record: bytes) -> PeerStorage:
        meeting = self._place.meeting
        addresses = {rank: peer.address for rank, peer in enumerate(meeting.peers)}
        peers = Peers(addresses, meeting.secret, self._place.local.timeout_s, meeting.tls)
        # Each begins with another holder: all would ask the same one first.
        turns = [meeting.index % len(ranks) for ranks in step.holders]
        holders = [
            [*ranks[turn:], *ranks[:turn]] for turn, ranks in zip(turns, step.holders, strict=True)
        ]
        return PeerStorage(
            self._place.folders.current().storage,
            step.key.folder,
            record,
            holders,
            own=frozenset({meeting.lister}),
            peers=peers,
        )

    def _head(self, step: FoundStep) -> StepHead:
        """Reads process 0's part, from whoever has it as its inventory said. Raises Corrupt."""
        name = step.key.part_name(0)
        failures: list[str] = []
        for rank in sorted(step.holders[0], key=lambda rank: rank != self._place.meeting.lister):
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
        meeting = self._place.meeting
        if rank == meeting.lister:
            return self._place.folders.current().storage.fetch(name, RECORD_LIMIT_BYTES)
        return self._text_of(rank, name)

    def _text_of(self, rank: int, name: str) -> bytes:
        meeting = self._place.meeting
        address = meeting.peers[rank].address
        timeout_s = self._place.local.timeout_s
        with PeerConnection(address, meeting.secret, meeting.tls, timeout_s=timeout_s) as peer:
            return peer.wait(name, timeout_s)


def _head_of(part: Part, step: FoundStep) -> StepHead | None:
    """Returns the head of the part that the survey found; None for another one."""
    is_the_same = not step.reports or part.summary().report == step.reports[0]
    return part.head if part.key == step.key and is_the_same else None
