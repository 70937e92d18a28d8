"""What the tests of checkpoints in several processes share: the start of their scripts, and how
they are run.
"""

from __future__ import annotations

import contextlib
import socket
import textwrap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from holdfast.coordination import CoordinationClient, CoordinationService, Timeouts
from holdfast.multihost import ClusterGroup
from tests.support.cluster import Processes

T = TypeVar("T")

_JOIN = (
    'jax.distributed.initialize(f"127.0.0.1:{port}", count, index,'
    ' coordinator_bind_address=f"127.0.0.1:{port}")'
)
START = (
    f"""
import json, os, signal, sys, time
import jax, jax.numpy as jnp, numpy as np
index, count, port, root = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
{_JOIN}
"""
    + """
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from holdfast.checkpoint import *
from holdfast.coordination import *
mesh = Mesh(np.array(jax.devices()), ("x",))

def state(step, size=1 << 10):
    # [devices, size] f32 sharded over devices, one replicated array, and a count on this process's own device.
    whole = np.arange(len(jax.devices()) * size, dtype=np.float32).reshape(len(jax.devices()), size) + step
    put = lambda value, spec: jax.make_array_from_callback(value.shape, NamedSharding(mesh, spec), lambda i: value[i])
    return {"w": put(whole, P("x")), "r": put(whole[0], P()), "n": jnp.int32(step), "name": "net"}

def same(got, step, size=1 << 10):
    want = state(step, size)
    for key in ("w", "r"):
        assert got[key].sharding == want[key].sharding
        for a, b in zip(got[key].addressable_shards, want[key].addressable_shards):
            assert np.array_equal(np.asarray(a.data), np.asarray(b.data)), (key, step)
    assert int(got["n"]) == step and got["name"] == "net"
    return True

def goes(call, kind):
    try:
        call()
    except kind as error:
        print("caught", type(error).__name__, error, flush=True)
        return error
    raise SystemExit(f"no {kind.__name__}")
"""
)


# So do processes whose environment says who they are and where their coordinator is.
START_LAUNCHED = START.replace(
    _JOIN, "import holdfast.multihost as multihost; multihost.initialize(timeout_s=60)"
)


def free_port() -> int:
    """Returns a port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def together(
    script: str, count: int, root: object, *arguments: object, **options: object
) -> Processes:
    """Starts `count` processes of one jax.distributed job that run START and then `script`; `root`
    and `arguments` are its arguments.
    """
    return Processes(
        START + textwrap.dedent(script), count, arguments=[free_port(), root, *arguments], **options
    )  # type: ignore[arg-type]


def run_together(
    script: str,
    count: int,
    root: object,
    *arguments: object,
    timeout_s: float = 90,
    **options: object,
) -> list[str]:
    """Runs them to their end, asserts that all exit with 0, and returns what they printed."""
    with together(script, count, root, *arguments, **options) as processes:
        finished = processes.wait(timeout_s)
    report = "\n".join(
        f"--- process {i} (exit {f.code}):\n{f.output}" for i, f in enumerate(finished)
    )
    assert [f.code for f in finished] == [0] * count, report
    return [f.output for f in finished]


def at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Makes calls in threads, all at the same time, and returns their values."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(lambda call: call(), calls))


@contextlib.contextmanager
def groups(count: int) -> Iterator[list[ClusterGroup]]:
    """Yields the group of each process of a job whose processes are threads of this one: a real
    coordinator, a client for each.
    """
    with CoordinationService.spawn(count) as service:
        clients = [
            CoordinationClient(service.address, index, timeouts=Timeouts(shutdown_s=20))
            for index in range(count)
        ]
        at_once([client.connect for client in clients])
        try:
            yield [ClusterGroup(client, index, count) for index, client in enumerate(clients)]
        finally:
            at_once([client.shutdown for client in clients])
