"""Comes as process 1, which is another's, over both wires: argv[3:] are address and credentials."""

from __future__ import annotations

import sys

import grpc

from holdfast.coordination import CoordinationClient, CoordinationError, Credentials, Timeouts
from holdfast.coordination.names import PROFILE_A
from holdfast.proto import coordination_pb2

address = sys.argv[3]
credentials = Credentials(*sys.argv[4:])
try:
    CoordinationClient(address, 1, credentials=credentials, timeouts=Timeouts(init_s=10)).connect()
except CoordinationError as error:
    print("session", error, flush=True)
with credentials.channel(address) as channel:
    request = coordination_pb2.RegisterTaskRequest(incarnation=5, source_task_id=1)
    register = channel.unary_unary(f"{PROFILE_A}RegisterTask")
    try:
        register(request.SerializeToString(), timeout=10, metadata=credentials.metadata())
    except grpc.RpcError as error:
        print("agent", error.code().name, flush=True)
