"""The engine of Ray, on a real Ray cluster of four fake nodes: deaths, drains, shrinking, growing,
slices.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.launch import RestartPolicy, StartupTimeout
from holdfast.launch import ray as engine
from holdfast.launch.engines.ray.engine import RayEngine
from holdfast.launch.engines.ray.worker_actor import Program
from holdfast.launch.supervisor.job import (
    Event,
    Exited,
    Launch,
    Progressed,
    Release,
    Reserve,
    Reserved,
    Stop,
)
from tests.support.cluster import CollectedOutput
from tests.support.libraries import need
from tests.support.paths import EXAMPLES
from tests.support.ray_fleet import Fleet
from tests.support.running_logs import whole_lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(290), pytest.mark.filterwarnings("ignore")]
if os.environ.get("CI") != "true":
    need("ray", "make slow-libraries")

TRAINER = EXAMPLES / "train_digits.py"
ENV = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
POLICY = RestartPolicy(
    max_failures=3,
    max_preemptions=10,
    backoff_s=0.1,
    grace_s=2,
    grow_after_s=1,
    startup_timeout_s=60,
)


@pytest.fixture(scope="module")
def the_fleet() -> Iterator[Fleet]:
    fleet = Fleet(__name__)
    yield fleet
    fleet.close()


@pytest.fixture
def fleet(the_fleet: Fleet) -> Fleet:
    the_fleet.become([{}] * 4)
    return the_fleet


def train(folder: str, steps: int, polite: bool = True) -> dict[str, Any]:
    """A small job for any number of processes that divides 12: adds 1 to an array in each step.

    Logs (attempt, count, step, pid of the actor).
    With 0 steps it runs until there is a file named end.
    """
    import os

    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from holdfast import checkpoint, multihost

    multihost.initialize()
    mesh = jax.make_mesh((jax.device_count(),), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("d"))
    state = jax.jit(lambda: jnp.zeros(12), out_shardings=rows)()
    advance = jax.jit(lambda x: x + jnp.max(x) * 0 + 1, out_shardings=rows)
    attempt = os.environ["HOLDFAST_ATTEMPT"]
    me = jax.process_index()
    with open(f"/proc/{os.getppid()}/stat") as file:  # the subreaper's
        actor = file.read().rpartition(")")[2].split()[1]
    policy = checkpoint.AnyOf(checkpoint.EveryNSteps(20), checkpoint.OnPreemption())
    with checkpoint.CheckpointManager(folder + "/ckpt", save_policy=policy) as manager:
        first = manager.latest_step() or 0
        if first:
            state = manager.restore(first, like=state)
        with open(folder + "/log", "a", buffering=1) as log:
            for step in range(first + 1, (steps or 1_000_000) + 1):
                state = advance(state)
                state.block_until_ready()
                if me == 0:
                    log.write(f"{attempt} {jax.process_count()} {step} {actor}\n")
                manager.save(step, state, force=step == steps)
                if (
                    not steps
                    and step % 20 == 0
                    and multihost.global_max([int(os.path.exists(folder + "/end"))])[0]
                ):
                    break
                if manager.reached_preemption(step):
                    manager.wait_until_finished()
                    if polite:
                        raise multihost.Preempted(f"saved step {step}")
                    return {"early": step}
        values = [float(part) for shard in state.addressable_shards for part in shard.data]
    multihost.shutdown()
    return {
        "first": first,
        "count": jax.process_count(),
        "sum": sum(values),
        "slice": os.environ.get("MEGASCALE_SLICE_ID"),
    }


class Log:
    """Reads what `train` logs, while it runs."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "log"

    def rows(self) -> list[tuple[int, int, int, int]]:
        return [tuple(map(int, line.split())) for line in whole_lines(self._path)]  # type: ignore[misc]

    def attempts(self) -> list[tuple[int, int, int]]:
        """Returns (processes, first step, last step) of each attempt that made a step."""
        return [
            (rows[0][1], rows[0][2], rows[-1][2])
            for attempt in sorted({row[0] for row in self.rows()})
            if (rows := [row for row in self.rows() if row[0] == attempt])
        ]


