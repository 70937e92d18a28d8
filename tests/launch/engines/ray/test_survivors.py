"""Processes that outlive attempts on a real Ray cluster: who is lost is replaced, with its actor or
on another node where they are lost too, and the others stay.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.launch import RestartPolicy
from holdfast.launch import ray as engine
from holdfast.launch.engines.ray.engine import actor_here
from holdfast.launch.supervisor.engine import JobResult
from holdfast.launch.workers import progress_watch
from tests.support.cluster import CollectedOutput
from tests.support.libraries import need
from tests.support.paths import program
from tests.support.processes import descendants
from tests.support.ray_fleet import Fleet
from tests.support.restartable_jobs import Death, Restartable

pytestmark = [pytest.mark.slow, pytest.mark.timeout(290), pytest.mark.filterwarnings("ignore")]
if os.environ.get("CI") != "true":
    need("ray", "make slow-libraries")

ENV = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
POLICY = RestartPolicy(max_failures=3, max_preemptions=3, backoff_s=0.1, startup_timeout_s=60)
ANY_SIZE = "is of any size"
"""The habit of a job whose result is known at each step: it may end when it is told."""
DEATHS_IN_A_ROW = int(os.environ.get("RAY_DEATHS", "12"))


@pytest.fixture(scope="module")
def the_fleet() -> Iterator[Fleet]:
    fleet = Fleet(__name__)
    yield fleet
    fleet.close()


@pytest.fixture
def fleet(the_fleet: Fleet) -> Fleet:
    """Room for a process more than the jobs have."""
    the_fleet.become([{}] * 4)
    return the_fleet


def standbys_below(raylet: int, process: int) -> list[int]:
    """Returns those that wait on a node to become a process."""
    found = []
    for pid in descendants(raylet):
        with contextlib.suppress(OSError):  # it has ended
            title = Path(f"/proc/{pid}/cmdline").read_bytes()
            if title.startswith(b"holdfast: standby for process %d" % process):
                found.append(pid)
    return found


class Whereabouts:
    """An actor that says where it is."""

    def node_id(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())


class Trial(Restartable):
    """A job of `restartable.py` in a folder, on a Ray cluster."""

    def run(self, steps: int, habit: str = "", **changes: Any) -> JobResult:
        """Runs a job of three to its end."""
        command = [sys.executable, str(program("restartable")), str(self.folder), str(steps), habit]
        settings = {"num_processes": 3, "restart": POLICY, "env": ENV} | changes
        self.output = CollectedOutput()
        result = engine.run_command(command, engine.JobSpec(**settings), output=self.output)
        assert result.outcome == "done", (self.output.text, result.job.reasons)
        return result.job

    def run_with(
        self, script: Callable[[], None], steps: int = 10**6, habit: str = ANY_SIZE, **changes: Any
    ) -> JobResult:
        """Runs a job on a thread beside, while `script` kills, and tells it to end (Ray adds nodes
        in the main thread only).
        """
        results: list[JobResult] = []
        thread = threading.Thread(target=lambda: results.append(self.run(steps, habit, **changes)))
        thread.start()
        try:
            script()
        except BaseException:
            (self.folder / "last").write_text("0")  # it ends at once
            raise
        finally:
            thread.join()
            print(self.output.text)
        return results[0]

    def wait_for_step(self, step: int, within_s: float = 120) -> None:
        """Waits until a step is saved."""

        def is_saved() -> bool:
            log = self.folder / "log"
            return log.exists() and any(note["step"] >= step for note in self.notes("saved"))

        Fleet.wait_until(is_saved, within_s)

    def pid(self, process: int) -> int:
        """Returns the process of a number that was started last."""
        return int(self.latest(process)["pid"])

    def latest(self, process: int) -> dict[str, Any]:
        return [note for note in self.notes("train") if note["process"] == process][-1]


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], set[float]]:
    """Returns what so many steps come to where nobody dies."""

    @functools.cache
    def found(steps: int) -> set[float]:
        trial = Trial(tmp_path_factory.mktemp(f"undisturbed-{steps}"))
        trial.run(steps)
        return trial.results()

    return found


DEATHS = {
    "one": ([Death(1, "step", 11)],),
    "another, then process 0": ([Death(1, "step", 11)], [Death(0, "save", 30)]),
    "two at once": ([Death(0, "step", 11), Death(1, "step", 11)],),
    "the replacement as it joins": ([Death(1, "step", 11)], [Death(1, "join")]),
}


@pytest.mark.parametrize("who", DEATHS)
@pytest.mark.parametrize("insecure", [False, True], ids=["closed", "open"])
def test_who_dies_is_replaced_and_the_others_stay(
    who: str, insecure: bool, fleet: Fleet, tmp_path: Path, undisturbed: Callable[[int], set[float]]
) -> None:
    """In its actor. The end is that of a job in which nobody died, and no saved step is lost."""
    trial = Trial(tmp_path / "job")
    trial.order(*DEATHS[who])
    result = trial.run(60, insecure=insecure)
    assert not list(trial.folder.glob("kill-*")), result.reasons
    assert trial.results() == undisturbed(60)
    assert trial.lives()[2] == 1, (result.reasons, trial.output.text)
    trial.check_steps()
    assert result.outlived == result.attempts - 1
    assert sum(vars(result.goodput).values()) == pytest.approx(result.elapsed_s, rel=0.01)
    assert result.goodput.rejoining_s > 0


def test_with_its_actor_a_process_is_replaced_on_its_node(fleet: Fleet, tmp_path: Path) -> None:
    """SIGKILL of an actor ends its process; both are made anew, and the others stay."""
    trial = Trial(tmp_path / "job")

    def kill() -> None:
        trial.wait_for_step(100)
        subreaper = parent(trial.pid(1))
        os.kill(parent(subreaper), signal.SIGKILL)
        trial.wait_for_attempt(2, 3)
        trial.end_soon()

    result = trial.run_with(kill)
    assert trial.results() == {trial.expect_of_any_size()}
    assert trial.lives() == [1, 2, 1], (result.reasons, trial.output.text)
    trial.check_steps()


@pytest.mark.parametrize("process", [1, 0])
def test_with_its_drained_node_a_process_is_replaced_on_another(
    process: int, fleet: Fleet, tmp_path: Path
) -> None:
    """A notice to one node: all save at one step, its process leaves and begins on the spare node.
    The others stay, and no step is lost.
    """
    trial = Trial(tmp_path / "job")

    def drain() -> None:
        trial.wait_for_step(100)
        fleet.drain(fleet.node_of(trial.pid(process)), seconds=120)
        trial.wait_for_attempt(2, 3)
        trial.end_soon()

    result = trial.run_with(drain)
    assert trial.results() == {trial.expect_of_any_size()}
    assert result.attempts == 2, (result.reasons, trial.output.text)
    expected = [1, 1, 1]
    expected[process] = 2
    assert trial.lives() == expected, (result.reasons, trial.output.text)
    saved = {note["step"] for note in trial.notes("saved") if note["attempt"] == 1}
    assert {note["step"] for note in trial.notes("begins") if note["attempt"] == 2} == {max(saved)}


def test_the_coordinators_are_on_the_machine_of_the_launcher(fleet: Fleet) -> None:
    """Here a head without CPUs. So no other machine takes them along when it is lost."""
    import ray

    actors = [actor_here(Whereabouts).remote() for _ in range(8)]
    nodes = set(ray.get([each.node_id.remote() for each in actors]))
    assert nodes == {ray.get_runtime_context().get_node_id()}


def test_a_standby_takes_the_place_of_a_process(fleet: Fleet, tmp_path: Path) -> None:
    """Each actor keeps one, from the first step on, and another once that one was taken."""
    trial = Trial(tmp_path / "job")
    waiting: list[int] = []

    def kill_twice() -> None:
        for attempt in (1, 2):
            trial.wait_for_attempt(attempt, 3)
            before = trial.pid(1)
            raylet = fleet.raylet(fleet.node_of(before))
            Fleet.wait_until(functools.partial(standbys_below, raylet, 1), 60)
            waiting.extend(standbys_below(raylet, 1))
            os.kill(before, signal.SIGKILL)
        trial.wait_for_attempt(3, 3)
        trial.end_soon()

    trial.run_with(kill_twice)
    assert [trial.pids(attempt)[1] for attempt in (2, 3)] == waiting, trial.output.text
    trial.check_steps()


def train_where_one_dies(folder: str) -> bool:
    """Returns whether this process was a standby. Process 1 dies once a file says so."""
    from holdfast import multihost
    from holdfast.checkpoint import CheckpointManager, EveryNSteps

    die = Path(folder, "die")

    def train() -> None:
        with CheckpointManager(f"{folder}/steps", save_policy=EveryNSteps(10)) as manager:
            for step in range((manager.latest_step() or 0) + 1, 1500):
                manager.save(step, {"step": step})
                threading.Event().wait(0.02)
                if die.exists() and os.environ["HOLDFAST_PROCESS_ID"] == "1":
                    die.unlink()
                    os.kill(os.getpid(), signal.SIGKILL)

    multihost.run_restartable(train)
    return "_holdfast_standby" in sys.modules


def test_a_function_is_called_in_a_standby(fleet: Fleet, tmp_path: Path) -> None:
    """Ray, which it is read with, changes sys.path when it is imported: the standby has done so."""
    results: list[engine.RayResult] = []
    spec = engine.JobSpec(num_processes=2, restart=POLICY, env=ENV)

    def run() -> None:
        results.append(engine.run(train_where_one_dies, spec, args=(str(tmp_path),)))

    job = threading.Thread(target=run)
    job.start()
    try:
        raylets = [fleet.raylet(node) for node in fleet.nodes]
        Fleet.wait_until(lambda: any(standbys_below(each, 1) for each in raylets))
    finally:
        (tmp_path / "die").touch()
        job.join()
    assert results[0].values == (False, True), results[0].job.reasons


def test_a_spare_takes_the_place_of_a_process_whose_node_is_lost(
    fleet: Fleet, tmp_path: Path
) -> None:
    """It waits on a node of its own, which nobody else can take."""
    trial = Trial(tmp_path / "job")
    waiting: list[int] = []

    def lose_a_node() -> None:
        trial.wait_for_attempt(1, 3)
        nodes = {fleet.node_of(trial.pid(process)) for process in range(3)}
        [spare] = set(fleet.nodes) - nodes
        raylet = fleet.raylet(spare)
        Fleet.wait_until(functools.partial(standbys_below, raylet, 0), 60)
        waiting.extend(standbys_below(raylet, 0))
        fleet.remove(fleet.node_of(trial.pid(1)))
        trial.wait_for_attempt(2, 3)
        trial.end_soon()

    trial.run_with(lose_a_node, spares=1)
    assert [trial.pids(2)[1]] == waiting, trial.output.text
    assert trial.lives() == [1, 2, 1]
    trial.check_steps()


def test_a_spare_whose_node_is_lost_is_held_on_another(fleet: Fleet, tmp_path: Path) -> None:
    """Also where no process has needed it."""
    trial = Trial(tmp_path / "job")

    def lose_the_spare() -> None:
        trial.wait_for_attempt(1, 3)
        nodes = {fleet.node_of(trial.pid(process)) for process in range(3)}
        [spare] = set(fleet.nodes) - nodes
        Fleet.wait_until(functools.partial(standbys_below, fleet.raylet(spare), 0), 60)
        fleet.remove(spare)
        fleet.add({})
        raylet = fleet.raylet(fleet.nodes[-1])
        Fleet.wait_until(functools.partial(standbys_below, raylet, 0), 60)
        trial.end_soon()

    trial.run_with(lose_the_spare, spares=1)
    assert trial.lives() == [1, 1, 1]


def test_the_others_stay_where_the_drain_is_seen_before_that_they_can(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster is looked at by another thread than the job, and sooner on a busy machine."""
    trial = Trial(tmp_path / "job")
    monkeypatch.setattr(progress_watch, "_POLL_S", 20.0)

    def drain() -> None:
        trial.wait_for_attempt(1, 3)
        fleet.drain(fleet.node_of(trial.pid(1)), seconds=120)
        trial.wait_for_attempt(2, 3)
        trial.end_soon()

    result = trial.run_with(drain)
    assert trial.lives() == [1, 2, 1], (result.reasons, trial.output.text)
    trial.check_no_step_lost()


