"""Keys: values by normalised name, waits for them, directories, counters, and bounds on all of
it.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.coordination.core.keys import normalise
from holdfast.coordination.core.status import Code
from holdfast.coordination.limits import Limits
from tests.support.driver import Driver


@pytest.mark.parametrize(
    ("given", "expected"),
    [("/a//b/", "a/b"), ("", ""), ("/", ""), ("a", "a"), ("a/b", "a/b"), ("//x", "x")],
)
def test_keys_are_normalised_as_jaxlib_does(given: str, expected: str) -> None:
    """Leading, trailing and doubled slashes go; the empty key is legal."""
    assert normalise(given) == expected


def test_a_get_waits_for_its_key() -> None:
    """All who wait get the value as soon as it is set; a time limit names the key."""
    driver = Driver()
    waiting = [driver.get("a/b", task_id) for task_id in range(3)]
    late = driver.get("never", timeout_s=2)
    driver.set("/a//b", b"1")
    assert [driver.answers[call] for call in waiting] == [(("a/b", b"1"), None)] * 3
    driver.wait(3, beating=(0, 1, 2, 3))
    assert driver.message(late) == "key 'never' was not set within 2.0 s"


def test_a_get_that_needs_the_lost_fails() -> None:
    """`needs` names who would have to set the key."""
    driver = Driver(2)
    waiting = driver.get("from/1", depends_on=(1,))
    other = driver.get("from/0", depends_on=(0,))
    driver.wait(12, beating=(0,))
    assert driver.code(waiting) is Code.UNAVAILABLE and driver.code(other) is None
    assert (
        driver.message(waiting)
        == "key 'from/1' will not be set: process 1 (host b1, silent for 11 s) is lost"
    )


def test_directories_counters_and_deletes() -> None:
    """Directories list by prefix with a slash, in order; a delete takes what is below; a counter
    begins at 0.
    """
    driver = Driver()
    for key in ("d/b", "d/a", "d", "dx", "d/c/e"):
        driver.set(key, key.encode())
    call = driver.call()
    driver.machine.keys.list_dir(call, "/d/")
    assert [key for key, _ in driver.settle()[call][0]] == ["d/a", "d/b", "d/c/e"]
    driver.machine.keys.delete(driver.call(), "d")
    driver.settle()
    assert sorted(driver.machine.keys.values) == ["dx"] and driver.machine.keys.total_bytes == 4
    for by, expected in ((3, b"3"), (-5, b"-2")):
        call = driver.call()
        driver.machine.keys.increment(call, "n", by)
        assert driver.settle()[call] == (("n", expected), None)
    call = driver.call()
    driver.machine.keys.increment(call, "dx", 1)
    assert driver.settle()[call][1].code is Code.FAILED_PRECONDITION  # type: ignore[union-attr]


def test_keys_have_bounds() -> None:
    """PreviousInstance a bound a set is RESOURCE_EXHAUSTED, says what was expected, and changes
    nothing.
    """
    driver = Driver(limits=Limits(key_bytes=10, value_bytes=100, total_bytes=250, keys=4))
    assert driver.code(driver.set("k" * 11, b"")) is Code.RESOURCE_EXHAUSTED
    assert (
        driver.message(driver.set("k", b"x" * 101))
        == "key 'k': a value of 101 bytes; expected at most 100"
    )
    assert [driver.code(driver.set(f"k{i}", b"x" * 100)) for i in range(3)] == [
        Code.OK,
        Code.OK,
        Code.RESOURCE_EXHAUSTED,
    ]
    assert driver.code(driver.set("k0", b"", overwrite=True)) is Code.OK
    assert [driver.code(driver.set(f"s{i}", b"")) for i in range(3)] == [
        Code.OK,
        Code.OK,
        Code.RESOURCE_EXHAUSTED,
    ]
    assert driver.code(driver.set("k0", b"y")) is Code.ALREADY_EXISTS


def test_a_try_get_never_waits() -> None:
    """The value at once, or NOT_FOUND with the key."""
    driver = Driver(1)
    missing = driver.make(lambda call: driver.machine.keys.try_get(call, "/a/"))
    assert (
        driver.code(missing) is Code.NOT_FOUND
        and driver.message(missing) == "Config key a not found."
    )
    driver.set("a", b"1")
    assert driver.value(driver.make(lambda call: driver.machine.keys.try_get(call, "a"))) == (
        "a",
        b"1",
    )


def test_a_get_without_a_client_is_never_answered() -> None:
    """A dropped wait leaves nothing behind, also where the key is set later."""
    driver = Driver(1)
    dropped = driver.get("a")
    kept = driver.get("a")
    dropped.drop()
    driver.set("a", b"1")
    assert driver.code(dropped) is None and driver.value(kept) == ("a", b"1")
    assert not list(driver.machine.keys.waiting())


def test_an_empty_value_overwrites() -> None:
    """Bytes are counted by what is held, whatever was there before."""
    driver = Driver(1)
    for value in (b"", b"12345", b""):
        driver.set("k", value, overwrite=True)
        assert driver.machine.keys.total_bytes == 1 + len(value)


@pytest.mark.parametrize(
    ("text", "by"), [(b"x", 1), (str(2**63 - 1).encode(), 1), (str(-(2**63)).encode(), -1)]
)
def test_a_counter_holds_64_bits(text: bytes, by: int) -> None:
    """Anything but a decimal number, and a sum beyond 64 bits, is FAILED_PRECONDITION and changes
    nothing.
    """
    driver = Driver(1)
    driver.set("n", text)
    refused = driver.make(lambda call: driver.machine.keys.increment(call, "n", by))
    assert (
        driver.code(refused) is Code.FAILED_PRECONDITION and driver.machine.keys.values["n"] == text
    )


NAMES = st.lists(st.sampled_from(["a", "b", "a0", ""]), min_size=1, max_size=3).map("/".join)
EVENTS = st.one_of(
    st.tuples(st.just("set"), NAMES, st.binary(max_size=8)),
    st.tuples(st.just("overwrite"), NAMES, st.binary(max_size=8)),
    st.tuples(st.just("delete"), NAMES, st.just(b"")),
)


@settings(deadline=None)
@given(st.lists(EVENTS, max_size=40), NAMES)
def test_keys_are_a_dictionary_of_paths(
    events: list[tuple[str, str, bytes]], directory: str
) -> None:
    """Sets, deletes and listings agree with a dictionary of normalised names; the bytes held are
    those of its items.
    """
    driver = Driver(1)
    model = dict[str, bytes]()
    for what, key, value in events:
        name = normalise(key)
        if what == "delete":
            driver.make(lambda call, key=key: driver.machine.keys.delete(call, key))  # type: ignore[misc]
            model = {
                other: held
                for other, held in model.items()
                if other != name and not other.startswith(f"{name}/")
            }
        else:
            exists = name in model and what == "set"
            assert driver.code(driver.set(key, value, overwrite=what == "overwrite")) is (
                Code.ALREADY_EXISTS if exists else Code.OK
            )
            model = model if exists else model | {name: value}
    assert driver.machine.keys.values == model
    assert driver.machine.keys.total_bytes == sum(
        len(key) + len(value) for key, value in model.items()
    )
    listed = driver.value(driver.make(lambda call: driver.machine.keys.list_dir(call, directory)))
    assert listed == sorted(
        (key, value) for key, value in model.items() if key.startswith(f"{normalise(directory)}/")
    )
