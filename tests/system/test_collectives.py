"""global_max and broadcast_one_to_all: exact, for any tree, and an error instead of a hang when a
peer dies.
"""

from __future__ import annotations

import textwrap
import time

import pytest

from tests.support.cluster import Processes, free_port, run_processes

# argv: index, count, port of the coordinator, then the test's own.
START = """
import sys, time
import jax, numpy as np
import jax.numpy as jnp
import holdfast.multihost as multihost
from holdfast.coordination import BarrierTimeout, CoordinationError, ProcessLost
index, count, port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
multihost.initialize(f"127.0.0.1:{port}", count, index, timeout_s=60, heartbeat_timeout_s=4)
"""


def test_exact_for_every_dtype() -> None:
    """The source's bits arrive, whoever it is: 64-bit values, -0.0, NaN payloads, bfloat16,
    booleans, complex numbers, typed keys.
    """
    run_processes(
        START
        + textwrap.dedent("""
        def tree(process):
            nan = np.array([0x7FC00001 + process, 0x80000000], np.uint32).view(np.float32)
            return {"i64": np.array([2**62 + process, -process]), "nan": nan, "f64": np.float64(1e300) + process,
                    "bf16": jnp.full((3,), process + 0.5, jnp.bfloat16), "bool": [process % 2 == 0, np.array([True, False, process == 1])],
                    "c64": np.complex64(1 + process * 1j), "u8": np.arange(process, process + 5, dtype=np.uint8),
                    "key": jax.random.key(process), "empty": np.zeros((0, 3)), "none": None}
        def bits(leaf):
            leaf = np.asarray(jax.random.key_data(leaf) if isinstance(leaf, jax.Array) and leaf.dtype == jax.random.key(0).dtype else leaf)
            return leaf.dtype, leaf.shape, leaf.tobytes()
        for source in range(count):
            found = multihost.broadcast_one_to_all(tree(index), is_source=index == source)
            assert jax.tree.map(bits, found) == jax.tree.map(bits, tree(source)), (source, found)
        assert multihost.broadcast_one_to_all({}) == {}
        assert multihost.global_max([index, -index, 7 - index, -(2**31), 2**31 - 1]) == [count - 1, 0, 7, -(2**31), 2**31 - 1]
        assert multihost.global_max([]) == []
        assert type(multihost.global_max([index])[0]) is int
        multihost.shutdown()
        """),
        3,
        arguments=[free_port()],
        devices=2,
    )


KILLED = {
    "barrier": 'multihost.sync_global_processes("far", timeout=60)',
    "blocking get": (
        'multihost.default_group().broadcast("far", b"" if index == 0 else None, timeout_s=60)'
    ),
    "gather": 'multihost.default_group().gather("far", b"", timeout_s=60)',
    "broadcast": "multihost.broadcast_one_to_all(np.arange(4), is_source=index == 3, timeout_s=60)",
    "global_max": "multihost.global_max([index], timeout_s=60)",
}


QUICK = ("barrier", "global_max")


@pytest.mark.parametrize(
    "during",
    [
        during if during in QUICK else pytest.param(during, marks=pytest.mark.slow)
        for during in KILLED
    ],
)
def test_killed_in_the_middle(during: str) -> None:
    """SIGKILL of one of four while the others wait: every survivor gets an error naming it within
    the heartbeat timeout (4 s) and 2 s.
    """
    victim = 0 if during == "blocking get" else 3
    script = START + textwrap.dedent(f"""
        multihost.global_max([index])
        multihost.sync_global_processes("near")
        print("ready", flush=True)
        if index == {victim}:
            time.sleep(60)
        try:
            {KILLED[during]}
        except CoordinationError as error:
            line = " ".join(map(str, ["lost", getattr(error, "process", None), "at", time.time(), error]))
            print(line + "\\n", end="", flush=True)  # in one write: other threads log
        """)
    with Processes(script, 4, arguments=[free_port()]) as processes:
        for index in range(4):
            processes.wait_for(index, "ready")
        time.sleep(0.5)  # long enough for the others to be in the middle of it; any moment will do
        killed_at = time.time()
        processes.kill(victim)
        finished = processes.wait(60)
    for index in set(range(4)) - {victim}:
        assert finished[index].code == 0, finished[index]
        line = next(line for line in finished[index].output.splitlines() if line.startswith("lost"))
        assert line.startswith(f"lost {victim} at "), line
        took_s = float(line.split()[3]) - killed_at
        print(f"{during}: process {index} heard after {took_s:.2f} s")


def test_a_peer_that_does_not_call_is_a_timeout() -> None:
    """When a live process does not take part, the others get BarrierTimeout in time."""
    outputs = run_processes(
        START
        + textwrap.dedent("""
        multihost.global_max([index])
        if index:
            try:
                multihost.global_max([index, index], timeout_s=1.5)
            except BarrierTimeout as error:
                print("late:", error)
        multihost.sync_global_processes("end")
        import os; os._exit(0)  # the computation that nobody joined is still there
        """),
        3,
        arguments=[free_port()],
    )
    assert all(
        "late: DEADLINE_EXCEEDED: global_max did not end in 1.5 s" in output
        for output in outputs[1:]
    ), outputs
