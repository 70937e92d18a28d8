"""Measures what a death costs: from the SIGKILL of a process to the first new step, in parts.

    python benchmarks/recovery.py [--launchers run ray jax-trainer] [--rounds 1] [--processes 4]
        [--kills 5] [--kill process] [--between 2 10] [--state-gb 0] [--save-every 20]
        [--local-every 5] [--seed 0] [--memory /dev/shm] [--nodes 2] [--json FILE] [--write]
        [-- OPTIONS]

The trainer is that of examples/train_digits.py, its state made larger by --state-gb. A standby
imports what it would for that script, which begins with these imports. The trainer waits for
nothing: its steps run ahead of the devices. This process kills one of its processes from outside,
any of them, --between so many seconds after the job has got beyond the step of the kill before. The
launchers take turns, --rounds times --kills kills each:

    run          `holdfast run` with the OPTIONS
    local        the same with a local tier: each process is a host of its own, with a folder in
                 --memory, a save every --local-every steps and a copy on one other host; what is
                 in flight at the kill is lost
    local-host   the same, and the process that was killed comes back on an empty host
    stay         `holdfast run`, and the processes that did not die stay (run_restartable)
    stay-local   the same with a local tier
    ray          `holdfast ray` on --nodes nodes of a Ray cluster of this machine
    ray-stay     the same, and the processes that did not die stay
    slurm        `holdfast slurm` on --nodes nodes of a Slurm cluster of this machine
    slurm-stay   the same, and the processes that did not die stay
    jax-trainer  Ray Train's JaxTrainer on such a Ray cluster, which calls
                 jax.distributed.initialize itself, and Orbax's manager

With `--kill node` all of the process's node dies with it, its daemons too, where the launcher has
nodes; another node is there to take its place, as a spare where the launcher has such.

All times are CLOCK_MONOTONIC, of the process that saw it. Each part ends when the last process is
so far:

    known       the launcher says that the process died
    ended       no process of the attempt is left
    started     the processes of the next attempt have imported what they need (JaxTrainer's have
                joined by then, and so have those that stay; of these only who died has ended)
    joined      initialize() has returned
    restored    the state is there
    compiled    the first step is done
    redone      the steps are done again that had been done since the save
    new         the first step is done that had not been done before

The goodput is the share of the time, from the first step to the last, that its steps would have
taken at the pace of most of them: redone ones, and what was between, count for nothing.

--write draws the plot recovery.svg. Run it on a quiet machine: the load is printed with the
figures.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import itertools
import json
import os
import random
import re
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("known", "ended", "started", "joined", "restored", "compiled", "redone", "new")
EXAMPLES = ROOT / "examples"
HOLDFAST = str(Path(sys.executable).parent / "holdfast")
LAUNCHERS = {"run": "holdfast run", "local": "with a local tier", "local-host": "and its host lost"}
LAUNCHERS |= {"stay": "survivors stay", "stay-local": "they stay, with a local tier"}
LAUNCHERS |= {"ray": "holdfast ray", "ray-stay": "holdfast ray, survivors stay"}
LAUNCHERS |= {"slurm": "holdfast slurm", "slurm-stay": "holdfast slurm, survivors stay"}
LAUNCHERS |= {"jax-trainer": "JaxTrainer and Orbax"}
_LOOK_S = 0.005
_PIPE_BYTES = 1 << 20
_DIED = re.compile(r"process \d+ .*ended by signal 9")


def mark(pipe: Path, name: str, attempt: int, **more: Any) -> None:
    """Writes a line for the process that measures.

    It is short enough to stay whole beside the lines of others.
    """
    line = json.dumps(
        {"name": name, "attempt": attempt, "time_s": time.monotonic(), "pid": os.getpid()} | more
    )
    with pipe.open("a") as file:
        file.write(line + "\n")


class Holdfast:
    """holdfast's processes and its manager, with a local tier where there is a folder for it."""

    def __init__(
        self,
        memory: Path | None = None,
        local_every: int = 0,
        *,
        joined: bool = False,
    ) -> None:
        from holdfast import checkpoint, multihost

        self._checkpoint = checkpoint
        self._multihost = multihost
        self._memory = memory
        self._local_every = local_every
        self._joined = joined

    def join(self) -> None:
        if not self._joined:
            self._multihost.initialize()

    def open(self, folder: str, save_every: int) -> None:
        policy = self._checkpoint.EveryNSteps(save_every)
        keep = self._checkpoint.KeepLast(2)
        self._manager = self._checkpoint.CheckpointManager(
            folder, save_policy=policy, keep_policy=keep, local=self._local()
        )
        self.latest_step = self._manager.latest_step
        self.save = self._manager.save

    def _local(self) -> Any:
        if self._memory is None:
            return None
        rank = self._multihost.default_group().index
        host = f"host{rank}"
        policy = self._checkpoint.EveryNSteps(self._local_every)
        return self._checkpoint.Local(self._memory / host, save_policy=policy, failure_domain=host)

    def restore(self, step: int, like: Any) -> Any:
        return self._manager.restore(step, like)

    def close(self) -> None:
        self._manager.close()