def run_with(
    folder: Path, spec: engine.JobSpec, script: Callable[[Log], None], *arguments: Any
) -> engine.RayResult:
    """Runs `train` on a thread beside, while `script` does to the cluster what it does (Ray adds
    nodes in the main thread only).
    """
    results: list[engine.RayResult] = []
    thread = threading.Thread(
        target=lambda: results.append(engine.run(train, spec, args=(str(folder), *arguments)))
    )
    thread.start()
    try:
        script(Log(folder))
    finally:
        (folder / "end").touch()
        thread.join()
    return results[0]


def spec(**changes: Any) -> engine.JobSpec:
    return engine.JobSpec(
        **({"num_processes": 4, "min_processes": 2, "restart": POLICY, "env": ENV} | changes)
    )


def assert_nothing_reserved(fleet: Fleet) -> None:
    """Every placement group is gone, and every CPU is free again."""
    import ray

    fleet.wait_until(
        lambda: all(
            group["state"] == "REMOVED" for group in ray.util.placement_group_table().values()
        )
    )
    fleet.wait_until(
        lambda: ray.available_resources().get("CPU", 0) == ray.cluster_resources().get("CPU", 0)
    )


def test_a_function_runs_on_every_process(fleet: Fleet, tmp_path: Path) -> None:
    """Values come back by rank; the job is done; nothing stays reserved."""
    result = engine.run(train, spec(), args=(str(tmp_path), 50))
    assert result.outcome == "done", result.job.reasons
    assert result.values == ({"first": 0, "count": 4, "sum": 150.0, "slice": None},) * 4
    assert result.job.saved_step == 50
    assert_nothing_reserved(fleet)


def look() -> tuple[str, str, bool, str | None]:
    import os

    from holdfast.coordination import CoordinationClient

    with CoordinationClient(
        os.environ["HOLDFAST_COORDINATOR"], int(os.environ["HOLDFAST_PROCESS_ID"])
    ) as client:
        client.wait_at_barrier("all", 60_000)
        client.shutdown()
    secret = any(
        "BEGIN" in value or key.startswith(("HOLDFAST_TOKEN", "HOLDFAST_TLS"))
        for key, value in os.environ.items()
    )
    return (
        os.environ["HOLDFAST_COORDINATOR"],
        os.environ["HOLDFAST_LOCAL_RANK"],
        secret,
        os.environ.get("HOLDFAST_HOST_ADDRESS"),
    )


def test_the_processes_of_a_node_share_a_relay(fleet: Fleet) -> None:
    """Four nodes, four relays at Unix sockets."""
    values = engine.run(look, spec()).values
    assert len({address for address, *_ in values}) == 4 and all(
        address.startswith("unix:/") for address, *_ in values
    )
    assert [(rank, secret) for _, rank, secret, _ in values] == [("0", False)] * 4
    assert all(host is not None and not host.startswith("unix:") for *_, host in values), (
        "what other machines reach this one by"
    )


def test_without_security_there_is_no_relay(fleet: Fleet) -> None:
    """No relay stands between."""
    values = engine.run(look, spec(insecure=True)).values
    assert len({address for address, *_ in values}) == 1 and not values[0][0].startswith("unix:")
    assert {host for *_, host in values} == {None}


def test_an_attempt_that_cannot_start_is_over_at_once(fleet: Fleet) -> None:
    """Once its actors are there, and before that: nobody waits for processes that never were."""
    policy = RestartPolicy(max_startup_failures=0, grace_s=60, startup_timeout_s=60)
    began = time.monotonic()
    for wrong in ({"env": {"A": 1}}, {"heartbeat_timeout_s": -1.0}):
        result = engine.run(look, spec(restart=policy, **wrong)).job
        assert result.outcome == "failed"
        assert re.search("could not start|coordinator cannot start", result.reasons[-1])
    assert time.monotonic() - began < 55
    assert_nothing_reserved(fleet)


