"""The installed grpcio is a tested one, and an untested one is told."""

from __future__ import annotations

import grpc
import pytest

from holdfast.coordination.grpc_release import TESTED_GRPC, is_tested_grpc


@pytest.mark.parametrize("version", ["1.65.9", "1.86.0", "2.0.0"])
def test_an_untested_grpcio_is_no_silent_switch(
    version: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Outside the tested releases the public API serves, and one warning says so and what to
    install.
    """
    is_tested_grpc.cache_clear()
    assert not is_tested_grpc(version) and not is_tested_grpc(version)
    assert [record.getMessage() for record in caplog.records] == [
        f"grpcio {version} was not tested, only 1.66 to before 1.86: calls go through gRPC's public"
        " API, which is slower; for the fast path install 'grpcio>=1.66,<1.86'"
    ]


def test_the_installed_grpcio_is_a_tested_one(caplog: pytest.LogCaptureFixture) -> None:
    """The private module is used for it, and a later minor release has to be tested before it
    is.
    """
    release = tuple(int(part) for part in grpc.__version__.split(".")[:2])
    assert is_tested_grpc() and is_tested_grpc("1.66.2") and not caplog.records
    assert TESTED_GRPC[0] <= release < TESTED_GRPC[1] and not is_tested_grpc(
        f"{TESTED_GRPC[1][0]}.{TESTED_GRPC[1][1]}.0"
    )