class Orbax:
    """Orbax's manager, in processes that Ray Train has joined already."""

    def __init__(self) -> None:
        import orbax.checkpoint as ocp

        self._ocp = ocp

    def join(self) -> None:
        pass

    def open(self, folder: str, save_every: int) -> None:
        options = self._ocp.CheckpointManagerOptions(
            save_interval_steps=save_every, max_to_keep=2, create=True
        )
        self._manager = self._ocp.CheckpointManager(folder, options=options)
        self.latest_step = self._manager.latest_step

    def save(self, step: int, state: Any) -> None:
        self._manager.save(step, args=self._ocp.args.StandardSave(state))

    def restore(self, step: int, like: Any) -> Any:
        return self._manager.restore(step, args=self._ocp.args.StandardRestore(like))

    def close(self) -> None:
        self._manager.close()


def train(
    arguments: argparse.Namespace, attempt: int, system: Callable[[], Any], **started: Any
) -> None:
    """Trains as a process of the job, until it is ended. Marks each step when its devices have
    done it, and waits for none.
    """
    sys.path.insert(0, str(EXAMPLES))
    import jax
    import jax.numpy as jnp
    import train_digits as digits

    manager = system()
    mark(arguments.pipe, "started", attempt, **started)
    manager.join()
    who = jax.process_index()
    mark(arguments.pipe, "joined", attempt, process=who)

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    images, labels = digits.dataset()
    width = max(1, int(arguments.state_gb * 1e9 / 4) // jax.device_count())

    def fresh_state() -> Any:
        return digits.fresh_state(), jnp.ones((jax.device_count(), width))

    ballast_shape = jax.ShapeDtypeStruct((jax.device_count(), width), jnp.float32)
    shapes = digits.state_shapes(), ballast_shape
    shardings = jax.tree.map(lambda leaf: digits.sharding_of(mesh, leaf), shapes)
    step_fn = jax.jit(digits.train_step, donate_argnums=0)
    manager.open(str(arguments.directory), arguments.save_every)
    last = manager.latest_step() or 0
    restore_s = 0.0
    if last:
        state, ballast = jax.tree.map(digits.placed, shapes, shardings)
        began = time.monotonic()
        restored = manager.restore(last, {"state": state, "ballast": ballast})
        jax.block_until_ready(restored)
        restore_s = time.monotonic() - began
        state = restored["state"]
        ballast = restored["ballast"]
    else:
        state, ballast = jax.jit(fresh_state, out_shardings=shardings)()
    jax.block_until_ready((state, ballast))
    mark(arguments.pipe, "restored", attempt, step=last, process=who, restore_s=restore_s)
    done = Marks(arguments.pipe, attempt, who)
    with contextlib.closing(done), contextlib.closing(manager):
        for step, x, y in digits.batches(mesh, images, labels, itertools.count(last + 1)):
            state, loss = step_fn(state, x, y)
            done.follow(step, loss)
            manager.save(step, {"state": state, "ballast": ballast})


class Marks:
    """Marks each step when its devices have done it. A thread looks: the loop itself may be in a
    save meanwhile. It waits for no array, and ends with the loop, or at a step that has failed:
    the loop runs ahead, and hears of that no sooner than in its next save.
    """

    def __init__(self, pipe: Path, attempt: int, process: int) -> None:
        self._pipe = pipe
        self._attempt = attempt
        self._process = process
        self._ahead: deque[tuple[int, Any]] = deque()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def follow(self, step: int, loss: Any) -> None:
        """Has the step marked when its loss is there."""
        self._ahead.append((step, loss))

    def _look(self) -> None:
        while not self._closed.wait(_LOOK_S):
            while self._ahead and self._ahead[0][1].is_ready():
                step, loss = self._ahead.popleft()
                try:
                    loss.block_until_ready()
                except Exception:  # a peer has died: this step failed, and so do those after it
                    return
                mark(self._pipe, "step", self._attempt, step=step, process=self._process)

    def close(self) -> None:
        """Marks no more."""
        self._closed.set()
        self._thread.join()
        self._ahead.clear()


def train_in_ray(config: dict[str, Any]) -> None:
    """Trains as a worker of JaxTrainer.

    Ray numbers no attempts: each worker counts its own starts.
    """
    import ray.train

    arguments = argparse.Namespace(**config)
    rank = ray.train.get_context().get_world_rank()
    for attempt in itertools.count(1):
        with contextlib.suppress(FileExistsError):
            (arguments.pipe.parent / f"rank{rank}-attempt{attempt}").touch(exist_ok=False)
            break
    train(arguments, attempt, Orbax)


def drive_jax_trainer(arguments: argparse.Namespace) -> None:
    """Runs JaxTrainer to the end of the job, on the cluster that RAY_ADDRESS names."""
    import ray
    import ray.train
    from ray.train.v2.jax import JaxConfig, JaxTrainer

    class Deaths(ray.train.UserCallback):  # type: ignore[misc]
        def after_exception(
            self, run_context: Any, worker_exceptions: dict[int, Exception]
        ) -> None:
            mark(arguments.pipe, "known", 0)

    failures = ray.train.FailureConfig(max_failures=arguments.kills)
    folder = str(arguments.pipe.parent / "ray-train")
    JaxTrainer(
        train_in_ray,
        train_loop_config=vars(arguments),
        jax_config=JaxConfig(
            use_gpu=True
        ),  # with JAX_PLATFORMS=cpu it starts jax.distributed on the CPU
        scaling_config=ray.train.ScalingConfig(num_workers=arguments.processes),
        run_config=ray.train.RunConfig(
            storage_path=folder, failure_config=failures, callbacks=[Deaths()]
        ),
    ).fit()


class Watch:
    """Reads the launcher's output and the processes' marks, sees processes end, and kills them.

    `marks` is all that came of it.
    """

    def __init__(
        self,
        launcher: subprocess.Popen[bytes],
        pipe: Path,
        arguments: argparse.Namespace,
        drawn: random.Random,
        kill: Callable[[int], None],
    ) -> None:
        assert launcher.stdout is not None
        self._kill_process = kill
        self._on_back: Callable[[], object] = list
        self._launcher = launcher
        self._arguments = arguments
        self._drawn = drawn
        self._output = launcher.stdout.fileno()
        self._pids = dict[int, tuple[int, int]]()  # pidfd -> (pid, attempt)
        self._pipe = os.open(pipe, os.O_RDWR)  # open for writing too: it never ends
        # Nobody waits to write a mark while a node is replaced.
        fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._rests = {self._output: b"", self._pipe: b""}
        self._joined: dict[int, int] = {}  # the process id of each process
        self._done: dict[int, int] = {}  # its last step
        self._best = 0  # the last step that any had done before the latest kill
        self._kills = 0
        self._kill_at: float | None = None  # None: the job has not got beyond `_best`
        self.marks: list[dict[str, Any]] = []
        self.lines: list[str] = []

    def run(self, on_kill: Callable[[int], None], on_back: Callable[[], object]) -> None:
        """Returns when all kills are done and the launcher has closed its output.

        `on_kill` gets who was killed; `on_back` is called when the job has got beyond that.
        """
        self._on_back = on_back
        while True:
            wait_s = None if self._kill_at is None else self._kill_at - time.monotonic()
            ready, _, _ = select.select(
                [*self._rests, *self._pids], [], [], None if wait_s is None else max(0.0, wait_s)
            )
            if wait_s is not None and wait_s <= 0:
                on_kill(self._kill())
            for fd in ready:
                if fd in self._pids:
                    pid, attempt = self._pids.pop(fd)
                    os.close(fd)
                    self._note("ended", attempt, pid)
            for fd in (self._pipe, self._output):
                if fd not in ready:
                    continue
                data = os.read(fd, 1 << 16)
                if not data:
                    os.close(self._pipe)
                    return
                *lines, self._rests[fd] = (self._rests[fd] + data).split(b"\n")
                for line in lines:
                    self._read(fd, line.decode(errors="replace"))

    def _kill(self) -> int:
        who = self._drawn.choice(sorted(self._joined))
        self._best = max(self._done.values())
        self._done.clear()
        self._kill_at = None
        self._kills += 1
        self._kill_process(self._joined[who])
        attempt = max(each["attempt"] for each in self.marks)
        self._note("killed", attempt, self._joined[who], step=self._best, process=who)
        return who

    def _read(self, fd: int, line: str) -> None:
        if fd == self._output:
            self.lines.append(line)
            if _DIED.search(line):
                self._note("known", self._killed(), 0)
            return
        value = json.loads(line)
        if value["name"] == "known":
            value["attempt"] = self._killed()
        self.marks.append(value)
        if value["name"] == "started":
            with contextlib.suppress(ProcessLookupError):
                self._pids[os.pidfd_open(value["pid"])] = value["pid"], value["attempt"]
        if value["name"] == "joined":
            self._joined[value["process"]] = value["pid"]
        if value["name"] == "step" and value["attempt"] <= self._killed():
            self._best = max(self._best, value["step"])  # done before its process knew
        elif value["name"] == "step":
            self._take_step(value["process"], value["step"])

    def _take_step(self, process: int, step: int) -> None:
        self._done[process] = step
        everybody = len(self._done) == self._arguments.processes
        if self._kill_at is not None or not everybody or min(self._done.values()) <= self._best:
            return
        if self._kills == self._arguments.kills:
            self._launcher.terminate()
        else:
            self._on_back()
            self._kill_at = time.monotonic() + self._drawn.uniform(*self._arguments.between)

    def _killed(self) -> int:
        """Returns the attempt in which a process was killed last."""
        killed = [each["attempt"] for each in self.marks if each["name"] == "killed"]
        return killed[-1] if killed else 0

    def _note(self, name: str, attempt: int, pid: int, **more: Any) -> None:
        self.marks.append(
            {"name": name, "attempt": attempt, "time_s": time.monotonic(), "pid": pid} | more
        )


def recoveries(
    marks: list[dict[str, Any]], began_s: float, *, stays: bool
) -> Iterator[dict[str, float]]:
    """Yields for each kill the seconds from it to the end of each part.

    `steps` are those that were done again, `restore_s` what the manager's restore took, `killed_s`
    when the kill was, since the job was started, `process` who was killed.
    """
    kills = [each for each in marks if each["name"] == "killed"]
    for killed in kills:
        later = [each for each in marks if each["time_s"] > killed["time_s"]]
        before = [each for each in marks if each["attempt"] <= killed["attempt"]]
        best = max(each["step"] for each in before if each["name"] == "step")
        new = _first_steps(
            [each for each in later if each["attempt"] > killed["attempt"]], best + 1
        )
        if not new:
            raise SystemExit(f"no new step after the kill in attempt {killed['attempt']}")
        # The one between was ended by another death, such as one of gloo's own.
        attempt = new[0]["attempt"]
        of = [each for each in later if each["attempt"] == attempt]
        restored = [each for each in of if each["name"] == "restored"]
        ended = [
            each
            for each in later
            if each["name"] == "ended" and each["attempt"] == killed["attempt"]
        ]
        parts = {
            "known": [each for each in later if each["name"] == "known"][:1],
            # Those that stay end later, with another death.
            "ended": ended[:1] if stays else ended,
            "started": [each for each in of if each["name"] == "started"],
            "joined": [each for each in of if each["name"] == "joined"],
            "restored": restored,
            "compiled": _first_steps(of, 0),
            "redone": _first_steps(of, best),
            "new": new,
        }
        if missing := [name for name, seen in parts.items() if not seen]:
            raise SystemExit(f"no mark {missing[0]!r} of attempt {attempt}")
        times: dict[str, float] = {
            name: max(each["time_s"] for each in seen) - killed["time_s"]
            for name, seen in parts.items()
        }
        times["steps"] = best - restored[0]["step"]
        times["restore_s"] = max(each["restore_s"] for each in restored)
        times["replaced_restore_s"] = max(
            each["restore_s"] for each in restored if each["process"] == killed["process"]
        )
        times["killed_s"] = killed["time_s"] - began_s
        times["process"] = killed["process"]
        yield times


def goodput(marks: list[dict[str, Any]]) -> float:
    """Returns the share of the time from the first step to the last that the steps alone take."""
    done: dict[int, dict[int, float]] = {}
    for each in marks:
        if each["name"] == "step":
            done.setdefault(each["step"], {}).setdefault(each["process"], each["time_s"])
    times = sorted(max(by_process.values()) for by_process in done.values())
    pace_s = statistics.median(after - before for before, after in itertools.pairwise(times))
    return (len(times) - 1) * pace_s / (times[-1] - times[0])


def _first_steps(marks: list[dict[str, Any]], earliest: int) -> list[dict[str, Any]]:
    """Returns of each process the mark of the first step that is not before `earliest`."""
    found: dict[int, dict[str, Any]] = {}
    for each in marks:
        if each["name"] == "step" and each["step"] >= earliest:
            found.setdefault(each["process"], each)
    return list(found.values())


def kill_process(pid: int) -> None:
    """Kills a process alone."""
    os.kill(pid, signal.SIGKILL)


class RayNodes:
    """Nodes of a Ray cluster, and one more than the job needs where they are to be lost."""

    def __init__(self, nodes: int, processes: int, kills: int) -> None:
        from tests.support.ray_fleet import Fleet

        self._processes = processes
        self._room = -(-processes // nodes)
        self._loses = bool(kills)
        self._count = nodes + self._loses
        self._fleet = Fleet(__name__, room=self._room)
        self._lost: list[Any] = []
        self.mend()
        self.environment = {"RAY_ADDRESS": self._fleet.address}

    def mend(self) -> None:
        """Has a node in the place of one that was lost, which Ray may not have missed yet."""
        while self._lost:
            self._fleet.remove(self._lost.pop())
        self._fleet.become([{}] * self._count)

    def command(self, options: list[str], worker: list[str]) -> list[str]:
        """Returns what runs a job there."""
        options = [*options, "-n", str(self._processes), "--address", self._fleet.address]
        spares = ["--spares", str(self._room)] if self._loses else []
        return [HOLDFAST, "ray", *options, *spares, "--", *worker]

    def kill_node(self, pid: int) -> None:
        """Kills all processes of a process's node."""
        from tests.support.processes import descendants

        node = self._fleet.node_of(pid)
        self._lost.append(node)
        for each in descendants(self._fleet.raylet(node)):
            with contextlib.suppress(ProcessLookupError):
                kill_process(each)

    def close(self) -> None:
        """Ends the cluster."""
        self._fleet.close()


class SlurmNodes:
    """Nodes of a Slurm cluster, and one more for each that is to be lost."""

    def __init__(self, nodes: int, processes: int, kills: int) -> None:
        from tests.support.slurm import SlurmCluster

        self._nodes = nodes
        self._spares = kills
        self._per_node = -(-processes // nodes)
        self._cluster = SlurmCluster(nodes + kills)
        self._cluster.__enter__()
        self.environment = self._cluster.env

    def command(self, options: list[str], worker: list[str]) -> list[str]:
        """Returns what runs a job there: its launcher is on none of the nodes."""
        allocation = ["salloc", "--quiet", f"--nodes={self._nodes + self._spares}", "--no-kill"]
        allocation += [f"--ntasks-per-node={self._per_node}"]
        options = [*options, "--spares", str(self._spares), "--coordinator-host", "127.0.0.1"]
        return [*allocation, HOLDFAST, "slurm", *options, "--", *worker]

    def mend(self) -> None:
        """There are as many nodes to spare as are lost."""

    def kill_node(self, pid: int) -> None:
        """Kills all processes of a process's node."""
        from tests.support.slurm import node_of

        self._cluster.kill_node(node_of(pid))

    def close(self) -> None:
        """Ends the cluster."""
        self._cluster.__exit__(None, None, None)


NODES_OF: dict[str, type[RayNodes] | type[SlurmNodes]] = {"ray": RayNodes, "slurm": SlurmNodes}
NODES_OF |= {"jax-trainer": RayNodes}
PRELOAD = ["--preload", "sklearn.datasets,rich.progress"]
"""What examples/train_digits.py imports first, beside what each standby does."""


def measure(
    launcher: str, arguments: argparse.Namespace, drawn: random.Random
) -> list[dict[str, float]]:
    """Runs the job under one launcher and returns its recoveries; `drawn` says who dies when."""
    stays = "stay" in launcher
    options = ["--max-restarts", str(2 * arguments.kills)]
    own = [*PRELOAD, *arguments.options]
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(dir=arguments.memory) as memory,
        contextlib.ExitStack() as stack,
    ):
        pipe = Path(folder) / "marks"
        os.mkfifo(pipe)
        worker = [
            sys.executable,
            __file__,
            "--directory",
            f"{folder}/checkpoints",
            "--pipe",
            str(pipe),
        ]
        for name in ("kills", "state_gb", "save_every", "local_every", "processes"):
            worker += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        os.environ["JAX_PLATFORMS"] = "cpu"  # what a cluster's processes inherit
        if stays:
            worker.append("--stays")
        if "local" in launcher:
            worker += ["--memory", memory, "--tier"]
        role = [*worker, "--role", "worker"]
        here = ["-n", str(arguments.processes), "--log-dir", f"{folder}/logs"]
        command = [HOLDFAST, "run", *options, *here, *own, "--", *role]
        kill = kill_process
        mend: Callable[[], object] = list
        if on_nodes := NODES_OF.get(launcher.removesuffix("-stay")):
            loses = arguments.kill == "node"
            kills = arguments.kills if loses else 0
            nodes = on_nodes(arguments.nodes, arguments.processes, kills)
            stack.callback(nodes.close)
            environment |= nodes.environment
            if "ray" in launcher:
                options += own
            command = nodes.command(options, role)
            kill = nodes.kill_node if loses else kill_process
            mend = nodes.mend
        if launcher == "jax-trainer":
            command = [*worker, "--role", "jax-trainer"]
        began_s = time.monotonic()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
        )
        watch = Watch(process, pipe, arguments, drawn, kill)

        def on_kill(who: int) -> None:
            if launcher == "local-host":
                shutil.rmtree(Path(memory) / f"host{who}")

        try:
            watch.run(on_kill, mend)
        finally:
            process.terminate()
        process.wait()
        if len([each for each in watch.marks if each["name"] == "killed"]) < arguments.kills:
            raise SystemExit("\n".join([*watch.lines, f"{' '.join(command)} ended too early"]))
        print(
            *(line for line in watch.lines if re.search("cold|standby|cannot stay", line)),
            sep="\n",
            file=sys.stderr,
        )
        print(f"{LAUNCHERS[launcher]}: goodput {goodput(watch.marks):.3f}", flush=True)
        return list(recoveries(watch.marks, began_s, stays=stays))


def table(results: dict[str, list[dict[str, float]]]) -> str:
    """Returns for each launcher and part the seconds that it took, and those since the kill.

    Medians, and the span of the total.
    """
    lines = [
        f"| part | {' | '.join(f'{LAUNCHERS[name]} | since the kill' for name in results)} |",
        "|---" * (1 + 2 * len(results)) + "|",
    ]
    for name, previous in zip(PARTS, (None, *PARTS), strict=False):
        cells = []
        for found in results.values():
            taken = statistics.median(
                each[name] - (each[previous] if previous else 0.0) for each in found
            )
            cells += [f"{taken:.2f}", f"{statistics.median(each[name] for each in found):.2f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    steps = (
        f"{statistics.median(each['steps'] for each in found):g}" for found in results.values()
    )
    lines.append(f"| steps redone | {' | | '.join(steps)} | |")
    for name, found in results.items():
        totals = sorted(each["new"] for each in found)
        each_s = ", ".join(f"{each['new']:.1f}" for each in found)
        text = (
            f"{len(found)} kills ({each_s} in their order); from the kill to the first new step"
            f" {totals[0]:.1f} to {totals[-1]:.1f} s"
        )
        lines.append(f"\n{LAUNCHERS[name]}: {text}, median {statistics.median(totals):.1f}")
        restores = ", ".join(f"{each['restore_s']:.2f}" for each in found)
        replaced = ", ".join(f"{each['replaced_restore_s']:.2f}" for each in found)
        killed = ", ".join(f"{each['process']:g} at {each['killed_s']:.0f}" for each in found)
        lines.append(
            f"the manager's restore {restores} s, in the replaced process {replaced}; killed after"
            f" so many seconds: process {killed}"
        )
    return "\n".join(lines)


def bars(results: dict[str, list[dict[str, float]]]) -> str:
    """Returns a plot in text: the seconds from the kill to the first new step, by part."""
    scale = 40 / max(statistics.median(each["new"] for each in found) for found in results.values())
    lines = []
    for name, found in results.items():
        lines.append(f"{LAUNCHERS[name]}: {statistics.median(each['new'] for each in found):.1f} s")
        for part, previous in zip(PARTS, (None, *PARTS), strict=False):
            begin = statistics.median(each[previous] for each in found) if previous else 0.0
            end = max(begin, statistics.median(each[part] for each in found))
            mark_at = round(begin * scale)
            width = round(end * scale) - round(begin * scale)
            lines.append(f"  {part:9} {' ' * mark_at}{'█' * width or '▏'} {end - begin:.1f}")
    return "\n".join(lines)


def work(arguments: argparse.Namespace) -> None:
    """Trains as a process of `holdfast run`, in the attempt that it is in now."""
    attempt = int(os.environ["HOLDFAST_ATTEMPT"])
    memory = arguments.memory if arguments.tier else None
    system = functools.partial(Holdfast, memory, arguments.local_every, joined=arguments.stays)
    train(arguments, attempt, system, warm="_holdfast_standby" in sys.modules)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=["run"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="draw recovery.svg")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--kill", choices=["process", "node"], default="process")
    parser.add_argument("--nodes", type=int, default=2, help="that the processes share")
    parser.add_argument("--state-gb", type=float, default=0.0)
    parser.add_argument(
        "--between", type=float, nargs=2, default=(2.0, 10.0), metavar=("LEAST", "MOST")
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--local-every", type=int, default=5)
    parser.add_argument(
        "--memory", type=Path, default=Path("/dev/shm"), help="where hosts have their folders"
    )
    parser.add_argument("--json", type=Path, help="write all times here")
    parser.add_argument("--role", choices=["worker", "jax-trainer"], help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--pipe", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--stays", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--tier", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("options", nargs="*", help="of `holdfast run` and `ray`, after --")
    arguments = parser.parse_args()
    if arguments.role == "worker" and arguments.stays:
        from holdfast import multihost

        sys.path.insert(0, str(EXAMPLES))
        import train_digits  # noqa: F401 - what outlives an attempt, as in the example itself

        multihost.run_restartable(lambda: work(arguments))
        return
    if arguments.role == "worker":
        work(arguments)
        return
    if arguments.role == "jax-trainer":
        drive_jax_trainer(arguments)
        return
    sys.path.insert(0, str(ROOT))
    before = os.getloadavg()[0]
    results: dict[str, list[dict[str, float]]] = {name: [] for name in arguments.launchers}
    for turn in range(arguments.rounds):
        for name in results:
            # The same kills under each launcher, others in each round.
            drawn = random.Random(f"{arguments.seed} {turn}")
            results[name] += measure(name, arguments, drawn)
            print(
                f"{LAUNCHERS[name]}: {[round(each['new'], 1) for each in results[name]]}",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    print(
        f"load average {before:.1f} before and {os.getloadavg()[0]:.1f}"
        f" after\n\n{table(results)}\n\n```\n{bars(results)}\n```"
    )
    if arguments.write:
        from plot import draw

        draw(bars(results), "recovery.svg", "Seconds from a death to the next new step")


if __name__ == "__main__":
    main()
