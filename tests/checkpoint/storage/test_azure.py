"""Azure's blobs as a store: what its primitives make of obstore's answers, over the store in memory
that obstore has itself.

tests/checkpoint/storage/test_storage.py runs the whole contract on Azurite, where that is
installed.
"""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.checkpoint import CheckpointError
from holdfast.checkpoint.layouts.orbax.arrays import kvstore_of
from holdfast.checkpoint.storage.azure import MISSING, AzureStorage
from holdfast.checkpoint.storage.path import StorePath
from tests.support.libraries import need

MemoryStore = need("obstore.store", "make setup").MemoryStore


@pytest.fixture
def storage() -> Any:
    found: Any = AzureStorage("az://bucket/run?use_emulator=true")
    found._store = MemoryStore()
    return found


def test_conditions_hold(storage: Any) -> None:
    """A value is made once, and replaced only as it was seen last; of writes at once, one goes
    through.
    """
    assert storage.get("a") == (None, MISSING)
    assert storage.put("a", b"one", MISSING) and not storage.put("a", b"two", MISSING)
    value, generation = storage.get("a")
    assert (
        value == b"one"
        and storage.put("a", b"three", generation)
        and not storage.put("a", b"four", generation)
    )
    assert storage.put("a", b"five") and storage.get("a")[0] == b"five"
    assert storage.put_at_once("b", [b"1", b"2", b"3"], MISSING) == 1


def test_ranges_sizes_and_names(storage: Any) -> None:
    """A range may end behind the object, begin there, or be of an empty one; names are below the
    prefix; what is gone is gone.
    """
    for name, data in (("x/1", b"hello"), ("x/2", b""), ("xy", b"")):
        storage.put(name, data)
    assert (
        storage.size("x/1") == 5
        and storage._range("x/1", 2, 100) == b"llo"
        and storage._range("x/1", 5, 6) == b"" == storage._range("x/2", 0, 9)
    )
    assert storage.keys("x/") == ["x/1", "x/2"] and storage.keys("x") == [
        "x/1",
        "x/2",
        "xy",
    ] == storage.keys("")
    storage.delete(["x/1", "no", "x/"])
    for call in (lambda: storage._range("x/1", 0, 1), lambda: storage.size("x/1")):
        with pytest.raises(FileNotFoundError, match="az://bucket/run/x/1"):
            call()
    assert not storage.deletes_on_condition


def test_what_only_tensorstore_could_do_says_so(storage: Any) -> None:
    """Other people's arrays are not read there, and a URL without an account is refused."""
    with pytest.raises(CheckpointError, match="does not know this store; copy it to a disk first"):
        kvstore_of(StorePath(storage, "1"))
    with pytest.raises(CheckpointError, match=r"cannot open az://bucket/run\?.*'no_such_setting'"):
        AzureStorage("az://bucket/run?no_such_setting=1")
