"""The releases of grpcio whose private module was tested."""

from __future__ import annotations

import functools
import logging

import grpc

log = logging.getLogger("holdfast.coordination")

TESTED_GRPC = ((1, 66), (1, 86))
"""Releases of grpcio, from the first to before the second, whose private module was tested. Outside
it gRPC's public API serves.
"""


@functools.cache
def is_tested_grpc(version: str = grpc.__version__) -> bool:
    """Returns whether the private module of the installed grpcio was tested; logs a warning, once,
    where it was not.
    """
    release = tuple(int(part) for part in version.split(".")[:2])
    tested = TESTED_GRPC[0] <= release < TESTED_GRPC[1]
    if not tested:
        first, last = (".".join(map(str, each)) for each in TESTED_GRPC)
        what = (
            f"grpcio {version} was not tested, only {first} to before {last}: calls go through"
            " gRPC's public API, which is slower"
        )
        log.warning("%s; for the fast path install 'grpcio>=%s,<%s'", what, first, last)
    return tested
