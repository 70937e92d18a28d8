"""Admission: the token, the rate of one peer's calls, and whose each task is."""

from __future__ import annotations

import pytest

from holdfast.coordination.core import journal_codec
from holdfast.coordination.core.machine import Machine
from holdfast.coordination.core.status import Code
from holdfast.coordination.core.task_table import TaskState
from holdfast.coordination.limits import Limits
from holdfast.coordination.names import KEY_HEADER, TOKEN_HEADER
from holdfast.coordination.server.admission import Admission, CallRefused, TaskOwners, headers_of
from tests.support.driver import Driver

TOKEN = (TOKEN_HEADER, "Bearer secret")


def no_peer() -> object:
    raise AssertionError("the peer was asked for")


def admit(metadata: list[tuple[str, str]]) -> str:
    """Returns the key of a call that is let in."""
    headers = headers_of(metadata)
    Admission("secret", Limits()).admit(no_peer, headers.authorization, 0.0)
    return headers.key


def test_the_token_lets_a_call_in() -> None:
    """And the key says whose it is."""
    assert admit([TOKEN, (KEY_HEADER, "mine")]) == "mine"
    assert admit([TOKEN]) == ""


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        [(TOKEN_HEADER, "secret")],
        [(TOKEN_HEADER, "Bearer secre")],
        [(TOKEN_HEADER, "Bearer other"), TOKEN],
        [("other", "Bearer secret")],
    ],
)
def test_a_call_without_the_token_is_refused(metadata: list[tuple[str, str]]) -> None:
    """None, another, a part of it, or one that comes second: UNAUTHENTICATED, and the message does
    not hold the token.
    """
    with pytest.raises(
        CallRefused, match="the call does not hold this job's token; expected it in 'authorization'"
    ) as caught:
        admit(metadata)
    assert caught.value.code is Code.UNAUTHENTICATED and "secret" not in str(caught.value)


def test_an_open_service_asks_for_no_token() -> None:
    """Whatever a call holds."""
    for shown in (b"", b"Bearer other"):
        Admission(None, Limits()).admit(no_peer, shown, 0.0)


def test_a_flood_cuts_off_its_sender_alone() -> None:
    """Peers are counted apart once all together pass the bound; the next second everybody may call
    again.
    """
    admission = Admission(None, Limits(calls_per_second=10))

    def refused(peer: str, calls: int, now: float) -> int:
        codes = []
        for _ in range(calls):
            try:
                admission.admit(lambda: peer, b"", now)
            except CallRefused as error:
                codes.append(error.code)
        assert set(codes) <= {Code.RESOURCE_EXHAUSTED}
        return len(codes)

    assert refused("flood", 30, 0.0) == 10  # ten before anybody is counted, ten of its own
    assert refused("other", 10, 0.5) == 0
    assert refused("flood", 1, 0.9) == 1
    assert refused("flood", 10, 1.0) == 0


def test_a_held_task_is_its_keys() -> None:
    """While it waits for the others or is there, and after a replay of the journal, no other key is
    let in; once it is lost, any is.
    """
    driver = Driver(2, sessions=False, recoverable=True)

    def codes(task_id: int, key: str, owners: TaskOwners) -> tuple[Code | None, Code | None]:
        found = owners.may_join(task_id, key), owners.may_call(task_id, key)
        return found[0] and found[0].code, found[1] and found[1].code  # type: ignore[return-value]

    denied = (Code.PERMISSION_DENIED, Code.PERMISSION_DENIED)
    owners = TaskOwners(driver.machine)
    assert codes(0, "mine", owners) == (None, None) and codes(0, "", owners) == denied
    driver.register(0, 50)
    assert codes(0, "yours", owners) == denied  # it waits for the others
    assert codes(1, "yours", owners) == (None, None)
    driver.register(1, 51)
    assert (
        codes(0, "yours", owners) == denied
        and owners.may_call(-1, "yours") is None
        and owners.may_call(-1, "nobody's") is not None
    )
    rows = [row for row in journal_codec.drain(driver.machine, 0.0) if row.value is not None]
    assert not any(
        key in (row.value or b"") for row in rows for key in (b"mine", b"yours")
    )  # a digest is enough
    again = Machine(driver.config, driver.now)
    journal_codec.load(again, rows, driver.now, 0.0)
    assert codes(0, "yours", TaskOwners(again)) == denied and codes(
        0, "mine", TaskOwners(again)
    ) == (None, None)
    assert owners.may_join(0, "yours", has_stream=False).code is Code.UNAVAILABLE  # type: ignore[union-attr]
    driver.wait(12, beating=(1,))
    assert driver.machine.task_table.tasks[0].state is TaskState.ERROR
    assert codes(0, "yours", owners) == (None, None)
    assert owners.may_call(0, "mine") is not None


def test_a_certificate_speaks_for_its_processes_alone() -> None:
    """Its holder takes its number at any time, also one that is held; any other number is refused;
    other names say nothing.
    """
    driver = Driver(3, sessions=False, recoverable=True)
    owners = TaskOwners(driver.machine)
    for task_id in range(3):
        assert owners.may_join(task_id, f"key {task_id}") is None
        driver.register(task_id, 50 + task_id)

    def names() -> list[bytes]:
        return [b"DNS:somewhere", b"holdfast:process/1", b"holdfast:process/x"]

    assert (
        owners.may_join(1, "next life", names) is None and owners.may_call(1, "next life") is None
    )
    denied = owners.may_join(0, "next life", names)
    assert denied is not None and denied.code is Code.PERMISSION_DENIED
    assert denied.message == "process 0 is another's: the caller's certificate names 1 alone"
    nameless = owners.may_join(2, "stranger", lambda: [b"DNS:somewhere"])
    assert nameless is not None and nameless.code is Code.PERMISSION_DENIED


@pytest.mark.parametrize(
    "uri",
    [
        b"holdfast:process/1",
        b"spiffe://example.org/holdfast/process/1",
        b"spiffe://example.org/a/b/holdfast/process/1",
    ],
)
def test_a_certificate_stands_for_the_key(uri: bytes) -> None:
    """Its holder, jaxlib's own mTLS client, joins and calls without a key, for its process alone; a
    key of another does not.
    """
    owners = TaskOwners(Driver(3, sessions=False).machine)
    assert (
        owners.may_join(1, "", lambda: [uri]) is None
        and owners.may_call(1, "", lambda: [uri]) is None
    )
    assert owners.may_call(-1, "", lambda: [uri]) is None
    for status in (owners.may_join(0, "", lambda: [uri]), owners.may_call(0, "", lambda: [uri])):
        assert (
            status is not None
            and status.message == "process 0 is another's: the caller's certificate names 1 alone"
        )
    for names in ([], [b"DNS:process/1"], [b"spiffe://example.org/process/1"]):
        for may in (owners.may_join, owners.may_call):
            status = may(1, "", lambda names=names: names)  # type: ignore[misc]
            assert (
                status is not None and "or a certificate that names its process" in status.message
            )
    assert owners.may_call(1, "stranger") is not None
    assert owners.may_call(1, "", lambda: [b"holdfast:process/x"]) is not None