def test_a_stop_is_heard_while_actors_start(fleet: Fleet) -> None:
    """No turn of the loop waits for them; what has begun is given back."""
    its = RayEngine("j", spec(), Program(["sleep", "600"]), CollectedOutput())
    its.carry_out(Reserve(1, 4, 4))
    seen: list[Event] = []
    turns: list[float] = []

    def turn() -> None:
        began = time.monotonic()
        seen.extend(its.events(None))
        turns.append(time.monotonic() - began)

    with contextlib.closing(its):
        while not any(isinstance(event, Reserved) for event in seen):
            turn()
        its.carry_out(Launch(1, 4))
        turn()
        its.forward(signal.SIGTERM)
        its.forward(signal.SIGTERM)
        while not any(isinstance(event, Exited) for event in seen):
            turn()
    assert max(turns) < 2.0, turns  # twice a second, on a machine that does more
    assert next(event for event in seen if isinstance(event, Stop | Exited)) == Stop("SIGTERM")
    assert_nothing_reserved(fleet)


def test_a_step_that_is_told_late_is_no_attempts(fleet: Fleet) -> None:
    """It was on its way when the attempt was given back: nothing is begun for a next one."""
    spec = engine.JobSpec(num_processes=2, restart=POLICY, env=ENV)
    ray_engine = RayEngine("late", spec, Program(["true"]), CollectedOutput())
    told = Progressed(1, 5, restartable=frozenset({0, 1}))
    ray_engine._queue.put(told)
    assert ray_engine.events(0) == [told]
    ray_engine.close()


def test_what_is_given_back_is_waited_for(fleet: Fleet) -> None:
    """An attempt that is to be larger counts on the machines of the one before, which are free a
    moment after they were given back.
    """
    its = RayEngine("j", spec(), Program(["true"]), CollectedOutput())
    with contextlib.closing(its):
        for attempt, count in ((1, 2), (2, 4)):
            its.carry_out(Reserve(attempt, 2, count))
            while not (seen := its.events(None)):
                pass
            assert seen == [Reserved(attempt, count)]
            its.carry_out(Release())
    assert_nothing_reserved(fleet)


def test_the_example_runs_unchanged(fleet: Fleet, tmp_path: Path) -> None:
    """examples/train_digits.py under Ray, as under `holdfast run`."""
    output = CollectedOutput()
    command = [
        sys.executable,
        str(TRAINER),
        "--directory",
        str(tmp_path),
        "--steps",
        "40",
        "--save-every",
        "20",
    ]
    assert engine.run_command(command, spec(), output=output).outcome == "done", output.text
    assert "test accuracy after step 40" in output.text


def test_the_command_line_runs_on_a_cluster(fleet: Fleet, tmp_path: Path) -> None:
    """`holdfast ray`: the output of every process with its prefix, and the exit code of the
    first that fails. Each runs in the caller's folder.
    """
    (tmp_path / "script.py").write_text(
        "import os, sys; print('here', os.environ['HOLDFAST_NUM_PROCESSES']);"
        " sys.exit(int(sys.argv[1]))"
    )
    for code in (0, 3):
        command = [
            Path(sys.executable).parent / "holdfast",
            "ray",
            "--address",
            fleet.address,
            "-n",
            "4",
            "--",
            sys.executable,
            "script.py",
            str(code),
        ]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == code, done.stderr
        if code == 0:
            assert sorted(re.findall(r"\[\d\] here 4", done.stdout)) == [
                f"[{rank}] here 4" for rank in range(4)
            ]


def fails_once(folder: str) -> str:
    with open(f"/proc/{os.getppid()}/stat") as file:  # the subreaper's
        actor = file.read().rpartition(")")[2].split()[1]
    attempt = os.environ["HOLDFAST_ATTEMPT"]
    process = os.environ["HOLDFAST_PROCESS_ID"]
    (Path(folder) / f"{attempt}-{process}").write_text(actor)
    if attempt == "1" and process == "2":
        raise RuntimeError("once")
    return actor


def test_a_failed_process_restarts_in_its_actor(fleet: Fleet, tmp_path: Path) -> None:
    """Where nothing but a process has died the next attempt takes over the actors, all of them; at
    the end they are given back.
    """
    result = engine.run(fails_once, spec(), args=(str(tmp_path),))
    assert result.outcome == "done" and result.job.attempts == 2, result.job.reasons
    assert "RuntimeError: once" in "".join(result.job.reasons)
    assert result.values[2] == (tmp_path / "1-2").read_text()
    assert set(result.values) == {(tmp_path / f"2-{process}").read_text() for process in range(4)}
    assert_nothing_reserved(fleet)


