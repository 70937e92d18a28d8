"""The engine of Slurm, under a real slurmctld with two slurmd on loopback: the example of `make
demo`, preempted and requeued.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.launch.engines import slurm as engine_of_slurm
from tests.support.cluster import free_port
from tests.support.paths import EXAMPLES, program
from tests.support.running_logs import whole_lines
from tests.support.slurm import SlurmCluster, require_slurm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(290)]
require_slurm()

TRAINER = EXAMPLES / "train_digits.py"
HOLDFAST = Path(sys.executable).parent / "holdfast"

# The first run never ends by itself; one that was requeued ends 20 steps after where it resumes.
SCRIPT = f"""#!/bin/bash
export JAX_PLATFORMS=cpu
last=$(ls ckpt 2>/dev/null | grep -E '^[0-9]+$' | sort -n | tail -1)
[ "${{SLURM_RESTART_COUNT:-0}}" = 0 ] && steps=${{STEPS:-1000000}} || steps=$((last + 20))
exec {HOLDFAST} slurm --coordinator-host 127.0.0.1 OPTIONS -- {sys.executable} {TRAINER} \\
    --directory ckpt --steps $steps --save-every 20 --log log
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    with SlurmCluster() as cluster:
        yield cluster


class Job:
    """A batch job of four tasks over the two nodes, in the preemptible partition."""

    def __init__(
        self,
        cluster: SlurmCluster,
        folder: Path,
        *options: str,
        engine: str = "",
        steps: int | None = None,
        script: str = SCRIPT,
    ) -> None:
        self.cluster = cluster
        self.folder = folder
        export = "--export=ALL" + (f",STEPS={steps}" if steps else "")
        self.id = cluster.submit(
            script.replace("OPTIONS", engine), "-N2", "-n4", "-plow", export, *options, cwd=folder
        )

    def output(self) -> str:
        path = self.folder / "out"
        return path.read_text() if path.exists() else ""

    def steps(self) -> list[int]:
        return [json.loads(line)["step"] for line in whole_lines(self.folder / "log")]

    def state(self) -> str:
        return self.cluster.job(self.id).get("JobState", "")

    def wait_for_step(self, step: int) -> None:
        self.cluster.wait_until(
            lambda: bool(self.steps()) and self.steps()[-1] >= step,
            f"step {step}; {self.output()[-3000:]}",
        )

    def wait_for_state(self, *states: str) -> None:
        try:
            self.cluster.wait_until(lambda: self.state() in states, f"state {states}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n--- out\n{self.output()}") from None

    def assert_resumed_once(self) -> None:
        """Requeued, resumed from a step that was saved, and completed once."""
        self.wait_for_state("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        shown = self.cluster.job(self.id)
        assert (shown["JobState"], shown["Restarts"], shown["ExitCode"]) == (
            "COMPLETED",
            "1",
            "0:0",
        ), self.output()
        resumed = {int(step) for step in re.findall(r"resumed from step (\d+)", self.output())}
        assert len(resumed) == 1, self.output()
        (step,) = resumed
        steps = self.steps()
        cut = next(
            i
            for i in range(1, len(steps))
            if steps[i] != steps[i - 1] + 1 or i == steps.index(step) + 1
        )
        assert steps[cut] == step + 1, (steps, self.output())
        assert steps[-1] == step + 20
        assert self.output().count(f"test accuracy after step {step + 20}") == 1


def test_four_tasks_over_two_nodes(slurm: SlurmCluster, tmp_path: Path) -> None:
    """A job that nobody disturbs: four processes on both nodes, completed, never requeued."""
    job = Job(slurm, tmp_path, steps=40)
    job.wait_for_state("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
    shown = slurm.job(job.id)
    assert (shown["JobState"], shown["Restarts"], shown["NodeList"]) == (
        "COMPLETED",
        "0",
        "n[1-2]",
    ), job.output()
    assert set(re.findall(r"\[(\d)\] process \1 of 4", job.output())) == {"0", "1", "2", "3"}
    assert job.steps() == list(range(1, 41))


LOOK = """
import os
from holdfast.coordination import CoordinationClient
process_id = int(os.environ["HOLDFAST_PROCESS_ID"])
with CoordinationClient(os.environ["HOLDFAST_COORDINATOR"], process_id) as client:
    client.wait_at_barrier("all", 60_000)
    client.shutdown()
secret = any("BEGIN" in value or key == "HOLDFAST_JOB_SECRETS" for key, value in os.environ.items())
names = ("SLURMD_NODENAME", "HOLDFAST_COORDINATOR", "HOLDFAST_LOCAL_RANK")
print("LOOK", *map(os.environ.get, names), secret, os.environ.get("HOLDFAST_HOST_ADDRESS"))
"""


@pytest.mark.parametrize("engine", ["", "--insecure"])
def test_the_tasks_of_a_node_share_a_relay(
    slurm: SlurmCluster, tmp_path: Path, engine: str
) -> None:
    """Two tasks on each of two nodes: a Unix socket a node, local ranks 0 and 1; --insecure gives
    all the coordinator's own address.
    """
    (tmp_path / "look.py").write_text(LOOK)
    command = (
        f"exec {HOLDFAST} slurm --coordinator-host 127.0.0.1 {engine} -- {sys.executable} look.py"
    )
    job = slurm.submit(
        f"#!/bin/bash\n{command}\n", "-N2", "-n4", "--ntasks-per-node=2", "-plow", cwd=tmp_path
    )
    slurm.wait_until(
        lambda: slurm.job(job)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED"), "end"
    )
    out = (tmp_path / "out").read_text()
    seen = [line.split()[2:] for line in out.splitlines() if " LOOK " in line]
    assert {host for *_, host in seen} == {"None" if engine else "127.0.0.1"}, (
        "of the network that reaches the coordinator"
    )
    assert sorted((node, rank, secret) for node, _, rank, secret, _ in seen) == [
        (n, r, "False") for n in ("n1", "n2") for r in "01"
    ], out
    addresses = {(node, address) for node, address, *_ in seen}
    assert all(address.startswith("127.0.0.1:" if engine else "unix:/") for _, address in addresses)
    assert len({address for _, address in addresses}) == (1 if engine else 2)


def test_as_many_processes_as_tasks(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Beside `--ntasks`, `--ntasks-per-node` is the most that a node has."""
    command = (
        f"exec {HOLDFAST} slurm --coordinator-host 127.0.0.1 -- bash -c"
        " 'echo one of $HOLDFAST_NUM_PROCESSES'"
    )
    job = slurm.submit(
        f"#!/bin/bash\n{command}\n", "-N2", "-n3", "--ntasks-per-node=2", cwd=tmp_path
    )
    slurm.wait_until(lambda: slurm.job(job)["JobState"] in ("COMPLETED", "FAILED"), "end")
    out = (tmp_path / "out").read_text()
    assert re.findall(r"^\[\d\] one of (\d)$", out, re.MULTILINE) == ["3"] * 3, out


CPUS = """
import os
attempt = os.environ["HOLDFAST_ATTEMPT"]
print("has", len(os.sched_getaffinity(0)), "in", attempt, flush=True)
if attempt == "1" and os.environ["HOLDFAST_PROCESS_ID"] == "1":
    os._exit(1)
"""


def test_a_process_has_the_cpus_of_its_task(tmp_path: Path) -> None:
    """Those of `--cpus-per-task`, in each attempt, where Slurm binds each task to what is its."""
    (tmp_path / "cpus.py").write_text(CPUS)
    command = f"exec {HOLDFAST} slurm --coordinator-host 127.0.0.1 -- {sys.executable} -S cpus.py"
    with SlurmCluster(task_plugin="affinity") as cluster:
        job = cluster.submit(f"#!/bin/bash\n{command}\n", "-N2", "-n2", "-c2", cwd=tmp_path)
        cluster.wait_until(lambda: cluster.job(job)["JobState"] in ("COMPLETED", "FAILED"), "end")
    out = (tmp_path / "out").read_text()
    seen = re.findall(r"^\[\d\] has (\d) in (\d)$", out, re.MULTILINE)
    assert set(seen) == {("2", "1"), ("2", "2")}, out


def test_a_slow_command_of_slurm_is_no_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What does not answer, or is not there, is an exit code with a sentence."""
    monkeypatch.setattr(engine_of_slurm, "_COMMAND_TIMEOUT_S", 0.2)
    done = engine_of_slurm.slurm("sleep", "60")
    assert (done.returncode, done.stderr) == (124, "no answer within 0.2 s")
    assert (
        engine_of_slurm.slurm("no-such-command").stderr
        == "no-such-command: No such file or directory"
    )


def test_a_preempted_job_comes_back(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Slurm's SIGTERM makes all save one step and leave; the job is requeued, not completed, and
    goes on from that very step.
    """
    job = Job(slurm, tmp_path)
    job.wait_for_step(25)
    (tmp_path / "high").mkdir()
    other = slurm.submit(
        "#!/bin/sh\nsleep 2\n", "-N2", "--exclusive", "-phigh", cwd=tmp_path / "high"
    )
    slurm.wait_until(
        lambda: slurm.job(other).get("JobState") == "COMPLETED", "end of the job that preempts"
    )
    job.assert_resumed_once()
    assert "preempted: stopped at step" in job.output()


def test_a_notice_spares_what_stands_beside_the_program(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """Slurm signals whole steps. A notice ends neither the shell around the program nor a worker
    beside it before the program has saved.
    """
    around = """'sleep 600 & worker=$!
"$@"
code=$?
kill -0 $worker && echo "the worker lives after $code"
exit $code' -"""
    script = SCRIPT.replace(f"-- {sys.executable}", f"-- bash -c {around} {sys.executable}")
    job = Job(slurm, tmp_path, script=script)
    job.wait_for_step(25)
    slurm.run("scancel", "--batch", "--signal=USR1", job.id)
    job.assert_resumed_once()
    assert job.output().count("the worker lives after 75") == 4
    assert "preempted: stopped at step" in job.output()


def test_a_node_set_down_requeues_the_job(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Slurm ends and requeues a job whose node is lost; it resumes from the last saved step when
    the node is back.
    """
    job = Job(slurm, tmp_path)
    job.wait_for_step(25)
    slurm.run("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    job.wait_for_state("PENDING")
    slurm.run("scontrol", "update", "NodeName=n2", "State=RESUME")
    job.assert_resumed_once()


@pytest.mark.timeout(290)
def test_usr1_before_the_time_limit(slurm: SlurmCluster, tmp_path: Path) -> None:
    """The signal that comes before the time limit: all save one step, the job is requeued, resumes
    there, and completes once.
    """
    job = Job(
        slurm, tmp_path, "--time=2", "--signal=B:USR1@45"
    )  # Slurm sends it 45 to 75 s after the start
    slurm.wait_until(lambda: slurm.job(job.id).get("Restarts") == "1", "requeue", timeout_s=200)
    slurm.run(
        "scontrol", "update", f"JobId={job.id}", "TimeLimit=10"
    )  # one notice is enough, also on a slow machine
    job.assert_resumed_once()
    assert "SIGUSR1" in job.output()
    assert "preempted: stopped at step" in job.output()


def test_an_extended_time_limit_is_no_notice(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Slurm is asked before the notice: it comes before the end as it is by then."""
    program = """
import queue, subprocess, sys, time
from holdfast.multihost.preemption.preemption import default_sources

said = queue.Queue()
end, extend = sys.argv[1:]
(source,) = [each for each in default_sources({"SLURM_JOB_END_TIME": end}) if each.name == "slurm"]
source.start(said.put)
try:
    print("notice:", said.get(timeout=float(extend)))
except queue.Empty:
    print("no notice")
"""
    (tmp_path / "watch.py").write_text(program)
    end = "$(SLURM_TIME_FORMAT=%s squeue -h -j $SLURM_JOB_ID -o %e)"
    watch = f"{sys.executable} watch.py $end"
    job = slurm.submit(
        f"#!/bin/bash\nend={end}\n{watch} 60\n"
        f"scontrol update JobId=$SLURM_JOB_ID TimeLimit=10\n{watch} 5\n",
        "--time=2",
        cwd=tmp_path,
    )
    slurm.wait_until(lambda: slurm.job(job).get("JobState") == "COMPLETED", "end of the job")
    notice, after = (tmp_path / "out").read_text().splitlines()[-2:]
    assert notice.startswith('notice: Notice(reason="Slurm\'s time limit"')
    assert after == "no notice"


def test_a_dead_task_restarts_the_group(slurm: SlurmCluster, tmp_path: Path) -> None:
    """SIGKILL of one task: no requeue; the next step of the same allocation resumes and ends
    done.
    """
    job = Job(slurm, tmp_path, engine="--grace-s 2", steps=400)
    job.wait_for_step(25)
    pids = re.findall(r"process 2 of 4, pid (\d+)", job.output())
    os.kill(int(pids[0]), 9)
    job.wait_for_state("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
    shown = slurm.job(job.id)
    assert (shown["JobState"], shown["Restarts"]) == ("COMPLETED", "0"), job.output()
    assert "process 2 of 4 was ended by signal 9 in attempt 1" in job.output()
    assert "resumed from step" in job.output()
    assert job.steps()[-1] == 400


def test_outside_an_allocation_it_says_so(slurm: SlurmCluster, tmp_path: Path) -> None:
    """One clear error, before anything is started."""
    assert "SLURM_JOB_ID is not set" in slurm.run(str(HOLDFAST), "slurm", "--", "true")


STAYING = """
import signal
from pathlib import Path

signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path("running").touch()
while True:
    signal.pause()
"""


def test_a_scancel_that_takes_long_holds_nothing_up(slurm: SlurmCluster, tmp_path: Path) -> None:
    """A controller under load: what is to end does so by its own task, and the job does not wait
    for scancel.
    """
    (tmp_path / "staying.py").write_text(STAYING)
    (tmp_path / "bin").mkdir()
    stub = tmp_path / "bin" / "scancel"
    stub.write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\nexec sleep 600\n")
    stub.chmod(0o755)
    command = (
        f"exec {HOLDFAST} slurm --no-requeue --insecure --coordinator-host 127.0.0.1"
        f" --preemption-grace-s 1 --grace-s 1 -- {sys.executable} -S staying.py"
    )
    job = slurm.submit(
        f"#!/bin/bash\nexport PATH={tmp_path}/bin:$PATH\n{command}\n",
        "-N1",
        "-n1",
        "-plow",
        cwd=tmp_path,
    )
    slurm.wait_until((tmp_path / "running").exists, "a task")
    slurm.run("scancel", "--signal=USR1", "--batch", job)
    slurm.wait_until((tmp_path / "asked").exists, "call of scancel")
    slurm.wait_until(
        lambda: slurm.job(job)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED"),
        "end",
        timeout_s=45,
    )
    assert slurm.job(job)["ExitCode"] == "75:0", (tmp_path / "out").read_text()


def test_two_steps_of_one_allocation_do_not_mix(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Of two plain steps that come to one address at one moment, one trains, and both tasks of the
    other are refused with the names of both. A step that comes later has the address.
    """
    step = f"srun -n2 --overlap {sys.executable} {program('slurm_step')} {tmp_path}"
    script = f"""#!/bin/bash
export JAX_PLATFORMS=cpu JAX_COORDINATOR_ADDRESS=127.0.0.1:{free_port()}
{step} 2 & {step} 2 & wait
{step} 0
"""
    job = slurm.submit(script, "-N2", "-n4", cwd=tmp_path)
    ends = ("COMPLETED", "FAILED")
    slurm.wait_until(lambda: slurm.job(job).get("JobState") in ends, "end")
    names = {path.name: path.read_text() for path in tmp_path.glob("*-*.*")}
    output = (tmp_path / "out").read_text()
    assert sum(name.startswith("joined-") for name in names) == 4, (names, output)
    assert sum(name.startswith("refused-") for name in names) == 2, names
    assert names["joined-2.0"] == names["joined-2.1"] == f"slurm-{job}.2 1"
    first, last = ("0", "1") if "joined-0.0" in names else ("1", "0")
    for rank in range(2):
        assert names[f"joined-{first}.{rank}"] == f"slurm-{job}.{first} 1"
        for step in (first, last):
            assert f"job 'slurm-{job}.{step}'" in names[f"refused-{last}.{rank}"]


@pytest.mark.parametrize("fails", [True, False])
def test_a_node_that_is_lost_is_left(fails: bool, tmp_path: Path) -> None:
    """By all of the next attempt, where nobody can stay: before Slurm knows, if the others fail at
    once, and once it does, if nothing else tells. In Slurm's eyes the step of before never ends.
    """
    program = (
        "echo began on $SLURMD_NODENAME; while [ ! -e done ];"
        " do [ ! -e fail-$HOLDFAST_ATTEMPT ] || exit 1; sleep 0.1; done"
    )
    words = ["--quiet", "--nodes=4", "--no-kill", "--ntasks-per-node=2", str(HOLDFAST), "slurm"]
    words += ["--spares", "2", "--coordinator-host", "127.0.0.1", "--", "bash", "-c", program]
    out = tmp_path / "out"
    with SlurmCluster(4) as cluster, out.open("wb") as file:
        job = subprocess.Popen(
            ["salloc", *words],
            cwd=tmp_path,
            env=cluster.env,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
        nodes: list[str] = []

        def have_begun() -> bool:
            nodes[:] = re.findall(r"^\[\d\] began on (\w+)$", out.read_text(), re.MULTILINE)
            return len(nodes) == 4 * attempt

        lost: list[str] = []
        for attempt in (1, 2, 3):
            cluster.wait_until(have_begun, f"attempt {attempt}; {out.read_text()}", timeout_s=80)
            assert not set(nodes[-4:]) & set(lost), out.read_text()
            if attempt < 3:
                lost.append(next(node for node in nodes[-4:] if node not in lost))
                cluster.kill_node(lost[-1])
                if fails:
                    (tmp_path / f"fail-{attempt}").touch()
        (tmp_path / "done").touch()
        assert job.wait(60) == 0, out.read_text()
    assert ("Slurm has lost its node" in out.read_text()) != fails
