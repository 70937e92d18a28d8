"""What a store understands of a record: its seal, and the writers that were fenced from it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.storage.tombstone import (
    TOMBSTONE,
    body_of,
    fenced_writers,
    marked_record,
    sealed,
    tombstone,
)

WRITERS = st.sets(st.text("0123456789abcdef", min_size=8, max_size=8), min_size=1, max_size=4)
BODIES = st.dictionaries(
    st.text(max_size=8).filter(lambda key: key != "crc32c"),
    st.integers() | st.text(max_size=8),
    min_size=1,
    max_size=4,
).map(lambda value: json.dumps(value, separators=(",", ":")).encode()[:-1])


@given(BODIES)
def test_a_seal_is_taken_off_again(body: bytes) -> None:
    """A sealed record is JSON whose last member is the checksum of the rest; its body comes
    back.
    """
    record = sealed(body)
    assert body_of(record) == body and list(json.loads(record))[-1] == "crc32c"
    assert body_of(b"no seal") == b""


@given(BODIES, WRITERS, WRITERS)
def test_a_marked_record_names_the_fenced_writers(
    body: bytes, first: set[str], second: set[str]
) -> None:
    """A record that is marked says the same and names the writers; marked again it names the later
    ones alone.
    """
    record = sealed(body)
    assert fenced_writers(record) == set()
    marked = marked_record(record, first)
    assert (
        fenced_writers(marked) == first
        and json.loads(marked).items() >= json.loads(body + b"}").items()
    )
    assert marked == sealed(body_of(marked))
    assert marked_record(marked, second) == marked_record(record, second)


@given(WRITERS)
def test_a_tombstone_names_the_fenced_writers(writers: set[str]) -> None:
    """A tombstone is JSON, begins as no record does, and names its writers."""
    found = tombstone(writers)
    assert found.startswith(TOMBSTONE) and fenced_writers(found) == writers
    assert set(json.loads(found)) == {"format", "fenced", "since_s"}


@pytest.mark.parametrize(
    "rest",
    [
        b"",
        b"}",
        b',"fenced":7,"since_s":1}',
        b"\xff}",
    ],
)
def test_a_damaged_tombstone_fences_nobody(rest: bytes) -> None:
    """A later writer may replace it; no error stops a sweep."""
    assert fenced_writers(TOMBSTONE + rest) == set()
