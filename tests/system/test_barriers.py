"""Barriers: subsets, names used again, threads, who is missing; the same over jaxlib's client and
ours.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from holdfast.coordination import CoordinationService, JobIdentity, ServiceTimeouts
from tests.support.cluster import free_port, run_processes

# argv: index, count, port of the coordinator, "ours" or "jaxlib", then the test's own.
START = """
import sys, threading, time
import jax
index, count, port, which = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
import holdfast.multihost as multihost
from holdfast.coordination import BarrierTimeout, ProcessLost
if which == "ours":
    multihost.initialize(f"127.0.0.1:{port}", count, index, timeout_s=60, heartbeat_timeout_s=6)
else:
    jax.distributed.initialize(f"127.0.0.1:{port}", count, index, coordinator_bind_address=f"127.0.0.1:{port}")
from holdfast.multihost import sync_global_processes, get_barrier_sync_fn
jax.devices()
"""


END = """
multihost.shutdown()
"""


BOTH = pytest.mark.parametrize("which", [pytest.param("jaxlib", marks=pytest.mark.slow), "ours"])


def run(
    which: str, script: str, count: int, *arguments: object, timeout_s: float = 90
) -> list[str]:
    source = START + textwrap.dedent(script) + END
    return run_processes(
        source, count, arguments=[free_port(), which, *arguments], timeout_s=timeout_s
    )


@BOTH
def test_subsets_and_names_used_again(which: str) -> None:
    """One name serves all processes and two disjoint subsets at once, again and again; a function
    made once serves many keys.
    """
    run(
        which,
        """
        mine = {0, 2} if index in (0, 2) else {1, 3}
        half = get_barrier_sync_fn(processes=mine)
        for turn in range(20):
            sync_global_processes("step", timeout=30)
            sync_global_processes("step", timeout=30, processes=mine)
            half(key="step", timeout_ms=30000)
            half(key=f"step {turn}", timeout_ms=30000)
        """,
        4,
    )


@BOTH
def test_the_missing_are_named_and_the_name_still_works(which: str) -> None:
    """A barrier that one process reaches too late fails in time naming it, fails alike for the late
    one, and serves again after.
    """
    outputs = run(
        which,
        """
        client = multihost.current_client()
        multihost.default_group().report(step=40 + index)
        sync_global_processes("reported", timeout=60)
        if index == 2:
            client.blocking_key_value_get("late", 60000)
        start = time.monotonic()
        try:
            sync_global_processes("epoch", timeout=2)
        except BarrierTimeout as error:
            assert isinstance(error, TimeoutError), error
            print("missing", error.missing, "name", error.name, "in time", time.monotonic() - start < 10, str(error).replace(chr(10), " "))
        if index == 0:
            client.key_value_set("late", "now")
        sync_global_processes("epoch", timeout=30)
        """,
        3,
    )
    for index in (0, 1):
        assert "missing (2,) name epoch in time True DEADLINE_EXCEEDED: " in outputs[index]
        assert which == "jaxlib" or "; process 2 last reported step 42" in outputs[index], outputs[
            index
        ]


@BOTH
def test_threads_of_one_name_take_turns(which: str) -> None:
    """Eight threads that use one name at once do not disturb each other: as many calls as there are
    end.
    """
    run(
        which,
        """
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(8) as pool:
            for future in [pool.submit(sync_global_processes, "same", timeout=60) for _ in range(64)]:
                future.result()
        """,
        3,
    )


CONCURRENT = """
import mmap, numpy as np
from concurrent.futures import ThreadPoolExecutor
rounds, path = int(sys.argv[5]), sys.argv[6]
NAMES, THREADS = 50, 10
with open(path, "r+b") as file:
    seen = np.frombuffer(mmap.mmap(file.fileno(), 0), dtype=np.int32).reshape(NAMES, count)
