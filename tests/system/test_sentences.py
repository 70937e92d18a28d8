"""The first words of errors, from jaxlib's own service and from ours, as unmodified jaxlib clients
read them.
"""

from __future__ import annotations

import json
from contextlib import ExitStack

import grpc
import pytest
from jax._src.lib import _jax

from holdfast.coordination import CoordinationService
from holdfast.coordination.names import PROFILE_A
from holdfast.proto import coordination_pb2 as pb
from tests.support.cluster import Processes, free_port, run_processes
from tests.support.paths import program

ASKING = program("sentences_asking")

FIRST_WORDS = {
    "try_get": "NOT_FOUND: Config key nope/x not found.",
    "set": "ALREADY_EXISTS: key a already exists.",
    "increment": 'FAILED_PRECONDITION: Failed to parse value "abc" as an integer.',
    "barrier": "DEADLINE_EXCEEDED: Barrier timed out. Id: b1::0.",
    "replay": "DEADLINE_EXCEEDED: Barrier timed out. Id: b1::0.",
    "outsider": "INVALID_ARGUMENT: A non-participating task (0) called the barrier: b2::0",
    "unknown": (
        "INVALID_ARGUMENT: Unexpected task (7) that is not in the cluster called the barrier."
        " Barrier Id: b4::0"
    ),
    "twice": (
        "INVALID_ARGUMENT: Conflicting tasks specified by different processes for the same barrier:"
        " b5::0."
    ),
    "late get": "DEADLINE_EXCEEDED: GetKeyValue() timed out with key: none and duration: 200ms",
    "live": (
        "INVALID_ARGUMENT: Requesting task 0 is not one of the tasks specified in a GetAliveTasks"
        " request."
    ),
}


JOINED = program("sentences_joined")

REFUSALS = {
    7: "INVALID_ARGUMENT: Unexpected task registered with task=7",
    1: (
        "ABORTED: 1 unexpectedly tried to connect with a different incarnation. It has likely"
        " restarted."
    ),
}


@pytest.mark.parametrize("whose", ["jaxlib", "ours"])
def test_refusals_of_who_comes_begin_with_jaxlibs_words(whose: str) -> None:
    """A number that the job does not have, and a second life where the job is not recoverable: what
    a client would read.
    """
    with ExitStack() as stack:
        if whose == "jaxlib":
            address = f"127.0.0.1:{free_port()}"
            stack.callback(
                _jax.get_distributed_runtime_service(
                    address, 2, heartbeat_timeout=100, shutdown_timeout=5
                ).shutdown
            )
        else:
            address = stack.enter_context(CoordinationService.spawn(2)).address
        processes = stack.enter_context(Processes(JOINED, 1, arguments=[address]))
        processes.wait_for(0, "joined")
        register = stack.enter_context(grpc.insecure_channel(address)).unary_unary(
            PROFILE_A + "RegisterTask"
        )
        for task_id, words in REFUSALS.items():
            with pytest.raises(grpc.RpcError) as refused:
                register(
                    pb.RegisterTaskRequest(
                        incarnation=5, source_task_id=task_id
                    ).SerializeToString(),
                    timeout=20,
                )
            assert f"{refused.value.code().name}: {refused.value.details()}".startswith(words)


@pytest.mark.parametrize("whose", ["jaxlib", "ours"])
def test_errors_begin_with_jaxlibs_words(whose: str) -> None:
    """Keys, barriers and the barrier of the living: what a program that reads the sentences looks
    for is there in both.
    """
    if whose == "jaxlib":
        (output,) = run_processes(ASKING, 1, arguments=[f"127.0.0.1:{free_port()}", whose])
    else:
        with CoordinationService.spawn(3) as service:
            (output,) = run_processes(ASKING, 1, arguments=[service.address, whose])
    found = json.loads(
        next(line for line in output.splitlines() if line.startswith("found ")).removeprefix(
            "found "
        )
    )
    assert {what: found[what][: len(words)] for what, words in FIRST_WORDS.items()} == FIRST_WORDS
