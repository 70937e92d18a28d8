"""What a store understands of a record: its name, its seal, and the writers fenced from it."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Mapping
from typing import Any

from crc32c import crc32c

RECORD_NAME = "checkpoint.json"

_SEAL = b',"crc32c":"'


def sealed(body: bytes) -> bytes:
    """Returns the bytes of a record. `body` is its JSON without the last brace.

    The checksum of the body becomes the last member.
    """
    return body + _SEAL + b'%08x"}\n' % crc32c(body)


def body_of(record: bytes) -> bytes:
    """Returns what `sealed` was given, b"" where there is no seal."""
    return record.rpartition(_SEAL)[0]


def sealed_json(members: Mapping[str, Any]) -> bytes:
    """Returns a file of these members that ends in its own checksum, as a record does."""
    return sealed(json.dumps(members, separators=(",", ":")).encode()[:-1])


def is_sealed(data: bytes) -> bool:
    """Says whether a record, or another sealed file, is as it was written, by its checksum."""
    return data == sealed(body_of(data))


TOMBSTONE = b'{"format":"holdfast/tombstone"'
TOMBSTONE_LIMIT_BYTES = 4096  # some 330 writers: a longer record is no tombstone, without a look

# The last member before the checksum, in a record that a sweep has written anew.
_FENCED_MEMBER = re.compile(rb',"fenced":\[[0-9a-f",]*\]$')


def tombstone(writers: set[str]) -> bytes:
    """Returns what stops the commits of writers where no record is."""
    members = json.dumps({"fenced": sorted(writers), "since_s": time.time()}).encode()
    return TOMBSTONE + b"," + members[1:]


def marked_record(record: bytes, writers: set[str]) -> bytes:
    """Returns a record that says the same, and which writers were fenced from it."""
    body = _FENCED_MEMBER.sub(b"", body_of(record))
    body += b',"fenced":%s' % json.dumps(sorted(writers), separators=(",", ":")).encode()
    return sealed(body)


def says_the_same(record: bytes, other: bytes) -> bool:
    """Says whether two records differ at most in the writers that were fenced from them."""
    bodies = [_FENCED_MEMBER.sub(b"", body_of(each)) for each in (record, other)]
    return record == other or (bodies[0] != b"" and bodies[0] == bodies[1])


def fenced_writers(value: bytes) -> set[str]:
    """Returns the writers that a tombstone or a record names as fenced; a damaged tombstone
    names none.
    """
    if value.startswith(TOMBSTONE):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return set(json.loads(value)["fenced"])
        return set()
    member = _FENCED_MEMBER.search(body_of(value))
    return set(json.loads(member[0].removeprefix(b',"fenced":'))) if member else set()
