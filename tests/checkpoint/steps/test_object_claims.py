"""Claims in an object store: who stands, who counts as dead, and what tombstones stop."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from holdfast.checkpoint import CheckpointError, CheckpointManager
from holdfast.checkpoint.format.step_folders import list_steps
from holdfast.checkpoint.saving.record_builder import RecordHead, build_record
from holdfast.checkpoint.steps.claims import FOLDER, this_writer
from holdfast.checkpoint.steps.garbage import sweep_files
from holdfast.checkpoint.steps.local_claims import LocalClaims
from holdfast.checkpoint.steps.object_claims import ObjectClaims, open_claims
from holdfast.checkpoint.storage.bucket import BucketStorage
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.checkpoint.storage.tombstone import (
    TOMBSTONE,
    TOMBSTONE_LIMIT_BYTES,
    fenced_writers,
)
from holdfast.coordination import Fenced
from tests.support.object_servers import BUCKET, s3_server

_numbers = itertools.count()


@pytest.fixture
def storage() -> BucketStorage:
    return BucketStorage(f"memory://object-claims/{next(_numbers)}")


def record(step: int, writer_id: str) -> bytes:
    return build_record(
        RecordHead(step, writer=f"{writer_id}00000001", processes=1, started_s=0.0, finished_s=0.0),
        {},
    )


def test_the_kind_of_store_decides(storage: BucketStorage, tmp_path: Path) -> None:
    """Folders have claims with locks, object stores claims that are renewed."""
    assert isinstance(open_claims(storage, claim_age_s=5), ObjectClaims) and isinstance(
        open_claims(LocalStorage(tmp_path)), LocalClaims
    )


def test_a_claim_stands_until_it_is_fenced(storage: BucketStorage) -> None:
    """Taken, listed, read by others, and gone: to fence one that is gone is done. The probe of the
    store's conditions leaves nothing.
    """
    claims = ObjectClaims(storage)
    mine = replace(this_writer(), job="j", attempt=1)
    other = this_writer()
    claims.take(mine)
    claims.take(other)
    assert claims.standing() == {mine.id, other.id} and claims.others(other.id) == [(mine, False)]
    assert {name.split("/")[1] for name in storage.keys(f"{FOLDER}/")} == {mine.id, other.id}
    claims.fence(mine.id)
    claims.fence(mine.id)
    assert claims.standing() == {other.id} and claims.others(other.id) == []
    with pytest.raises(Fenced):
        storage.commit("1/checkpoint.json", record(1, mine.id), f"{FOLDER}/{mine.id}")


def test_who_does_not_renew_counts_as_dead(storage: BucketStorage) -> None:
    """A claim older than its age is a dead writer's; one that is taken again in time is not, and a
    fenced one does not come back.
    """
    claims = ObjectClaims(storage, claim_age_s=100)
    mine = replace(this_writer(), renewed_s=time.time() - 200)
    claims.take(mine)
    assert [dead for _, dead in claims.others("")] == [True]
    claims.take(mine)
    assert [dead for _, dead in claims.others("")] == [True], (
        "a twentieth of its age has not passed"
    )
    claims._renewed[mine.id] -= 6
    claims.take(mine)
    assert [dead for _, dead in claims.others("")] == [False]
    ObjectClaims(storage).fence(mine.id)
    claims._renewed[mine.id] -= 6
    claims.take(mine)
    assert claims.standing() == set()


def test_a_clock_that_jumps_takes_no_claim(
    storage: BucketStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A year ahead, or back, while a claim stands: its writer lives."""
    claims = ObjectClaims(storage, claim_age_s=100)
    mine = this_writer()
    claims.take(mine)
    clock = time.time
    for jump in (365 * 86400, -365 * 86400, 0):
        monkeypatch.setattr(time, "time", lambda jump=jump: clock() + jump)
        for _ in ("as it was written before the jump", "and after it"):
            others = ObjectClaims(storage, claim_age_s=100).others("")
            assert [is_dead for _, is_dead in others] == [False]
            claims._renewed[mine.id] -= 6
            claims.take(mine)


def test_a_store_without_writes_is_a_clear_error(storage: BucketStorage) -> None:
    """An OSError of the store becomes a CheckpointError with its root, which says how to only
    read.
    """

    class Forbidden(BucketStorage):
        def put(self, *args: object, **options: object) -> object:  # type: ignore[override]
            raise PermissionError(13, "forbidden")

    with pytest.raises(
        CheckpointError,
        match=r"cannot write a checkpoint in .*forbidden.*Options\(read_only=True\)",
    ) as caught:
        ObjectClaims(Forbidden(storage.root)).take(this_writer())
    assert caught.value.path == storage.root


@pytest.mark.parametrize(
    ("header", "found"),
    [("If-None-Match", "create-if-absent"), ("If-Match", "replace-if-unchanged")],
)
def test_a_store_that_ignores_conditions_is_refused(header: str, found: str) -> None:
    """Both conditions that commits rest on are tried by racing writes, before the claim; a store
    that ignores one is refused.

    With the promise of a single writer nothing is tried. The races leave nothing behind.
    """
    with s3_server(ignored=[header]) as query:
        url = f"s3://{BUCKET}/conditions/{next(_numbers)}{query}"
        storage = BucketStorage(url)
        with pytest.raises(
            CheckpointError,
            match=(
                rf"ignores the condition .*\({found}: \d writes of"
                r" \d.*Options\(single_writer=True\)"
            ),
        ):
            ObjectClaims(storage).take(this_writer())
        assert storage.keys("") == []
        promised = ObjectClaims(BucketStorage(url, single_writer=True))
        promised.take(this_writer())
        assert len(promised.standing()) == 1


