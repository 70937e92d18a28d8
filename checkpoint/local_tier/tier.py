"""The local tier of a manager: saves into the memory or onto the disks of the hosts, copies at
peers, and restores from whoever is there.

A local save is a lane of its own beside the durable one: the primary begins it, each process writes
its part and then pulls the parts of its wards, all report, and the primary says how it ended.
Nothing is made durable, and no word of it is needed later: what comes back is decided from the
parts that are found.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import json
import logging
import math
import os
import secrets
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from holdfast.multihost import Group, current_spec
from holdfast.multihost.group.runtime import host_address, tls_files

from ..agreement.exchange import SentError, ask_primary
from ..agreement.save_protocol import (
    PartGivenUp,
    SaveReport,
    SaveResult,
    TierTooLarge,
    check_save_reports,
)
from ..errors import (
    CheckpointError,
    Corrupt,
    SaveCancelled,
    SaveFailed,
    StepNotFound,
    error_text,
    failure_of,
    naming_path,
)
from ..format.item_report import FileReport
from ..format.limits import RECORD_LIMIT_BYTES, check_step
from ..format.record import Record, parse_record
from ..layouts.holdfast import HoldfastCheckpoint
from ..layouts.inspection import Structure, structure_of
from ..options import Local, Options
from ..saving.async_saver import AsyncSaver, SaveHandle
from ..saving.commit import SaveTarget
from ..saving.record_builder import tree_text
from ..saving.save import MESSAGE_NAMES, SnapshotWork
from ..saving.scheduler import SaveScheduler
from ..saving.stager import SaveOrder, SaveRequest, SaveStager
from ..steps.lineage import Branch, Lineage, NoLineage, read_branches, run_of
from ..steps.root_report import HostCopies
from ..storage.base import Storage
from ..storage.local import make_folders, sync_folder, write_all
from ..storage.path import StorePath
from .host_folder import HostFolder, HostStorage, read_checked
from .pace import Pace
from .part_server import PartServer
from .parts import FoundStep, LocalKey, Part, StepHead, living_steps, record_of
from .peer_storage import PeerConnection, PeerFailed, Peers, PeerStorage
from .peer_tls import PeerTls
from .placement import Member, place_copies, wards_of

_log = logging.getLogger(__name__)
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
OLD_MARK_S = 3600.0
MOST_FOUND = 16  # local steps that are told to all
T = TypeVar("T")


class _Peer(NamedTuple):
    """What all processes know of one: host, machine, slice, the address of its part server, its
    folder, and the mark that it made there.
    """

    host: str
    machine: str
    slice_id: int
    address: str
    folder: str
    mark: str
    has_tls: bool = False
    error: str = ""


class LocalTier:
    """The local tier of one manager on one process. In a group every process calls the same, in the
    same order.

    Methods are for the manager's thread; saves run on a thread of their own. `close()` waits for
    the save in flight.
    """

    def __init__(
        self,
        local: Local,
        storage: Storage,
        group: Group,
        options: Options,
        writer_id: str,
        lineage: Lineage | NoLineage,
    ) -> None:
        local_path = os.path.abspath(os.fspath(local.path))
        self._local, self.storage, self._group, self._lineage = (
            local,
            HostStorage(local_path),
            group,
            lineage,
        )
        self._root = storage
        self.options = replace(
            options, progress=None, check_free_space=False, save_timeout_s=local.timeout_s
        )
        self._root_timeout_s = options.save_timeout_s
        self._writer_id = writer_id
        self._messages = f"checkpoint/{writer_id}/local"
        self._path = Path(local_path)
        self._pace = Pace(local.rate_bytes_s or math.inf)
        self._counter = 0
        self._saver = AsyncSaver(self)
        self._folder: HostFolder | None = None
        self._server: PartServer | None = None
        self._found: list[
            FoundStep
        ] = []  # what may come back, best first; with reports at the primary alone
        self._passed_over: set[LocalKey] = set()
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(
            (
                "saves",
                "saves_failed",
                "save_s",
                "save_bytes",
                "copied_bytes",
                "restores",
                "restores_failed",
            ),
            0.0,
        )
        self._off = self._error = ""
        self._mark = ""
        files = tls_files()
        self._tls = None if files is None else PeerTls(*files)
        self._stager = SaveStager(self.storage, group, self.options)
        self._scheduler: SaveScheduler | None = None
        try:
            self._peers, self._secret = self._meet()
            members = [
                Member(rank, peer.host, peer.slice_id) for rank, peer in enumerate(self._peers)
            ]
            self._copies = place_copies(members, local.replicas)
            self._wards = wards_of(self._copies, group.index)
            firsts: dict[str, int] = {}
            self._keepers = [
                firsts.setdefault(peer.folder, rank) for rank, peer in enumerate(self._peers)
            ]
            self._check_alone_in_folder()
            self.survey()
            if self._off and local.strict:
                raise CheckpointError(
                    f"the local tier of {storage.root} cannot be used: {self._off}", path=local_path
                )
        except BaseException:
            self.close(0.0)
            raise
        self._scheduler = SaveScheduler(
            local.save_policy, group, f"{self._messages}/soon", skips=True
        )
        if self._off and group.index == 0:
            _log.warning("the local tier of %s is off: %s", storage.root, self._off)

    # --- meeting the others

    def _meet(self) -> tuple[list[_Peer], bytes]:
        """Returns what all processes are, and the secret of this meeting."""
        secret = secrets.token_bytes(32)
        name = f"{self._messages}/meet"
        timeout_s = self._local.timeout_s
        if self._group.index == 0:
            message = secret.hex().encode()
            self._group.broadcast(f"{name}/secret", message, timeout_s=timeout_s)
        else:
            secret = bytes.fromhex(
                self._group.broadcast(f"{name}/secret", None, timeout_s=timeout_s).decode()
            )
        gathered = self._group.gather(
            f"{name}/peers", json.dumps(self._introduce(secret)).encode(), timeout_s=timeout_s
        )
        told = None if gathered is None else zlib.compress(b"[" + b",".join(gathered) + b"]", 1)
        peers = json.loads(
            zlib.decompress(self._group.broadcast(f"{name}/all", told, timeout_s=timeout_s))
        )
        return [_Peer(*peer) for peer in peers], secret

    def _introduce(self, secret: bytes) -> _Peer:
        """Makes the folder and the part server, and says who this process is; what it cannot make
        is its error.
        """
        spec, machine = current_spec(), _boot_id()
        host = self._local.failure_domain or machine
        peer = _Peer(
            host,
            machine,
            0 if spec is None else spec.slice_id,
            "",
            f"{host} {self._group.index}",
            "",
        )
        try:
            device, inode = self._make_folder(host)
            peer = peer._replace(folder=f"{host} {device} {inode}", mark=self._mark)
            if self._group.count > 1:
                self._server = self._make_server(secret)
                peer = peer._replace(address=self._server.address, has_tls=self._tls is not None)
        except (OSError, CheckpointError) as error:
            return peer._replace(error=f"process {self._group.index}: {error_text(error)}")
        return peer

    def _make_folder(self, host: str) -> tuple[int, int]:
        """Makes this host's folder and a mark in it; returns which folder it is."""
        if self._path.is_symlink():
            raise CheckpointError(
                f"{self._path} is a link; expected a folder of this host, or none"
            )
        try:
            make_folders(self._path.parent, None)
            self._path.mkdir(mode=0o700, exist_ok=True)
            if self._local.sync:
                sync_folder(self._path.parent)
            self._mark = f"mark-{secrets.token_hex(8)}"
            (self._path / self._mark).write_text(host)
            found = self._path.stat()
        except OSError as error:
            why = (
                f"{error.strerror or error}; expected a folder that this process may write to, or"
                " none"
            )
            raise CheckpointError(f"{self._path} cannot be written: {why}") from error
        return found.st_dev, found.st_ino

    def _make_server(self, secret: bytes) -> PartServer:
        if self._tls is not None:
            self._tls.check()
        address = self._local.address or _own_address()
        try:
            return PartServer(address, secret, self._tls)
        except OSError as error:
            why = (
                f"{error.strerror or error}; expected an address of this host in Local(address=...)"
            )
            raise CheckpointError(f"peers cannot be served at {address}: {why}") from error

    def _check_alone_in_folder(self) -> None:
        """Notes the first error of all, and where another host writes into this folder: copies
        there would be none.
        """
        self._off = next(
            (peer.error for peer in self._peers if peer.error), ""
        ) or _why_unreachable(self._peers)
        own, marks = (
            self._peers[self._group.index],
            {peer.mark: peer for peer in self._peers if peer.mark},
        )
        try:
            there = list(self._path.glob("mark-*"))
            strangers = [
                marks[path.name]
                for path in there
                if path.name in marks and marks[path.name].host != own.host
            ]
            if strangers:
                self._error = (
                    f"{self._path} is shared by the hosts {own.host} and {strangers[0].host};"
                    " expected a folder of one host"
                )
            for path in there if self._is_keeper else ():
                with contextlib.suppress(
                    FileNotFoundError
                ):  # a younger one may be of another job that opens here now
                    if path.name not in marks and time.time() - path.stat().st_mtime > OLD_MARK_S:
                        path.unlink()
        except OSError as error:
            self._error = f"process {self._group.index}: {error_text(error)}"

    @property
    def _is_keeper(self) -> bool:
        """Whether this process is the one that lists its folder, and cleans it."""
        return self._keepers[self._group.index] == self._group.index

    # --- what is there

    def survey(self) -> None:
        """Finds out which local steps may come back, from all that is there now; every process
        calls it. Blocks.
        """
        name = f"{self._messages}/survey"
        timeout_s = self.options.restore_timeout_s
        self._saver.join(timeout_s)
        branches: list[list[Any]] = ask_primary(
            self._group, f"{name}/run", self._read_branches, timeout_s
        )
        run = run_of([Branch(*branch) for branch in branches])
        inventory = json.dumps(self._error or self._list(run)).encode()
        gathered = self._group.gather(f"{name}/parts", inventory, timeout_s=timeout_s)
        told = None
        if gathered is not None:
            wrong = next((json.loads(data) for data in gathered if data.startswith(b'"')), "")
            self._found = (
                []
                if wrong or self._off
                else living_steps(gathered, [Branch(*each) for each in branches])[:MOST_FOUND]
            )
            told = zlib.compress(
                json.dumps(
                    [wrong, [[*found.key, found.holders] for found in self._found]]
                ).encode(),
                1,
            )
        wrong, found = json.loads(
            zlib.decompress(self._group.broadcast(f"{name}/found", told, timeout_s=timeout_s))
        )
        self._off = self._off or wrong
        if self._group.index:
            self._found = [FoundStep(LocalKey(*key), [], holders) for *key, holders in found]

    def _read_branches(self) -> list[list[Any]]:
        with naming_path(self._root.root):
            return [
                [each.run, each.number, each.writer, each.base]
                for each in read_branches(self._root)
            ]

    def _list(self, run: str) -> list[Any]:
        """Returns the inventory of this process's folder, where it is the one that lists it, and
        serves what is in it.
        """
        if run and not self._off:
            self._open_folder(run)
        if self._folder is None or not self._is_keeper or self._folder.run != run:
            return []
        try:
            parts = self._folder.scan()
        except OSError as error:
            _log.warning("%s cannot be listed, and counts as empty: %s", self._folder.path, error)
            return []
        for part in parts:
            self._serve(part)
        return [part.summary() for part in parts]

    def _open_folder(self, run: str) -> HostFolder:
        if self._folder is None or self._folder.run != run:
            self._folder = HostFolder(self._path, run, syncs=self._local.sync)
        return self._folder

    def _serve(self, written: Part) -> None:
        if self._server is not None and self._folder is not None:
            self._server.publish(self._folder.path, written)

    def found(self) -> list[LocalKey]:
        """Returns the local steps that may come back, best first, but for those that did not
        restore.
        """
        return [found.key for found in self._restorable()]

    def _restorable(self) -> list[FoundStep]:
        with self._lock:
            return [found for found in self._found if found.key not in self._passed_over]

    def steps(self) -> list[int]:
        """Returns the local steps that may come back, ascending."""
        return sorted({key.step for key in self.found()})

    def copies(self) -> dict[int, HostCopies]:
        """Returns where the parts of each of these steps are, as of the last survey or save."""
        hosts = [peer.host for peer in self._peers]
        return {
            each.key.step: HostCopies(each.survives(hosts), each.holders)
            for each in reversed(self._restorable())
        }

    def pass_over(self, key: LocalKey) -> None:
        """Notes that a local step could not be restored."""
        self._passed_over.add(key)
        self._count(restores_failed=1)

    def roll_back(self, step: int, begin: Callable[[], None]) -> None:
        """Lets no local step from `step` on come back: `begin` has the root say so, at the primary.

        Every process calls it. Blocks. Raises, on every process, what `begin` raises.
        """
        timeout_s = self._root_timeout_s
        ask_primary(self._group, f"checkpoint/{self._writer_id}/delete", begin, timeout_s)
        self.forget_from(step)

    def forget_from(self, step: int) -> None:
        """Knows no local step from `step` on any more; the root says by now that they are dead."""
        with self._lock:
            self._found = [found for found in self._found if found.key.step < step]

    # --- saving

    def wants(self, step: int) -> bool:
        """Says whether `save` is to be called for a step; alike on every process. A lane that is
        busy skips.
        """
        if self._scheduler is None or (self._off and self._group.count == 1):
            return False
        return bool(self._scheduler.reason(step, busy=self._saver.busy() or bool(self._off)))

    def started(self, step: int) -> None:
        """Notes that a step is being saved, here or in the store: a preemption, for one, is
        answered with it.
        """
        if self._scheduler is not None:
            self._scheduler.started(step)

    def save(self, order: SaveOrder) -> SaveHandle:
        """Starts a local save. Returns when the caller may donate or overwrite its arrays. Raises
        as staging does.
        """
        self._saver.join()
        self._counter += 1
        save_id = (  # the durable lane counts from 1
            f"{self._writer_id}{1 << 31 | self._counter:08x}"
        )
        request = SaveRequest(self._counter, check_step(order.step), save_id)
        self.started(order.step)
        with self._saver.preparing(request, self._group):
            request = self._stager.stage(request, order)
        handle = self._saver.start(request)
        self._saver.wait_for_snapshots()
        return handle

    def run(self, request: SaveRequest) -> SaveResult:
        """Does a whole local save, on the saving thread. Blocks for its time; a failure is in the
        result, logged and counted.
        """
        try:
            result = self._save_together(request)
        except Exception as error:
            result = SaveResult(request.key, failure_of(error, request.step, self._group.index))
        finally:
            request.release()
        if result.error is None:
            self._count(
                saves=1, save_s=time.monotonic() - request.began, save_bytes=request.own_bytes
            )
        else:
            self._count(saves_failed=1)
            _log.warning(
                "the local save of step %d failed; durable saves go on: %s",
                request.step,
                result.error,
            )
        return result

    def _save_together(self, request: SaveRequest) -> SaveResult:
        group = self._group
        messages = f"{self._messages}/{request.counter % MESSAGE_NAMES}"
        branch = Branch(
            *ask_primary(group, f"{messages}/begin", self._begin, self._local.timeout_s)
        )
        key = LocalKey(request.step, branch.number, request.save_id, group.count)
        folder = self._open_folder(branch.run)
        target = SaveTarget(
            folder.storage,
            group,
            request.key,
            key.folder,
            "",
            messages,
            self._local.timeout_s,
            began=request.began,
        )
        work = SnapshotWork(request, target, self.options)
        try:
            self._make_room(folder, branch, request)
            part = self._write(request, key, folder, work)
            for ward in self._wards:
                try:
                    self._copy_part(ward, key, folder, target)
                except PeerFailed as error:
                    raise PeerFailed(
                        errno.EIO, f"process {ward}'s part was not copied: {error.strerror}"
                    ) from error
            report = SaveReport(group.index, request.key, part.items)
        except Exception as error:
            report = SaveReport(group.index, request.key, error=SentError.of(error))
            if self._server is not None:
                self._server.give_up(key, group.index)
        result = self._settle(report, work, target, request)
        if result.error is None:
            self._committed(key, folder)
        else:
            with contextlib.suppress(OSError):  # then they go with the next
                folder.let_go(key, [f"{key.folder}/{name}" for name in work.own_files()])
        return result

    def _begin(self) -> list[Any]:
        """Returns the branch of this save, at the primary, once it is durable."""
        branch = self._lineage.current()
        assert branch is not None
        return [branch.run, branch.number, branch.writer, branch.base]

    def _make_room(self, folder: HostFolder, branch: Branch, request: SaveRequest) -> None:
        """Deletes what is dead by now, and refuses a save that there is no room for."""
        if self._is_keeper:
            folder.prune(
                branch.number,
                self._writer_id,
                [key for key in self.found() if key.step <= branch.base][: self._local.keep],
            )
        need = request.own_bytes * (1 + len(self._wards))
        if (
            self._local.max_bytes is not None
            and need * (self._local.keep + 1) > self._local.max_bytes
        ):
            raise TierTooLarge(
                f"{self._local.keep + 1} local steps with the copies of {len(self._wards)} other"
                f" processes need {need * (self._local.keep + 1):,} bytes here, above"
                f" max_bytes={self._local.max_bytes:,}; raise it, or lower replicas or keep"
            )
        free = shutil.disk_usage(self._path).free + folder.storage.spare_bytes()
        if need > free:
            others = [
                path.name
                for path in self._path.iterdir()
                if path.is_dir() and path.name != folder.run
            ]
            held = (
                f"; folders of other runs hold some: {', '.join(sorted(others)[:4])}"
                if others
                else ""
            )
            why = (
                f"a local step and its copies need {need:,} bytes here, {free:,} are free{held};"
                " make room, or name another folder"
            )
            raise OSError(errno.ENOSPC, why, str(self._path))

    def _write(
        self, request: SaveRequest, key: LocalKey, folder: HostFolder, work: SnapshotWork
    ) -> Part:
        """Writes this process's part and serves it."""
        items = work.write()
        head = None
        if not self._group.index:
            trees = {name: tree_text(plan) for name, plan in work.plans().items()}
            head = StepHead(
                trees, request.started_s, time.time(), request.metrics, request.metadata
            )
        part = Part(folder.run, key, self._group.index, items, head)
        folder.publish(part, part.to_bytes())
        self._serve(part)
        return part

    def _copy_part(self, ward: int, key: LocalKey, folder: HostFolder, target: SaveTarget) -> None:
        """Copies a ward's part, each byte checked, and serves it too."""
        with PeerConnection(
            self._peers[ward].address,
            self._secret,
            self._tls,
            timeout_s=target.remaining_s or 0.001,
        ) as peer:
            try:
                data = peer.wait(key.part_name(ward), target.remaining_s or 0.001)
            except FileNotFoundError:
                raise PartGivenUp(
                    f"process {ward} has given its part of step {key.step} up"
                ) from None
            part = Part.from_bytes(data, f"{peer.address}: {key.part_name(ward)}")
            if (part.run, part.key, part.process) != (folder.run, key, ward):
                raise PeerFailed(
                    errno.EIO,
                    f"process {ward} gave process {part.process}'s part of {part.key}, where its"
                    f" own of {key} was asked for",
                )
            self._check_rate(sum(part.files.values()), target)
            try:
                for item, report in part.items.items():
                    for file in report.files:
                        copy_file(
                            peer,
                            f"{key.folder}/{item}",
                            file,
                            folder,
                            lambda: target.remaining_s or 0.001,
                            self._pace.take,
                        )
            except BaseException:
                folder.storage.spare(part.files)
                raise
        folder.publish(part, data)
        self._serve(part)
        self._count(copied_bytes=sum(part.files.values()))

    def _check_rate(self, nbytes: int, target: SaveTarget) -> None:
        """Refuses to begin what cannot be done in time."""
        rate = self._local.rate_bytes_s
        left_s = target.remaining_s
        if rate is not None and nbytes / rate > left_s:
            raise SaveFailed(
                f"a copy of {nbytes:,} bytes takes {nbytes / rate:,.0f} s at"
                f" rate_bytes_s={rate:,.0f}, and {left_s:,.0f} s are left of"
                f" timeout_s={self._local.timeout_s:g}; expected a rate that suffices"
            )

    def _settle(
        self, report: SaveReport, work: SnapshotWork, target: SaveTarget, request: SaveRequest
    ) -> SaveResult:
        """Returns how the save ended, alike on all processes."""
        timeout_s = target.remaining_s + 1.0
        if self._group.index and not report.error:
            try:
                request.cancellation.close(request.step, self._group.index)
            except SaveCancelled as error:
                report = SaveReport(self._group.index, request.key, error=SentError.of(error))
        gathered = self._group.gather(
            f"{target.messages}/report", report.to_bytes(), timeout_s=timeout_s
        )
        told = None
        if gathered is not None:
            reports = [SaveReport.from_bytes(data) for data in gathered]
            self._off = next(
                (
                    each.error.text
                    for each in reports
                    if each.error is not None and each.error.kind == TierTooLarge.__name__
                ),
                self._off,
            )
            told = json.dumps(
                [self._off, self._judge(work, reports, request).to_bytes().decode()]
            ).encode()
        self._off, result = json.loads(
            self._group.broadcast(f"{target.messages}/outcome", told, timeout_s=timeout_s)
        )
        return SaveResult.from_bytes(result.encode())

    def _judge(
        self, work: SnapshotWork, reports: Sequence[SaveReport], request: SaveRequest
    ) -> SaveResult:
        """Returns the result, at the primary: the reports have to fit together as at a commit."""
        try:
            check_save_reports(reports, request.key, range(self._group.count))
            work.check(work.build(reports))
            request.cancellation.close(request.step, 0)
        except Exception as error:
            return SaveResult(request.key, failure_of(error, request.step, 0))
        return SaveResult(request.key)

    def _committed(self, key: LocalKey, folder: HostFolder) -> None:
        """Knows the new step, and lets the oldest go."""
        holders = [
            sorted({self._keepers[rank] for rank in [rank, *self._copies[rank]]})
            for rank in range(self._group.count)
        ]
        with self._lock:
            kept = [found for found in self._found if found.key.save_id.startswith(self._writer_id)]
            self._found = [FoundStep(key, [], holders), *kept][: self._local.keep]
            stay = {found.key for found in self._found}
        self._clean(folder, [old for old in folder.saves() if old not in stay], key)

    def _clean(self, folder: HostFolder, old: Sequence[LocalKey], new: LocalKey) -> None:
        """Lets older local saves go once a new one is whole; what cannot be deleted now is tried
        again after the next.
        """
        try:
            for key in old:
                if self._server is not None:
                    self._server.withdraw(key.folder)
                folder.let_go(key)
            if self._is_keeper:
                folder.prune(new.branch, self._writer_id, [])
        except OSError as error:
            _log.warning("older local steps in %s could not be deleted yet: %s", folder.path, error)

    # --- restoring

    def open_step(self, key: LocalKey) -> tuple[PeerStorage, Record]:
        """Returns a local step to read from, whoever has it; every process calls it. Blocks. Raises
        CheckpointError, on every process.
        """
        found = next((found for found in self._found if found.key == key), None)
        assert found is not None and self._folder is not None
        name = f"{self._messages}/record"
        timeout_s = self.options.restore_timeout_s
        data: str = ask_primary(self._group, name, lambda: self._record(found), timeout_s)
        text = zlib.decompressobj().decompress(base64.b64decode(data), RECORD_LIMIT_BYTES)
        storage = self._storage_of(found, text)
        return storage, parse_record(text, f"{storage.root}/{key.folder}")

    def _record(self, found: FoundStep) -> str:
        return base64.b64encode(zlib.compress(record_of(found, self._head(found)), 1)).decode()

    def _storage_of(self, found: FoundStep, record: bytes) -> PeerStorage:
        assert self._folder is not None
        addresses = {rank: peer.address for rank, peer in enumerate(self._peers)}
        peers = Peers(addresses, self._secret, self._local.timeout_s, self._tls)
        own = frozenset({self._keepers[self._group.index]})
        turn = self._group.index
        holders = [
            [*ranks[turn % len(ranks) :], *ranks[: turn % len(ranks)]] for ranks in found.holders
        ]  # not all ask the same first
        return PeerStorage(self._folder.storage, found.key.folder, record, holders, own, peers)

    def head(self, step: int) -> StepHead:
        """Returns metrics and metadata of a local step. Raises StepNotFound, Corrupt."""
        found = next((found for found in self._found if found.key.step == step), None)
        if found is None:
            raise StepNotFound(f"there is no local step {step}", step=step)
        return self._head(found)

    def structure(self, step: int) -> Structure:
        """Returns what a local step holds; every process calls it. Blocks. Raises StepNotFound,
        CheckpointError, on every process.
        """
        self.survey()
        key = next((key for key in self.found() if key.step == step), None)
        if key is None:
            raise StepNotFound(f"the hosts have no step {step} any more", step=step)
        storage, _ = self.open_step(key)
        with contextlib.closing(storage):
            return structure_of(HoldfastCheckpoint(StorePath(storage, key.folder)))

    def _head(self, found: FoundStep) -> StepHead:
        """Reads process 0's part, from whoever has it as its inventory said."""
        assert self._folder is not None
        name, failures = found.key.part_name(0), list[str]()
        for rank in sorted(
            found.holders[0], key=lambda rank: rank != self._keepers[self._group.index]
        ):
            try:
                part = Part.from_bytes(self._part_text(rank, name), name)
                if (
                    part.key == found.key
                    and part.head is not None
                    and (not found.reports or part.summary()[-1] == found.reports[0])
                ):
                    return part.head
                failures.append(f"process {rank} gave another part")
            except (OSError, CheckpointError) as error:
                failures.append(f"process {rank}: {error_text(error)}")
        raise Corrupt(
            f"local step {found.key.step}: the part of process 0 cannot be read:"
            f" {'; '.join(failures)}",
            step=found.key.step,
        )

    def _part_text(self, rank: int, name: str) -> bytes:
        assert self._folder is not None
        if rank == self._keepers[self._group.index]:
            return self._folder.storage.fetch(name, RECORD_LIMIT_BYTES)
        with PeerConnection(self._peers[rank].address, self._secret, self._tls) as peer:
            return peer.wait(name, self._local.timeout_s)

    def restore(self, storage: PeerStorage, restore: Callable[[], T]) -> T:
        """Returns what `restore` returns, which reads from `storage`; where a copy is damaged, it
        is tried again with the next.
        """
        try:
            while True:
                try:
                    value = restore()
                    self._count(restores=1)
                    return value
                except Corrupt as error:
                    if not storage.pass_over(error.file):
                        raise
                    _log.warning("another copy is read instead: %s", error)
        finally:
            storage.close()

    # --- the end

    def _count(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount

    def statistics(self) -> dict[str, Any]:
        """Returns what the tier has done, in JSON types: `local_saves`, `local_saves_failed`, ...,
        and why it is `local_off`.

        `local_survives` is how many hosts may be lost before the newest local step is.
        """
        with self._lock:
            counts = {
                f"local_{name}": amount if name.endswith("_s") else int(amount)
                for name, amount in self._counts.items()
            }
            newest = self._found[0] if self._found else None
        survives = 0 if newest is None else newest.survives([peer.host for peer in self._peers])
        return counts | {"local_survives": survives, "local_off": self._off}

    def join(self, timeout_s: float | None = None) -> None:
        """Waits for the local save in flight. Raises TimeoutError after `timeout_s`."""
        self._saver.join(timeout_s)

    def raise_error(self) -> None:
        """Raises the error of a local save that failed, once, if the tier is strict."""
        failed = self._saver.take_error()
        if failed is not None and self._local.strict:
            raise failed

    def close(self, timeout_s: float) -> None:
        """Waits for the save in flight and ends the part server; what was saved stays on the hosts.
        Idempotent.
        """
        with contextlib.suppress(TimeoutError):
            self._saver.join(timeout_s)
        self._saver.close()
        if self._scheduler is not None:
            self._scheduler.close()
        if self._server is not None:
            self._server.close()
        if self._folder is not None:
            self._folder.close()
        if self._mark:
            with contextlib.suppress(OSError):
                (self._path / self._mark).unlink(missing_ok=True)


def _why_unreachable(peers: Sequence[_Peer]) -> str:
    """Returns why some processes could not reach others, or ""."""
    others = [rank for rank, peer in enumerate(peers) if peer.has_tls != peers[0].has_tls]
    if others:
        with_tls, without = (0, others[0]) if peers[0].has_tls else (others[0], 0)
        return (
            f"process {with_tls} has the files of TLS, and process {without} has none: set them for"
            " all, or for none"
        )
    inside = [
        (rank, peer)
        for rank, peer in enumerate(peers)
        if peer.address.startswith(("127.", "[::1]"))
    ]
    if inside and len({peer.machine for peer in peers}) > 1:
        found = (
            f"process {inside[0][0]} has the address {inside[0][1].address}, which other hosts"
            " cannot reach"
        )
        return (
            f"{found}: pass Local(address=...), or give its host's name another address than"
            " loopback"
        )
    return ""


def copy_file(
    peer: PeerConnection,
    folder_name: str,
    report: FileReport,
    folder: HostFolder,
    remaining_s: Callable[[], float],
    take: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Copies one file of a ward and checks every byte of it against its report; before each piece
    `take` may wait.
    """
    name = f"{folder_name}/{report.name}"
    file = folder.storage.open_to_write(name, report.size)
    try:

        def read(offset: int, buffer: memoryview) -> int:
            take(buffer.nbytes)
            return peer.read(name, offset, [buffer], remaining_s())

        def write(offset: int, piece: memoryview) -> None:
            write_all(file, [piece], offset)

        read_checked(read, report, f"{peer.address}: {name}", write)
        folder.storage.finish(file, report.size)
    finally:
        os.close(file)


def _own_address() -> str:
    """Returns the address of this host for its peers. Raises CheckpointError where that is not
    known.
    """
    address = host_address()
    if address is None:
        raise CheckpointError(
            "which address of this host its peers reach is not known, since no coordinator is: pass"
            " Local(address=...)"
        )
    return address


def _boot_id() -> str:
    """Returns what tells this machine, since it was started, from others."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:  # no Linux
        return hashlib.sha256(os.uname().nodename.encode()).hexdigest()[:32]
