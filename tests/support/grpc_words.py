"""What gRPC says of a connection, which is for its developers: never part of a message of ours."""

from __future__ import annotations

import re

GRPC_WORDS = re.compile(
    r"failed to connect|last error|ipv[46]:|recvmsg|errno|Socket closed|RST_STREAM"
    r"|Deadline Exceeded|Ssl handshake|GOAWAY|Stream removed|RPC|channel|\n",
    re.IGNORECASE,
)
