"""Asks a store again when an error passes: with growing random pauses, up to a limit of time.

The library of the requests tries each of them once. What its error means is in the text of the
error alone, and `fault_of` reads it there. An error that passes (the store is busy, the connection
broke) is asked again. Anything else is raised at once, with what to do about it.
"""

from __future__ import annotations

import errno
import logging
import math
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from .base import EndsRequests, Storage

_log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 15.0
LIMIT_S = 300.0  # for one request with all its tries
CONNECT_LIMIT_S = 60.0  # the same where no server takes the connection
WARN_AFTER = 3  # tries of one request that failed

T = TypeVar("T")

_STATUS = re.compile(r"status code: (\d{3})|\b(429|503) (?:Too Many|Service Unav|Slow)")
_BUSY = (408, 425, 429, 500, 502, 503, 504)
_THROTTLED = (429, 503)
_BROKEN = (
    "error sending request",
    "error decoding response body",
    "request or response body error",
    "connection",
    "timed out",
    "HTTP error",
)


@dataclass(frozen=True)
class Fault:
    """One failed try: what to raise, and whether the same request may succeed later."""

    error: OSError
    passes: bool
    is_connected: bool = True


class Busy(Exception):
    """A try failed with something that passes."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.error)
        self.fault = fault


def until(storage: Storage, end_s: float) -> Storage:
    """Returns the store whose requests end then, by the monotonic clock, where it can do that."""
    return storage.until(end_s) if isinstance(storage, EndsRequests) else storage


def fault_of(error: BaseException, where: str) -> Fault:
    """Returns what an error of obstore's means for the object or bucket `where`."""
    text = message_of(error)
    if isinstance(error, TimeoutError):
        return Fault(OSError(errno.ETIMEDOUT, "the store did not answer in time", where), True)
    refusal = _refusal(text)
    if refusal is not None:
        return Fault(OSError(*refusal, where), passes=False)
    if isinstance(error, FileNotFoundError):
        return Fault(FileNotFoundError(errno.ENOENT, "No such object", where), passes=False)
    if "kind: Connect" in str(error):
        what = "the name of the server is not known" if "dns error" in str(error) else text
        advice = f"{what}; expected a server that answers: check the endpoint and the network"
        return Fault(OSError(errno.ECONNREFUSED, advice, where), True, is_connected=False)
    status = _status(text)
    if status in _BUSY:
        busy = f"the store is busy (status {status}); expected it to take the request by now"
        return Fault(OSError(errno.EBUSY, busy, where), passes=True)
    passes = status is None and any(sign in text for sign in _BROKEN)
    return Fault(OSError(errno.EIO, text, where), passes)


def is_throttled(error: BaseException) -> bool:
    """Says of an error of obstore's whether the store asked for fewer requests."""
    return _status(message_of(error)) in _THROTTLED


def message_of(error: BaseException) -> str:
    """Returns what an error of obstore's says, without its account of where."""
    return str(error).split("\n\nDebug source")[0]


def _status(text: str) -> int | None:
    found = _STATUS.search(text)
    return int(found[1] or found[2]) if found else None


# How stores and obstore say that nothing will help but a change by the user, and what to change.
_REFUSALS = (
    (
        ("NoSuchBucket", "ContainerNotFound", "specified bucket does not exist"),
        errno.ENXIO,
        "there is no such bucket; create it first, or correct its name",
    ),
    (
        ("ExpiredToken", "token included in the request is expired"),
        errno.EACCES,
        "the credentials have expired; renew them, or use a source that renews them by itself",
    ),
    (
        ("169.254.169.254", "169.254.170.2", "metadata.google"),
        errno.EACCES,
        "no credentials were found; set them in the environment (AWS_ACCESS_KEY_ID, ...), or pass"
        " ?skip_signature=true for a public bucket",
    ),
    (
        (
            "PermanentRedirect",
            "AuthorizationHeaderMalformed",
            "IllegalLocationConstraint",
            "incorrectly configured region",  # obstore's words, which has not read S3's
        ),
        errno.EINVAL,
        "the bucket is in another region; pass its region, as ?region=eu-central-1",
    ),
    (
        ("InvalidAccessKeyId", "SignatureDoesNotMatch", "AuthenticationFailed", "401 Unauthorized"),
        errno.EACCES,
        "the store does not know these credentials; check key, secret and session token",
    ),
    (
        ("403 Forbidden", "AccessDenied", "AuthorizationPermissionMismatch"),
        errno.EACCES,
        # Azurite and some gateways answer a wrong key so, too.
        "the store refused it: these credentials may not do this here, or the key is wrong;"
        " expected credentials that may list, read, write and delete here",
    ),
    (
        ("non-partial response",),
        errno.ENOTSUP,
        "the server, or a proxy before it, sends whole objects where a range was asked for;"
        " expected one that knows the header Range",
    ),
)


def _refusal(text: str) -> tuple[int, str] | None:
    for signs, number, sentence in _REFUSALS:
        if any(sign in text for sign in signs):
            return number, sentence
    return None


@dataclass(frozen=True)
class Patience:
    """How long a request is asked again. Tests bring a clock of their own.

    After `end_s`, by the clock, nothing is asked any more.
    """

    limit_s: float = LIMIT_S
    end_s: float = math.inf
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    random: Callable[[], float] = random.random

    def ask(self, attempt: Callable[[float], T]) -> T:
        """Returns what `attempt` returns, which gets the seconds that it may take at most.

        It raises Busy for what passes, and is then called again, after a random pause up to twice
        as long as the last bound. Raises the error of the last try when the time is over.
        """
        began = self.clock()
        end = min(began + self.limit_s, self.end_s)
        bound_s = FIRST_PAUSE_S
        tries = 0
        while True:
            try:
                return attempt(max(0.001, end - self.clock()))
            except Busy as busy:
                fault = busy.fault
                tries += 1
                pause_s = bound_s * self.random()
                bound_s = min(2 * bound_s, LONGEST_PAUSE_S)
                if not fault.is_connected:
                    end = min(end, began + CONNECT_LIMIT_S)
                if self.clock() + pause_s >= end:
                    raise fault.error from busy
                if tries == WARN_AFTER:
                    _log.warning("%s: asked %d times, and again", fault.error, tries)
                self.sleep(pause_s)