def test_on_a_node_that_is_added_a_process_begins_and_the_others_stay(
    the_fleet: Fleet, tmp_path: Path
) -> None:
    """A job of two that may be three: all save at one step, and no step is lost."""
    the_fleet.become([{}] * 2)
    trial = Trial(tmp_path / "job")

    def add() -> None:
        trial.wait_for_attempt(1, 2)
        the_fleet.add({})
        trial.wait_for_attempt(2, 3)
        trial.end_soon()

    policy = replace(POLICY, grow_after_s=0)
    result = trial.run_with(add, min_processes=2, restart=policy)
    assert result.attempts == 2, (result.reasons, trial.output.text)
    assert trial.results() == {trial.expect_of_any_size()}
    assert trial.pids(1).items() < trial.pids(2).items()
    trial.check_no_step_lost()
    assert not trial.notes("left")
    assert len(trial.notes("ended")) == 3


@pytest.mark.parametrize(
    ("process", "insecure", "habit"), [(1, False, ""), (0, True, ", in memory")]
)
def test_without_another_node_the_others_go_on_and_the_job_grows_again(
    process: int, insecure: bool, habit: str, the_fleet: Fleet, tmp_path: Path
) -> None:
    """Those that live stay, under numbers without a gap; on a node that comes later a process
    begins, and they stay again. No saved step is lost, in the store or in memory.
    """
    the_fleet.become([{}] * 3)
    trial = Trial(tmp_path / "job")

    def lose_and_add() -> None:
        trial.wait_for_attempt(1, 3)
        the_fleet.remove(the_fleet.node_of(trial.pid(process)))
        trial.wait_for_attempt(3, 2)
        the_fleet.add({})
        trial.wait_for_attempt(4, 3)
        trial.end_soon()

    policy = replace(POLICY, grow_after_s=0)
    result = trial.run_with(
        lose_and_add,
        habit=f"{ANY_SIZE}{habit}",
        min_processes=2,
        restart=policy,
        insecure=insecure,
    )
    assert result.attempts == 4, (result.reasons, trial.output.text)
    assert trial.results() == {trial.expect_of_any_size()}
    before = trial.pids(1)
    stayed = [pid for number, pid in sorted(before.items()) if number != process]
    assert [pid for _, pid in sorted(trial.pids(3).items())] == stayed
    assert [trial.pids(4)[number] for number in (0, 1)] == stayed
    trial.check_steps()
    assert len(trial.notes("ended")) == 3