def test_a_lost_answer_is_no_ignored_condition(storage: BucketStorage) -> None:
    """A write of the race went through and its answer was lost: the value shows it."""

    class Deaf(BucketStorage):
        def put_at_once(self, name: str, values: Sequence[bytes], generation: bytes) -> int:
            return super().put_at_once(name, values, generation) - 1

    claims = ObjectClaims(Deaf(storage.root))
    writer = this_writer()
    claims.take(writer)
    assert claims.standing() == {writer.id}


def test_a_store_that_honours_conditions_is_taken() -> None:
    """Of racing writes one wins, again and again: the claim is all that stands there afterwards."""
    with s3_server() as query:
        storage = BucketStorage(f"s3://{BUCKET}/conditions/{next(_numbers)}{query}")
        for _ in range(5):
            ObjectClaims(storage).take(this_writer())
        assert len(storage.keys("")) == len(ObjectClaims(storage).standing()) == 5


def test_a_buried_writer_cannot_commit(storage: BucketStorage) -> None:
    """A tombstone stands where a step has no record, however old it is, until a later writer
    replaces it.
    """
    claims = ObjectClaims(storage, claim_age_s=1e-9)
    packs = {"state/00000-00000-0a0b0c0d.safetensors": "0a0b0c0d"}
    assert claims.bury("3", packs) == list(packs) and claims.bury("3", packs) == list(packs)
    assert list_steps(storage) == [], "a tombstone is no record"
    claims.forget_fenced()
    assert fenced_writers(storage.get("3/checkpoint.json")[0] or b"") == {"0a0b0c0d"}
    living = this_writer()
    claims.take(living)
    storage.commit("3/checkpoint.json", record(3, living.id), f"{FOLDER}/{living.id}")
    assert list_steps(storage) == [3]


def test_a_damaged_tombstone_stops_neither_sweep_nor_save(storage: BucketStorage) -> None:
    """It names nobody, and the next save of its step replaces it."""
    claims = ObjectClaims(storage)
    living = this_writer()
    claims.take(living)
    for step in "34":
        storage.put(f"{step}/checkpoint.json", TOMBSTONE)
        storage.put(f"{step}/state/00000-00000-0a0b0c0d.safetensors", b"pack")
    assert len(sweep_files(storage, claims)) == 2 and list_steps(storage) == []
    storage.put("3/checkpoint.json", TOMBSTONE)
    storage.commit("3/checkpoint.json", record(3, living.id), f"{FOLDER}/{living.id}")
    assert list_steps(storage) == [3]


def test_a_tombstone_stays_short_enough_to_be_told_from_a_record(storage: BucketStorage) -> None:
    """A listing takes no look at a longer record. A tombstone that would be longer is not written,
    and the packs of its step stay.
    """
    claims = ObjectClaims(storage)
    many = {f"state/{number}": f"{number:08x}" for number in range(300)}
    assert claims.bury("3", many) == list(many)
    tombstone = storage.get("3/checkpoint.json")[0]
    assert tombstone is not None and len(tombstone) <= TOMBSTONE_LIMIT_BYTES
    assert (
        claims.bury("3", {f"state/{number}": f"{number:08x}" for number in range(300, 400)}) == []
    )
    assert storage.get("3/checkpoint.json")[0] == tombstone
    assert list_steps(storage) == []


def test_a_record_is_marked_and_says_the_same(storage: BucketStorage) -> None:
    """Where the step has a record it is written anew, so that an overwrite under way fails; what it
    names is not deleted.
    """
    claims = ObjectClaims(storage)
    living = this_writer()
    claims.take(living)
    storage.commit("3/checkpoint.json", record(3, living.id), f"{FOLDER}/{living.id}")
    before, generation = storage.get("3/checkpoint.json")
    assert claims.bury("3", {"state/x": "0a0b0c0d"}) == ["state/x"]
    after, other = storage.get("3/checkpoint.json")
    assert after != before and other != generation and list_steps(storage) == [3]
    storage.put("3/checkpoint.json", b"damaged")
    assert claims.bury("3", {"state/x": "0a0b0c0d"}) == [], "what a damaged record named stays"


def test_a_sweep_of_an_older_listing_deletes_no_step_that_was_committed_since(
    storage: BucketStorage,
) -> None:
    """A writer commits, and gives its claim up, between an opening's listing and its sweep: what
    its record names stays. What was written after the listing is not looked at.
    """
    with CheckpointManager(storage.root) as manager:
        manager.save(3, {"w": np.arange(3)})
    left = "3/state/00000-00001-0a0b0c0d00000001.safetensors"
    storage.put(left, b"of a save that failed")
    before_its_commit = set(storage.keys("")) - {"3/checkpoint.json"}
    later = "4/state/00000-00000-0a0b0c0d00000002.safetensors"
    storage.put(later, b"of a writer that came after the listing")
    assert sweep_files(storage, ObjectClaims(storage), listed=before_its_commit) == [left]
    assert later in storage.keys("")
    with CheckpointManager(storage.root) as manager:
        assert manager.restore(3)["w"].tolist() == [0, 1, 2]