def test_after_the_last_failure_the_others_have_the_grace_time(
    fleet: Fleet, tmp_path: Path
) -> None:
    """One without holdfast's client saves in its own way when it is asked to end: nobody kills it
    before.
    """
    code = f"""
import os, signal, sys, time
ready = {str(tmp_path / "ready")!r}
if os.environ["HOLDFAST_PROCESS_ID"] == "0":
    while not os.path.exists(ready):
        time.sleep(0.05)
    sys.exit(3)
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGTERM}})
open(ready, "w").close()
signal.sigwait({{signal.SIGTERM}})
time.sleep(1)  # it saves
print("saved")
"""
    output = CollectedOutput()
    its = spec(num_processes=2, restart=RestartPolicy(grace_s=30))
    result = engine.run_command([sys.executable, "-S", "-c", code], its, output=output)
    assert (result.outcome, result.job.exit_code) == ("failed", 3), output.text
    assert output.lines == [(1, "saved")]
    assert_nothing_reserved(fleet)


def test_a_killed_actor_costs_no_saved_step(fleet: Fleet, tmp_path: Path) -> None:
    """SIGKILL of an actor ends its process too; the next attempt resumes from a saved step and ends
    done.
    """

    def kill(log: Log) -> None:
        fleet.wait_until(lambda: len(log.rows()) > 0 and log.rows()[-1][2] >= 110)
        os.kill(log.rows()[-1][3], signal.SIGKILL)

    result = run_with(tmp_path, spec(), kill, 2000)
    assert result.outcome == "done", result.job.reasons
    (_, first, struck), (count, resumed, last) = Log(tmp_path).attempts()
    assert (first, count, last) == (1, 4, 2000)
    assert resumed % 20 == 1 and 100 < resumed <= struck + 1
    assert [value["sum"] for value in result.values] == [6000.0] * 4


def test_a_lost_node_shrinks_the_job(fleet: Fleet, tmp_path: Path) -> None:
    """A node that vanishes with its process: the job goes on with the three that are left."""

    def lose(log: Log) -> None:
        fleet.wait_until(lambda: len(log.rows()) > 0 and log.rows()[-1][2] >= 110)
        fleet.remove(fleet.nodes[-1])

    result = run_with(tmp_path, spec(), lose, 2000)
    assert result.outcome == "done", result.job.reasons
    (_, _, struck), (count, resumed, last) = Log(tmp_path).attempts()
    assert (count, last) == (3, 2000)
    assert resumed % 20 == 1 and 100 < resumed <= struck + 1


def test_a_drain_shrinks_and_the_nodes_return(fleet: Fleet, tmp_path: Path) -> None:
    """Two nodes drained with a deadline: all save one step and leave, come back as two, and as four
    when nodes are there again.
    """

    def drain_then_return(log: Log) -> None:
        fleet.wait_until(lambda: len(log.rows()) > 0 and log.rows()[-1][2] >= 110)
        going = fleet.nodes[-2:]
        for node in going:
            fleet.drain(node, 60)
        fleet.wait_until(lambda: log.attempts()[-1][0] == 2)
        for node in going:
            fleet.remove(node)
            fleet.add({})
        fleet.wait_until(lambda: log.attempts()[-1][0] == 4)

    result = run_with(tmp_path, spec(), drain_then_return, 0)
    assert result.outcome == "done", result.job.reasons
    attempts = Log(tmp_path).attempts()
    counts = [count for count, _, _ in attempts]
    assert counts[0] == 4 and 2 in counts and counts[-1] == 4, (counts, result.job.reasons)
    assert [value["sum"] for value in result.values] == [3.0 * attempts[-1][2]] * 4
    for (_, _, last), (_, first, _) in itertools.pairwise(attempts):
        assert first == last + 1, "every step that was run was saved before the processes left"
    assert result.job.error is None


