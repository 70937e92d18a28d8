"""ClusterGroup over jaxlib's client and ours, in real processes."""

from __future__ import annotations

import textwrap

import pytest

from tests.support.cluster import free_port, run_processes

START = """
import sys
import jax
import holdfast.multihost as multihost
from holdfast.coordination import BarrierTimeout
from holdfast.multihost import ClusterGroup, default_group
index, count, port, which = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
if which == "ours":
    multihost.initialize(f"127.0.0.1:{port}", count, index, timeout_s=60)
else:
    jax.distributed.initialize(f"127.0.0.1:{port}", count, index, coordinator_bind_address=f"127.0.0.1:{port}")
client = multihost.current_client()
group = default_group()

def no_keys_left():
    return [key for key, _ in client.key_value_dir_get("holdfast") if "/sync/" not in key and "/progress/" not in key] == []
"""


BOTH = pytest.mark.parametrize("which", ["jaxlib", "ours"])


def run(which: str, script: str, count: int = 3) -> list[str]:
    return run_processes(
        START + textwrap.dedent(script) + "\nmultihost.shutdown()\n",
        count,
        arguments=[free_port(), which],
    )


@BOTH
def test_gather_broadcast_barrier(which: str) -> None:
    """Values come in rank order, the nth call of a name matches the nth, sizes up to 9 MiB pass,
    and no key stays.
    """
    run(
        which,
        """
        assert (group.index, group.count) == (index, count)
        for turn in range(30):
            got = group.gather("same/name", f"{index}:{turn}".encode(), timeout_s=30)
            assert got == ([f"{i}:{turn}".encode() for i in range(count)] if index == 0 else None), got
            got = group.broadcast("same/name", str(turn).encode() if index == 0 else None, timeout_s=30)
            assert got == str(turn).encode()
            group.barrier("same/name", timeout_s=30)
        got = group.gather("big", bytes([index]) * (9 << 20), timeout_s=60)
        assert index or [len(value) for value in got] == [9 << 20] * count
        assert group.gather("", b"", timeout_s=30) == ([b""] * count if index == 0 else None)
        group.barrier("before the look", timeout_s=30)
        assert no_keys_left()
        group.report(step=3)
        """,
    )


@BOTH
def test_names_do_not_wait_for_each_other(which: str) -> None:
    """Threads with different names overtake each other; threads with one name take turns."""
    run(
        which,
        """
        from concurrent.futures import ThreadPoolExecutor
        names = [f"n{i}" for i in range(6)] * 5
        order = names if index % 2 else names[::-1]
        with ThreadPoolExecutor(10) as pool:
            got = list(pool.map(lambda name: (name, group.gather(name, f"{name}.{index}".encode(), timeout_s=60)), order))
        if index == 0:
            assert all(values == [f"{name}.{i}".encode() for i in range(count)] for name, values in got), got
        """,
    )


@BOTH
def test_a_missing_process_is_named_and_its_late_call_fails_alike(which: str) -> None:
    """Who waits gets BarrierTimeout with the missing process; the late one gets the same answer;
    the name works again; no key stays.
    """
    outputs = run(
        which,
        """
        if index == 1:
            client.blocking_key_value_get("go", 60000)
        try:
            group.gather("save", b"x", timeout_s=2)
            raise SystemExit("no error")
        except BarrierTimeout as error:
            print("caught", error.missing, error)
            assert isinstance(error, TimeoutError) and str(error).startswith("DEADLINE_EXCEEDED: ")
        if index == 0:
            client.key_value_set("go", "1")
        got = group.gather("save", b"y", timeout_s=30)
        assert index or got == [b"y"] * count
        group.barrier("before the look", timeout_s=30)
        assert no_keys_left()
        """,
    )
    assert "caught (1,)" in outputs[0]
    assert "caught (1,)" in outputs[2]


@BOTH
def test_a_group_of_some_processes(which: str) -> None:
    """Ranks follow the processes given; two groups with the same names do not meet."""
    run(
        which,
        """
        members = [0, 3] if index in (0, 3) else [1, 2]
        half = ClusterGroup(client, members.index(index), 2, processes=members)
        for turn in range(5):
            got = half.gather("x", str(index).encode(), timeout_s=30)
            assert got == ([str(i).encode() for i in members] if half.index == 0 else None)
            assert half.broadcast("x", b"from %d" % index if half.index == 0 else None, timeout_s=30) == b"from %d" % members[0]
            half.barrier("x", timeout_s=30)
        """,
        4,
    )


def test_a_value_that_was_sent_counts_although_its_sender_dies() -> None:
    """Rank 0 has every value when a process dies after it sent its own and before all have come;
    the others hear who died.
    """
    body = """
    import os, signal
    from holdfast.coordination import ProcessLost
    group.barrier("start", timeout_s=30)
    if index == 2:
        client.key_value_set_bytes("holdfast/gather/save/0/2", b"two")
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        got = group.gather("save", str(index).encode(), timeout_s=40)
        assert index == 0 and got == [b"0", b"1", b"two"], got
        assert client.key_value_dir_get("holdfast/gather/save") == []
        print("complete")
    except ProcessLost as error:
        assert index == 1 and error.process == 2, error
        print("heard of", error.process)
    os._exit(0)
    """
    start = START.replace("timeout_s=60)", "timeout_s=60, heartbeat_timeout_s=4)")
    outputs = run_processes(
        start + textwrap.dedent(body), 3, arguments=[free_port(), "ours"], codes=[0, 0, -9]
    )
    assert "complete" in outputs[0]
    assert "heard of 2" in outputs[1]
