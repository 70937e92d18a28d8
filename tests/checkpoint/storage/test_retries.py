"""What is asked again, for how long, and what an error that stays says to do."""

from __future__ import annotations

import errno
import logging

import pytest

from holdfast.checkpoint.storage.retries import (
    CONNECT_LIMIT_S,
    LIMIT_S,
    LONGEST_PAUSE_S,
    Busy,
    Fault,
    Patience,
    fault_of,
)

WHERE = "s3://bucket/run/a"


class Clock:
    """Time that passes only in pauses."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def read(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.pauses.append(seconds)

    def patience(self) -> Patience:
        return Patience(clock=self.read, sleep=self.sleep, random=lambda: 1.0)


def _busy(*, is_connected: bool = True) -> Busy:
    error = OSError(errno.EBUSY, "busy", WHERE)
    return Busy(Fault(error, passes=True, is_connected=is_connected))


def test_what_passes_is_asked_again_after_growing_pauses(caplog: pytest.LogCaptureFixture) -> None:
    """The pauses double up to a bound, and the log hears of it once."""
    clock = Clock()
    failures = [_busy() for _ in range(10)]

    def attempt(timeout_s: float) -> str:
        assert timeout_s == LIMIT_S - clock.now
        if failures:
            raise failures.pop()
        return "answer"

    with caplog.at_level(logging.WARNING):
        assert clock.patience().ask(attempt) == "answer"
    assert clock.pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 15.0, LONGEST_PAUSE_S]
    assert [record.getMessage().partition(":")[2] for record in caplog.records] == [
        f" '{WHERE}': asked 3 times, and again"
    ]


@pytest.mark.parametrize(("is_connected", "limit_s"), [(True, LIMIT_S), (False, CONNECT_LIMIT_S)])
def test_asking_ends_within_its_limit(is_connected: bool, limit_s: float) -> None:
    """The last error is raised, and no pause goes beyond the limit; it is shorter where no server
    takes the connection.
    """
    clock = Clock()

    def attempt(timeout_s: float) -> None:
        raise _busy(is_connected=is_connected)

    with pytest.raises(OSError, match="busy"):
        clock.patience().ask(attempt)
    assert limit_s - LONGEST_PAUSE_S <= clock.now < limit_s


def test_what_stays_is_asked_once() -> None:
    """An error that is no Busy comes out at once."""
    clock = Clock()

    def attempt(timeout_s: float) -> None:
        raise PermissionError("no")

    with pytest.raises(PermissionError):
        clock.patience().ask(attempt)
    assert clock.pauses == []


@pytest.mark.parametrize(
    ("text", "kind", "passes", "says"),
    [
        ("status code: 503 Service Unavailable: SlowDown", OSError, True, "busy (status 503)"),
        ("status code: 429 Too Many Requests", OSError, True, "busy (status 429)"),
        ("HTTP error: error sending request", OSError, True, "error sending request"),
        ("HTTP error: request or response body error", OSError, True, "body error"),
        ("status code: 400 Bad Request: ExpiredToken", PermissionError, False, "have expired"),
        ("status code: 403 Forbidden: AccessDenied", PermissionError, False, "the key is wrong"),
        ("status code: 403 Forbidden: InvalidAccessKeyId", PermissionError, False, "check key"),
        ("PUT http://169.254.169.254/latest", PermissionError, False, "no credentials were found"),
        ("status code: 301: PermanentRedirect", OSError, False, "?region="),
        ("status code: 404 Not Found: NoSuchBucket", OSError, False, "no such bucket"),
        ("status code: 418 I'm a teapot", OSError, False, "teapot"),
    ],
)
def test_an_error_says_what_to_do(text: str, kind: type[OSError], passes: bool, says: str) -> None:
    """Its kind is the operating system's, and it names the object."""
    fault = fault_of(RuntimeError(f"Generic S3 error: {text}\n\nDebug source:\nGeneric"), WHERE)
    assert isinstance(fault.error, kind)
    assert not isinstance(fault.error, FileNotFoundError)
    assert fault.passes is passes
    assert says in str(fault.error)
    assert fault.error.filename == WHERE
    assert "Debug source" not in str(fault.error)


def test_no_answer_in_time_passes() -> None:
    """A try that came to its deadline may have been applied, or not."""
    fault = fault_of(TimeoutError(), WHERE)
    assert isinstance(fault.error, TimeoutError)
    assert fault.passes
