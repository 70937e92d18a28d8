"""jax 0.9 speaks profile B: alone, and in one cluster with the installed jax over profile A."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from cluster import Processes, run_processes

from holdfast.coordination import CoordinationService

ROOT = Path(__file__).resolve().parent.parent
BIND = {"JAX_COORDINATOR_BIND_ADDRESS": "127.0.0.1:0"}

PROGRAM = """
import os, signal, sys
import jax, numpy as np
index, count, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
assert jax.__version__.startswith("0.9"), jax.__version__
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, count, index)
from jax.experimental import multihost_utils as multihost
assert len(jax.devices()) == count * jax.local_device_count()
multihost.sync_global_devices("hello")
assert multihost.broadcast_one_to_all(np.float32(index + 5)) == 5
assert list(multihost.process_allgather(np.float32(index))) == list(range(count))
with multihost.live_devices(jax.devices()) as devices:
    assert len(devices) == len(jax.devices())
step = 0
while not multihost.reached_preemption_sync_point(step):
    step += 1
    if step == 3 and index == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    multihost.sync_global_devices(f"step {step}")
print("preempted at", step)
jax.distributed.shutdown()
"""

MIXED = """
import sys
import jax
from jax._src import distributed
index, count, address = int(sys.argv[1]) + int(sys.argv[4]), int(sys.argv[5]), sys.argv[3]
jax.distributed.initialize(address, count, index)
client = distributed.global_state.client
client.key_value_set(f"from/{index}", jax.__version__)
versions = [client.blocking_key_value_get(f"from/{each}", 30_000) for each in range(count)]
assert len({version.rsplit(".", 1)[0] for version in versions}) == 2, versions
for step in range(20):
    client.wait_at_barrier(f"step/{step % 3}", 30_000)
client.wait_at_barrier(f"pair {index % 2}", 30_000, [index % 2, index % 2 + 2])
assert sorted(client.get_live_nodes(list(range(count)))) == list(range(count))
assert len(client.key_value_dir_get("from/")) == count
print("together with", versions)
jax.distributed.shutdown()
"""


@pytest.fixture(scope="module")
def old_python() -> str:
    """Makes (once) a virtual environment with jax 0.9 under build/, and returns its interpreter."""
    folder = ROOT / "build" / "venvs" / "jax-0.9"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "jax-0.9.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / ".ready").exists():
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            subprocess.run(
                [folder / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check", "jax==0.9.*"], check=True
            )
            (folder / ".ready").touch()
    return str(folder / "bin" / "python")


@pytest.mark.slow
def test_jax_0_9_runs_on_four_processes(old_python: str) -> None:
    """Every path of jax.distributed over profile B."""
    with CoordinationService.spawn(4) as service:
        outputs = run_processes(PROGRAM, 4, arguments=[service.address], env=BIND, python=old_python)
        assert len({line for output in outputs for line in output.splitlines() if line.startswith("preempted at")}) == 1, outputs
        assert service.wait(20) == 0


@pytest.mark.slow
def test_two_profiles_are_one_cluster(old_python: str) -> None:
    """Two processes of jax 0.9 and two of the installed jax share keys, barriers of all and of pairs, the live set and the shutdown."""
    with CoordinationService.spawn(4) as service, ExitStack() as stack:
        halves = [
            stack.enter_context(Processes(MIXED, 2, arguments=[service.address, first, 4], env=BIND, python=python))
            for first, python in ((0, old_python), (2, sys.executable))
        ]
        for half in halves:
            for finished in half.wait():
                assert finished.code == 0 and "together with" in finished.output, finished.output
        assert service.wait(20) == 0
