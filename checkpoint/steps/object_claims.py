"""Claims in an object store: objects that writers renew, and tombstones for fenced writers."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping
from dataclasses import asdict, replace

from ..errors import CheckpointError
from ..format.record import parse_record
from ..options import DAY_S
from ..storage.base import Storage
from ..storage.path import join
from ..storage.retries import until
from ..storage.steady_time import PROCESS_CLOCK
from ..storage.tombstone import (
    RECORD_NAME,
    TOMBSTONE,
    TOMBSTONE_LIMIT_BYTES,
    fenced_writers,
    marked_record,
    tombstone,
)
from .claims import FOLDER, Claims, Writer, parse_writer
from .local_claims import LocalClaims

_log = logging.getLogger(__name__)

# The buckets that have shown it to this process. The root remembers nothing: its store may change.
_honour_conditions: set[str] = set()
RACES = 3
RACERS = 4  # of the probe: writes to one name that begin at the same time


class ObjectClaims:
    """Claims in an object store: objects that their writers renew."""

    def __init__(
        self,
        storage: Storage,
        *,
        claim_age_s: float = DAY_S,
        renewed: dict[str, float] | None = None,
    ) -> None:
        assert storage.conditions is not None
        self._storage = storage
        self._values = storage.conditions
        self.age_s = claim_age_s
        # When each claim of this process was taken or renewed, by the process's clock.
        self._renewed: dict[str, float] = {} if renewed is None else renewed

    def until(self, end_s: float) -> ObjectClaims:
        """Returns the same claims, whose requests end at a time of the monotonic clock."""
        timed = until(self._storage, end_s)
        return ObjectClaims(timed, claim_age_s=self.age_s, renewed=self._renewed)

    def take(self, writer: Writer) -> None:
        """Makes the claim, or renews it when a twentieth of the claim's age has passed.

        The store shows first that it honours conditions, once a process and bucket.
        """
        if writer.id in self._renewed:
            self._renew(writer)
            return
        try:
            if not self._values.single_writer and self._values.bucket not in _honour_conditions:
                self._check_conditions()
                _honour_conditions.add(self._values.bucket)
            self._values.put(_name(writer.id), json.dumps(asdict(writer)).encode())
            self._renewed[writer.id] = PROCESS_CLOCK.now_s()
        except OSError as error:
            raise CheckpointError(
                f"cannot write a checkpoint in {self._storage.root}: {error}; expected a bucket"
                " that this process may write to. To only read, pass Options(read_only=True)",
                path=self._storage.root,
            ) from error

    def _check_conditions(self) -> None:
        """Lets writes of one name race: each condition of a commit may let only one through."""
        # Writes one after the other would show nothing where a store looks at an object before it
        # writes it. Several races: in the first some connections are open already, others not.
        for _ in range(RACES):
            name = f"{FOLDER}/probe-{secrets.token_hex(4)}"
            try:
                self._check_race("create-if-absent", name)
                self._check_race("replace-if-unchanged", name)
            finally:
                self._storage.delete([name])

    def _check_race(self, condition: str, name: str) -> None:
        _, generation = self._values.get(name)
        writes = [b"%s %d" % (condition.encode(), number) for number in range(RACERS)]
        won = self._values.put_at_once(name, writes, generation)
        if won == 1:
            return
        if won == 0 and self._values.get(name)[0] in writes:
            return  # one went through, and its answer was lost
        root = self._storage.root
        raise CheckpointError(
            f"{root} is on a store that ignores the condition of a conditional write ({condition}:"
            f" {won} writes of {RACERS} at once went through, expected 1): a commit cannot be made"
            " safe against a second writer. If you promise that only one manager writes here, pass"
            " Options(single_writer=True); `save` takes single_writer=True itself",
            path=root,
        )

    def _renew(self, writer: Writer) -> None:
        now_s = PROCESS_CLOCK.now_s()
        if now_s - self._renewed[writer.id] < self.age_s / 20:
            return
        name = _name(writer.id)
        claim, generation = self._values.get(name)
        # Only over the claim that was read: a claim that was fenced meanwhile must stay away.
        if claim is not None:
            renewed = replace(writer, renewed_s=now_s)
            self._values.put(name, json.dumps(asdict(renewed)).encode(), generation)
        self._renewed[writer.id] = now_s

    def others(self, me: str) -> list[tuple[Writer, bool]]:
        """Reads the other claims; one that was not renewed for long counts as dead."""
        others = []
        for writer_id in sorted(self.standing() - {me}):
            data, _ = self._values.get(_name(writer_id))
            if data is not None:
                writer = parse_writer(data, writer_id)
                others.append((writer, PROCESS_CLOCK.now_s() - writer.renewed_s > self.age_s))
        return others

    def fence(self, writer_id: str) -> None:
        """Deletes the claim: its writer's next commit finds none."""
        self._renewed.pop(writer_id, None)
        self._storage.delete([_name(writer_id)])

    def standing(self) -> set[str]:
        """Lists the claims."""
        return {
            name.split("/")[1]
            for name in self._values.keys(f"{FOLDER}/")
            if name.endswith("/claim.json")
        }

    def bury(self, step_dir: str, packs: Mapping[str, str]) -> list[str]:
        """Writes a tombstone where there is no record, else the record with a mark."""
        name = join(step_dir, RECORD_NAME)
        names = list(packs)
        value, generation = self._values.get(name)
        record = None if value is None or value.startswith(TOMBSTONE) else value
        if record is not None:
            try:
                named = set(parse_record(record, name).file_names())
            except CheckpointError:
                return []  # damaged: what it named stays until somebody looks
            names = [each for each in names if each not in named]
        known = fenced_writers(value or b"")
        fenced = known.union(packs[each] for each in names)
        if fenced == known:
            return names
        if record is not None:
            # An overwrite of this record may be under way: it expects the generation that it read.
            marked = marked_record(record, fenced)
        else:
            marked = tombstone(fenced)
            if len(marked) > TOMBSTONE_LIMIT_BYTES:
                _log.warning("%s names too many writers: its step is not swept any more", name)
                return []
        # Where the write is refused, a commit came first: its packs are no garbage.
        return names if self._values.put(name, marked, generation) else []

    def forget_fenced(self) -> None:
        """Does nothing: a fenced claim leaves nothing, and a tombstone stays.

        Only the next writer of its step replaces it. A writer that was fenced may be as late as it
        likes, so no age of a tombstone makes it safe to delete.
        """


def _name(writer_id: str) -> str:
    return f"{FOLDER}/{writer_id}/claim.json"


def open_claims(
    storage: Storage, *, single_writer: bool = False, claim_age_s: float = DAY_S
) -> Claims:
    """Returns the claims of a root, by what its store can do. Reads and writes nothing yet.

    Raises CheckpointError where the store has neither locks nor conditional writes.
    """
    if storage.conditions is not None:
        return ObjectClaims(storage, claim_age_s=claim_age_s)
    if storage.posix is not None:
        return LocalClaims(storage.posix, single_writer=single_writer)
    raise CheckpointError(
        f"{storage.root} is only for reading: its store has neither the locks of a POSIX folder nor"
        " conditional writes, and one writer could not keep another out",
        path=storage.root,
    )