@pytest.mark.parametrize("process", [1, 0])
def test_with_its_node_a_process_is_replaced_on_another(
    process: int, fleet: Fleet, tmp_path: Path
) -> None:
    """A node that vanishes with its process: the process begins on the spare node, and the others
    stay.
    """
    trial = Trial(tmp_path / "job")

    def lose() -> None:
        trial.wait_for_step(100)
        fleet.remove(fleet.node_of(trial.pid(process)))
        trial.wait_for_attempt(2, 3)
        trial.end_soon()

    result = trial.run_with(lose)
    assert trial.results() == {trial.expect_of_any_size()}
    expected = [1, 1, 1]
    expected[process] = 2
    assert trial.lives() == expected, (result.reasons, trial.output.text)
    trial.check_steps()


def relays_below(raylet: int) -> dict[int, int]:
    """Returns the relays that run on a node, and how many descriptors each has."""
    found = {}
    for pid in descendants(raylet):
        if b"holdfast.coordination\0relay" in Path(f"/proc/{pid}/cmdline").read_bytes():
            found[pid] = len(os.listdir(f"/proc/{pid}/fd"))
    return found


@pytest.mark.timeout(2400)
def test_what_outlives_many_attempts_is_bounded(fleet: Fleet, tmp_path: Path) -> None:
    """The same processes, relays and actors, through deaths of process 0: descriptors, sockets
    among them, threads, memory. A node has one relay.
    """
    trial = Trial(tmp_path / "job")
    last = 10 * DEATHS_IN_A_ROW
    trial.order(*([Death(0, "step", each)] for each in range(10, last + 1, 10)))
    relays: list[dict[int, int]] = []

    def look() -> None:
        for step in (last // 2, last + 20):
            trial.wait_for_step(step, within_s=2000)
            nodes = {id(node): node for node in map(fleet.node_of, map(trial.pid, range(3)))}
            found = [relays_below(fleet.raylet(node)) for node in nodes.values()]
            assert [len(each) for each in found] == [1, 1, 1], found
            relays.append({pid: count for each in found for pid, count in each.items()})

    result = trial.run_with(look, last + 100, habit="")
    assert trial.lives() == [DEATHS_IN_A_ROW + 1, 1, 1], (result.reasons, trial.output.text)
    before, after = relays
    assert before.keys() == after.keys()
    assert all(after[pid] <= before[pid] + 2 for pid in after), relays
    for process in (1, 2):
        usages = [note for note in trial.notes("train") if note["process"] == process]
        assert len(usages) == DEATHS_IN_A_ROW + 1
        half = len(usages) // 2
        for kind, more in (("files", 2), ("sockets", 2), ("threads", 2), ("memory", 16 << 20)):
            early = max(each[kind] for each in usages[1 : half + 1])
            late = min(each[kind] for each in usages[-half:])
            assert late <= early + more, (kind, usages)
    print([usages[number] for number in (0, len(usages) // 2, -1)], relays)
