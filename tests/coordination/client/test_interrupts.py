"""Ctrl-C at any place of a call: the next calls are answered."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from holdfast.coordination import (
    CoordinationClient,
    CoordinationService,
    ServiceTimeouts,
    Timeouts,
)
from holdfast.coordination.client import stream


@contextmanager
def interrupt(place: int) -> Iterator[None]:
    """Raises KeyboardInterrupt in this thread at one of the places of the transport where Python
    handles signals: as a function begins, or as one that is not Python's has returned.
    """
    left = place

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal left
        code = frame.f_code
        if event not in ("call", "c_return"):
            return
        if code.co_filename == stream.__file__:
            left -= 1
        if left < 0:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def test_ctrl_c_at_each_place_of_a_call() -> None:
    """Whatever was left half done is over with its stream, and the next one is opened."""
    with CoordinationService.spawn(
        1, timeouts=ServiceTimeouts(heartbeat_s=600), recoverable=True
    ) as service:
        place = 0
        interrupted = True
        with CoordinationClient(
            service.address, 0, timeouts=Timeouts(heartbeat_s=600, rpc_s=10)
        ) as client:
            while interrupted:
                interrupted = False
                try:
                    with interrupt(place):
                        client.key_value_set(f"{place}", "", allow_overwrite=True)
                except KeyboardInterrupt:
                    interrupted = True
                print(place, interrupted, flush=True)
                client.key_value_set("next", str(place), allow_overwrite=True)
                assert client.key_value_try_get("next") == str(place)
                place += 1