def test_a_drain_while_an_attempt_starts_ends_that_attempt(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is reserved and goes before its actor stands is waited for no longer: the next
    attempt begins without it, as after any preemption.
    """
    going = fleet.nodes[-1]
    start_actors = engine.Gang.start_actors

    def drain_then_start(gang: engine.Gang, resources: Mapping[str, float]) -> None:
        if fleet.healthy(going):
            fleet.drain(going, 600)
            fleet.wait_until(lambda: not fleet.healthy(going))
        start_actors(gang, resources)

    monkeypatch.setattr(engine.Gang, "start_actors", drain_then_start)
    restart = replace(POLICY, max_startup_failures=0, startup_timeout_s=600)
    result = engine.run(train, spec(min_processes=3, restart=restart), args=(str(tmp_path), 20))
    assert result.outcome == "done", result.job.reasons
    assert result.job.attempts == 2
    assert f"({going.node_id[:8]}) went while the attempt started" in "\n".join(result.job.reasons)
    assert [count for count, _, _ in Log(tmp_path).attempts()] == [3]


def test_leaving_early_after_a_notice_is_not_done(fleet: Fleet, tmp_path: Path) -> None:
    """PRE-1: workers that save and return after a notice are started again, until the loop ends by
    itself.
    """

    def drain(log: Log) -> None:
        fleet.wait_until(lambda: len(log.rows()) > 0 and log.rows()[-1][2] >= 50)
        fleet.drain(fleet.nodes[-1], 60)

    result = run_with(tmp_path, spec(), drain, 2000, False)
    assert result.outcome == "done", result.job.reasons
    assert result.job.attempts >= 2
    assert all("early" not in value for value in result.values)


def test_a_gang_that_cannot_fit_times_out_once(fleet: Fleet, tmp_path: Path) -> None:
    """ERR-2: one deadline for the gang, then StartupTimeout that says what was missing; nothing
    stays reserved.
    """
    began = time.monotonic()
    result = engine.run(
        train,
        spec(num_processes=5, min_processes=5, restart=RestartPolicy(startup_timeout_s=4)),
        args=(str(tmp_path), 5),
    )
    assert result.outcome == "failed"
    assert isinstance(result.job.error, StartupTimeout)
    assert (result.job.error.timeout_s, result.job.error.knob) == (4, "startup_timeout_s")
    assert result.job.elapsed_s >= 4
    assert time.monotonic() - began < 60
    assert_nothing_reserved(fleet)


SLICES = [
    {"ray.io/tpu-slice-name": f"slice-{index}", "ray.io/tpu-worker-id": str(worker)}
    for index in (9, 10)
    for worker in (0, 1)
]


def megascale() -> dict[str, str]:
    return {
        key: value
        for key, value in os.environ.items()
        if key.startswith(("MEGASCALE_", "HOLDFAST_"))
    }


def test_a_draining_host_takes_its_slice_along(the_fleet: Fleet) -> None:
    """ENV-1 to ENV-4 and PRE-2: two slices of two; with one host draining only the other slice is
    used, and all four keys are gone.
    """
    the_fleet.become(SLICES)
    stale = {
        "MEGASCALE_NUM_SLICES": "3",
        "MEGASCALE_PORT": "1234",
        "MEGASCALE_SLICE_ID": "2",
        "MEGASCALE_COORDINATOR_ADDRESS": "gone",
    }
    sliced = spec(num_slices=2, resources={"CPU": 1, "TPU": 4}, env=ENV | stale)
    seen = engine.run(megascale, sliced)
    assert seen.outcome == "done", seen.job.reasons
    assert [value["MEGASCALE_SLICE_ID"] for value in seen.values] == ["0", "0", "1", "1"]
    for value in seen.values:
        assert (value["MEGASCALE_NUM_SLICES"], value["MEGASCALE_PORT"]) == ("2", "8081")
        assert value["MEGASCALE_COORDINATOR_ADDRESS"] == the_fleet.nodes[0].node_ip_address
    node = the_fleet.nodes[the_fleet.labels.index(SLICES[1])]
    with the_fleet.occupied(node):  # an idle node that is drained is gone at once
        the_fleet.drain(node, 60)
        the_fleet.wait_until(lambda: the_fleet.draining(node))
        seen = engine.run(megascale, sliced)
    assert seen.outcome == "done", seen.job.reasons
    assert [value["HOLDFAST_NUM_PROCESSES"] for value in seen.values] == ["2", "2"]
    assert not any(key.startswith("MEGASCALE_") for value in seen.values for key in value)


def test_spares_below_none_are_refused() -> None:
    """A job has no fewer than 0 spares."""
    with pytest.raises(ValueError, match=r"^spares=-1: expected 0 or more$"):
        engine.JobSpec(num_processes=2, spares=-1)