def work(thread, turn):
    for name in range(thread, NAMES, THREADS):
        processes = [None, {p for p in range(count) if p % 2 == index % 2}, {p for p in range(count) if p // 4 == index // 4}][name % 3]
        seen[name, index] = turn
        sync_global_processes(f"name {name}", timeout=60, processes=processes)
        with_me = sorted(processes or range(count))
        assert set(seen[name, with_me] - turn) <= {0, 1}, (name, turn, seen[name])
service_pid = sys.argv[7]
def service_bytes():
    with open(f"/proc/{service_pid}/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE
with ThreadPoolExecutor(THREADS) as pool:
    for turn in range(1, rounds + 1):
        list(pool.map(lambda thread: work(thread, turn), range(THREADS)))
        if index == 0 and service_pid != "0" and turn == max(1, rounds // 10):
            first = service_bytes()
sync_global_processes("all done", timeout=60)
left = [key for key, _ in multihost.current_client().key_value_dir_get("holdfast") if "name" in key]
assert not left, left
if index == 0 and service_pid != "0":
    print(f"the service grew by {service_bytes() - first} bytes")
"""


def run_concurrent(which: str, rounds: int, folder: Path, timeout_s: float) -> int:
    """50 names, 8 processes: who leaves a barrier has seen that all its participants entered it,
    and none is more than one turn ahead.

    Returns by how many bytes our service grew after the first tenth of the rounds.
    """
    board = folder / "seen"
    board.write_bytes(bytes(50 * 8 * 4))
    if which == "jaxlib":
        run(which, CONCURRENT, 8, rounds, board, 0, timeout_s=timeout_s)
        return 0
    with CoordinationService.spawn(
        8,
        job=JobIdentity(name="job"),
        timeouts=ServiceTimeouts(heartbeat_s=30),
        recoverable=True,
        survivable=True,
    ) as service:
        arguments = [service.address.rpartition(":")[2], which, rounds, board, service.pid]
        start = START.replace(", heartbeat_timeout_s=6", "")  # the service's own
        outputs = run_processes(
            start + CONCURRENT + END, 8, arguments=arguments, timeout_s=timeout_s
        )
    return int(re.search(r"grew by (-?\d+) bytes", outputs[0])[1])  # type: ignore[index]


@BOTH
def test_fifty_names_from_ten_threads(which: str, tmp_path: Path) -> None:
    """50 named barriers from 10 threads on 8 processes, over all and over subsets: no turn of any
    name is mixed up.
    """
    run_concurrent(which, 5, tmp_path, 100)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fifty_names_a_thousand_rounds(tmp_path: Path) -> None:
    """The same for 1,000 rounds over our service, which holds on to nothing: 45,000 barriers after
    the first 5,000 it has hardly grown.
    """
    grown = run_concurrent("ours", 1000, tmp_path, 850)
    print(f"the service grew by {grown} bytes")
    assert grown < 4 << 20


def test_numbers_of_no_process_are_refused_and_no_time_is_now() -> None:
    """A process that the job does not have is a ValueError that says which it has; a timeout of 0
    does not wait for anybody.
    """
    run_processes(
        """
        import sys, time
        import holdfast.multihost as multihost
        index, count, port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
        multihost.initialize(f"127.0.0.1:{port}", count, index, timeout_s=60)
        def refused(call, *arguments, **options):
            try:
                call(*arguments, **options)
            except ValueError as error:
                assert "the job has 2" in str(error) and "0 to 1" in str(error), error
                return True
        assert refused(multihost.sync_global_processes, "x", processes={index, 9})
        assert refused(multihost.get_barrier_sync_fn, processes={index, -1})
        assert refused(multihost.live_processes, [index, 9])
        assert refused(multihost.runtime_to_distributed_process_id, 9)
        if index == 0:
            begun_s = time.monotonic()
            try:
                multihost.sync_global_processes("alone", timeout=0)
                raise SystemExit("somebody came")
            except TimeoutError as error:
                assert error.missing == (1,) and time.monotonic() - begun_s < 30
        multihost.shutdown()
        """,
        2,
        arguments=[free_port()],
    )
