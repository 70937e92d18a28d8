"""A Slurm cluster on this machine, on loopback, of daemons that the test starts and
ends by their ids.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")


def require_slurm() -> None:
    """Skips a module's tests where this machine has no Slurm, or they may not start it."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin"
    missing = [name for name in _PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        pytest.skip(
            f"Slurm is not installed ({', '.join(missing)} missing):"
            " scripts/install_system_packages.sh",
            allow_module_level=True,
        )
    if os.getuid() != 0:
        pytest.skip(
            "slurmctld and slurmd run as root here, and we are not", allow_module_level=True
        )


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _of(pid: int, name: str) -> bytes:
    """Returns what /proc says of a process, nothing where it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""


def node_of(pid: int) -> str:
    """Returns the node that a process of a step runs on."""
    prefix = b"SLURMD_NODENAME="
    here = [each for each in _of(pid, "environ").split(b"\0") if each.startswith(prefix)]
    assert here, f"process {pid} is of no step"
    return here[0].removeprefix(prefix).decode()


class SlurmCluster:
    """Runs munged, slurmctld and so many slurmd (n1, n2, ...: two processors each), with a
    partition `low` that `high` preempts by requeue.
    """

    def __init__(self, num_nodes: int = 2, *, task_plugin: str = "none") -> None:
        self._task_plugin = task_plugin
        self.nodes = [f"n{number}" for number in range(1, num_nodes + 1)]
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-slurm-"))
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._write_config()
        self.env = os.environ | {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": f"{os.environ['PATH']}:/usr/sbin",
        }

    def _write_config(self) -> None:
        folder, (ctld, *ports) = self.folder, _free_ports(1 + len(self.nodes))
        nodes = "\n".join(
            f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=2"
            " State=UNKNOWN"
            for name, port in zip(self.nodes, ports, strict=True)
        )
        among = f"Nodes=n[1-{len(self.nodes)}]"
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        for name in ("state", *(f"spool-{node}" for node in self.nodes)):
            (folder / name).mkdir()
        (folder / "slurm.conf").write_text(f"""
ClusterName=holdfast
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ctld}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdParameters=config_overrides
SlurmctldTimeout=60
SlurmdTimeout=10
ProctrackType=proctrack/linuxproc
TaskPlugin=task/{self._task_plugin}
TaskPluginParam=autobind=cores
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=5
OverTimeLimit=0
ReturnToService=2
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
{nodes}
PartitionName=low {among} Default=YES PriorityTier=1 PreemptMode=REQUEUE \\
  GraceTime=60 MaxTime=60 State=UP
PartitionName=high {among} PriorityTier=10 PreemptMode=OFF MaxTime=60 State=UP
""")

    def _start(self, name: str, *command: str) -> None:
        log = (self.folder / f"{name}.out").open("wb")
        self._daemons[name] = subprocess.Popen(
            command, env=self.env, stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
        log.close()

    def __enter__(self) -> Self:
        socket_path = f"{self.folder}/munge.socket"
        folder = self.folder
        munge = [
            "munged",
            "--foreground",
            "--force",
            f"--key-file={folder}/munge.key",
            f"--socket={socket_path}",
        ]
        self._start(
            "munged",
            *munge,
            f"--pid-file={folder}/munged.pid",
            f"--log-file={folder}/munged.log",
            f"--seed-file={folder}/munged.seed",
        )
        self.wait_until(lambda: Path(socket_path).exists(), "munged")
        self._start("slurmctld", "slurmctld", "-D", "-i")
        for name in self.nodes:
            self.start_node(name)
        self.wait_for_nodes()
        return self

    def start_node(self, name: str) -> None:
        """Starts the slurmd of a node, where none runs."""
        daemon = self._daemons.get(name)
        if daemon is None or daemon.poll() is not None:
            self._start(name, "slurmd", "-D", "-N", name)

    def wait_for_nodes(self) -> None:
        """Waits until all nodes are idle."""
        idle = ["idle"] * len(self.nodes)
        self.wait_until(
            lambda: self.run("sinfo", "-h", "-N", "-p", "low", "-o", "%T").split() == idle,
            "idle nodes",
        )

    def become_whole(self) -> None:
        """Ends all jobs, and has the nodes back that were lost."""
        self.run("scancel", "--user=root")
        for name in self.nodes:
            self.start_node(name)
        self.wait_for_nodes()

    def wait_for_state(self, name: str, state: str) -> None:
        """Waits until Slurm says that of a node."""
        show = ("sinfo", "--noheader", f"--nodes={name}", "--partition=low", "--format=%T")
        self.wait_until(lambda: self.run(*show).startswith(state), f"node {name} that is {state}")

    def has_daemon(self, name: str) -> bool:
        """Returns whether the slurmd of a node runs."""
        return self._daemons[name].poll() is None

    def kill_daemon(self, name: str) -> None:
        """Kills the slurmd of a node: what it has started lives on."""
        daemon = self._daemons[name]
        daemon.kill()
        daemon.wait()

    def kill_node(self, name: str) -> None:
        """Kills the slurmd of a node, the daemons of steps there, and what these have started."""
        self.kill_daemon(name)
        marks = {
            f"SLURM_CONF={self.folder}/slurm.conf".encode(),
            f"SLURMD_NODENAME={name}".encode(),
        }
        here = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
        tasks = [pid for pid in here if marks <= set(_of(pid, "environ").split(b"\0"))]
        parents = {int(_of(pid, "stat").rpartition(b")")[2].split()[1]) for pid in tasks}
        steps = [pid for pid in parents if _of(pid, "comm") == b"slurmstepd\n"]
        for pid in [*steps, *tasks]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.run("scancel", "--user=root")
        for name in (*self.nodes, "slurmctld", "munged"):
            if (daemon := self._daemons.get(name)) is not None:
                daemon.terminate()
                try:
                    daemon.wait(15)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()
        if kind is None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, *command: str) -> str:
        """Runs one of Slurm's commands and returns its output."""
        done = subprocess.run(
            command, env=self.env, capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout + done.stderr

    def wait_until(self, holds: Callable[[], bool], what: str, timeout_s: float = 150) -> None:
        """Waits until `holds()`; fails with the daemons' last words."""
        deadline = time.monotonic() + timeout_s
        while not holds():
            if time.monotonic() > deadline:
                logs = "\n".join(
                    f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}"
                    for path in self.folder.glob("*.log")
                )
                raise AssertionError(
                    f"no {what} within {timeout_s}"
                    f" s\n{self.run('sinfo')}{self.run('squeue')}\n{logs}"
                )
            time.sleep(0.1)

    def submit(self, script: str, *options: str, cwd: Path) -> str:
        """Submits a batch script whose output goes to cwd/out; returns the job's id."""
        path = cwd / "job.sh"
        path.write_text(script)
        arguments = [
            "--parsable",
            f"--output={cwd}/out",
            "--open-mode=append",
            f"--chdir={cwd}",
            "--requeue",
            *options,
        ]
        said = self.run("sbatch", *arguments, str(path)).strip()
        assert said.isdecimal(), said
        return said

    def job(self, job_id: str) -> dict[str, str]:
        """Returns what scontrol shows of a job: JobState, Restarts, Reason, ..."""
        words = self.run("scontrol", "--oneliner", "show", "job", job_id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)
