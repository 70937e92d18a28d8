"""The id maps in real processes, with numbers that differ as they do on TPU."""

from __future__ import annotations

import textwrap

from tests.support.cluster import free_port, run_processes

START = """
import sys
import jax
from jax._src import distributed
index, count, port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
jax.distributed.initialize(f"127.0.0.1:{port}", count, index, coordinator_bind_address=f"127.0.0.1:{port}")
jax.devices()
client = distributed.global_state.client
import holdfast.multihost as multihost
from holdfast.coordination import BarrierTimeout
from holdfast.multihost import ClusterGroup
from holdfast.multihost.group.group_client import GroupClient, Deadline, group_client_of
from holdfast.multihost.group.ids import ProcessIds, exchange_ids, initialize_ids
"""


def run(script: str, count: int) -> list[str]:
    return run_processes(START + textwrap.dedent(script), count, arguments=[free_port()])


def test_numbers_that_differ() -> None:
    """Where runtime and distributed ids differ, the maps hold what each process said of itself, in
    both orders; no key stays.
    """
    run(
        """
        RUNTIME = [2, 0, 3, 1]  # of the processes with distributed ids 0 to 3
        own = ProcessIds(RUNTIME[index], index, (10 * index, 10 * index + 1))
        assert exchange_ids(client, own, count) == [ProcessIds(RUNTIME[i], i, (10 * i, 10 * i + 1)) for i in range(count)]
        initialize_ids(own)
        initialize_ids(ProcessIds(9, 9, ()))  # a second call does nothing
        assert multihost.runtime_to_distributed_ids() == [1, 3, 0, 2]
        assert [multihost.runtime_to_distributed_process_id(runtime) for runtime in range(4)] == [1, 3, 0, 2]
        assert multihost.distributed_to_device_ids() == [[0, 1], [10, 11], [20, 21], [30, 31]]
        client.wait_at_barrier("end", 30000)
        assert client.key_value_dir_get("holdfast") == []
        """,
        4,
    )


def test_subsets_and_errors_speak_in_runtime_numbers() -> None:
    """With ids that differ, a barrier of runtime processes reaches the right tasks, and who is
    missing is named by runtime number.
    """
    outputs = run(
        """
        RUNTIME = [2, 0, 3, 1]
        me = RUNTIME[index]
        initialize_ids(ProcessIds(me, index, (index,)))
        jax.process_index = lambda backend=None: me  # what the runtime would say on TPU
        for turn in range(5):
            multihost.sync_global_processes("half", timeout=30, processes={0, 1} if me in (0, 1) else {2, 3})
        members = [0, 1] if me in (0, 1) else [2, 3]
        half = ClusterGroup(client, members.index(me), 2, processes=members)
        got = half.gather("g", b"%d" % me, timeout_s=30)
        assert got == ([b"%d" % member for member in members] if half.index == 0 else None)
        if me != 3:
            try:
                multihost.sync_global_processes("three", timeout=2)
            except BarrierTimeout as error:
                print("missing", error.missing)
        client.wait_at_barrier("end", 60000)
        """,
        4,
    )
    assert ["missing (3,)" in output for output in outputs] == [True, True, False, True]


def test_two_that_claim_one_number() -> None:
    """Processes that claim one runtime number get an error that says so."""
    outputs = run(
        """
        try:
            exchange_ids(client, ProcessIds(0, index, ()), count)
        except ValueError as error:
            print(error)
        """,
        2,
    )
    assert all(
        "the runtime numbers of the processes are [0, 0], expected 0 to 1: two processes claim one"
        " number" in output
        for output in outputs
    )


def test_flag_that_counts_by_distributed_ids() -> None:
    """Where Orbax's flag is registered and set, processes are counted by distributed id, devices
    and subsets too; we never define it.
    """
    run(
        """
        from absl import flags
        import numpy as np
        RUNTIME = [2, 0, 3, 1]
        me = RUNTIME[index]
        initialize_ids(ProcessIds(me, index, (index,)))
        jax.process_index = lambda backend=None: me
        name = "experimental_orbax_use_distributed_process_id"
        assert name not in flags.FLAGS and multihost.process_index() == me
        flags.DEFINE_bool(name, False, "")
        assert multihost.process_index() == me  # not parsed yet
        flags.FLAGS(["program", "--" + name])
        assert multihost.use_experimental_distributed_process_id() and multihost.process_index() == index
        assert multihost.is_primary_host(index) and not multihost.is_primary_host((index + 1) % 4)
        class Device:
            def __init__(self, process_index): self.process_index = process_index
        assert [multihost.process_index_from_device(Device(runtime)) for runtime in range(4)] == [1, 3, 0, 2]
        assert multihost.unique_processes_from_devices(np.array([[Device(0), Device(0)], [Device(2), Device(0)]])) == {1, 0}
        multihost.sync_global_processes("by distributed id", timeout=30, processes={0, 1} if index in (0, 1) else {2, 3})
        """,
        4,
    )
