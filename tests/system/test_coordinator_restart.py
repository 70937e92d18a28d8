"""A coordinator that is killed and restarted with its journal, under jobs of several processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.coordination import CoordinationService, Endpoint
from tests.support.cluster import Processes
from tests.support.paths import program

OUR_STEPS = program("coordinator_restart_our_steps")

JAX_STEPS = program("coordinator_restart_jax_steps")


@contextmanager
def restarted_in_the_middle(script: str, journal: Path, count: int = 3) -> Iterator[list[str]]:
    """Runs `script` on `count` processes, kills the coordinator at step 100, restarts it on its
    port, and yields the outputs.
    """
    options: dict[str, Any] = {
        "journal": str(journal),
        "recoverable": True,
        "survivable": True,
    }
    with CoordinationService.spawn(count, **options) as first:
        port = int(first.address.rsplit(":", 1)[1])
        env = {"JAX_COORDINATOR_BIND_ADDRESS": "127.0.0.1:0"}
        with Processes(script, count, arguments=[first.address], env=env) as processes:
            processes.wait_for(0, "step 100")
            os.kill(first.pid, signal.SIGKILL)
            assert first.wait(10) == -signal.SIGKILL
            with CoordinationService.spawn(
                count, endpoint=Endpoint(port=port), **options
            ) as second:
                finished = processes.wait(90)
                assert [each.code for each in finished] == [0] * count, [
                    each.output for each in finished
                ]
                assert second.wait(30) == 0
            yield [each.output for each in finished]


def test_our_clients_ride_through_a_restart(tmp_path: Path) -> None:
    """SIGKILL and restart in the middle of 200 steps with a barrier each: the job finishes, no
    barrier is lost or doubled, no key lost.
    """
    with restarted_in_the_middle(OUR_STEPS, tmp_path / "journal") as outputs:
        assert all(f"keys {200 * 3}" in output for output in outputs), outputs


def test_unmodified_jax_clients_live_through_a_restart(tmp_path: Path) -> None:
    """The same with jaxlib's clients, which must ask again (UNAVAILABLE) while there is no
    coordinator: none of them aborts.
    """
    with restarted_in_the_middle(JAX_STEPS, tmp_path / "journal") as outputs:
        assert all("all steps" in output for output in outputs), outputs
