"""Whether gRPC's private module may be built on: `grpc._cython.cygrpc`, of which the fast transports of service and client are made."""

from __future__ import annotations

import grpc

TESTED = ((1, 66), (1, 90))
"""Releases of grpcio, from the first to before the second, whose private module was tested. Outside it gRPC's public face serves."""


def tested() -> bool:
    """Says whether the installed grpcio is one of them."""
    version = tuple(int(part) for part in grpc.__version__.split(".")[:2])
    return TESTED[0] <= version < TESTED[1]
