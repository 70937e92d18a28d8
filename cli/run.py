"""`holdfast run`: the processes of a job on this machine, or on a Ray cluster."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from holdfast.coordination.limits import Limits

from .common import (
    SECONDS,
    command_argument,
    failure_of,
    grace_options,
    print_json,
    refuse,
    stall_timeout_option,
    straggler_steps_option,
)
from .interrupts import raise_at_interrupts

if TYPE_CHECKING:
    from holdfast.launch import JobResult, RestartPolicy, RunSettings
    from holdfast.launch import ray as ray_engine
    from holdfast.launch.workers.output import ConsoleOutput, Output

_PAGE_END_S = 5.0
_ON_RAY = "is for jobs on a Ray cluster: leave it out, or add --ray ADDRESS"
_NO_STANDBYS = "is for processes of this machine: leave it out with --ray, which has no standbys"
_NOT_ON_RAY = {
    "--capacity-file": (
        "is for jobs of this machine: with --ray, the cluster says how many processes there is"
        " room for"
    ),
    "--log-dir": (
        "is for processes of this machine: with --ray, redirect the output, which holds the lines"
        " of all"
    ),
    "--web": (
        "is for jobs of this machine: with --ray, use `holdfast web ADDRESS` with the address that"
        " is printed"
    ),
    "--metrics-port": "is for jobs of this machine: leave it out with --ray",
    "--standby": _NO_STANDBYS,
    "--no-standby": _NO_STANDBYS,
    "--preload": _NO_STANDBYS,
}


def _amounts(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, float]:
    try:
        return {name: float(amount) for name, amount in (value.split("=", 1) for value in values)}
    except ValueError:
        raise click.BadParameter(f"{', '.join(values)}: expected NAME=AMOUNT") from None


@contextlib.contextmanager
def _page(job_id: str, port: int) -> Iterator[None]:
    """Has a process of its own serve the job's page, and print its URL, or why there is none."""
    main = "from holdfast.cli import main; main()"
    options = ["--job-id", job_id, "--port", str(port), "--end-with-input"]
    command = [sys.executable, "-P", "-c", main, "web", *options]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=sys.stderr, start_new_session=True
    ) as server:
        try:
            yield
        finally:
            assert server.stdin is not None
            server.stdin.close()
            try:
                server.wait(_PAGE_END_S)
            except subprocess.TimeoutExpired:
                server.kill()


def _write_report(log_dir: Path, output: Output) -> None:
    from holdfast.web import write_report

    try:
        write_report(log_dir / "status.json", log_dir / "report.html")
        output.say(f"report at {log_dir / 'report.html'}")
    except (OSError, ValueError) as error:
        output.say(f"no report: {error}")


def _with_orbax(command: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the command with the module in it that stands for Orbax.

    The module comes after the interpreter and its options.
    """
    at = 1
    while at < len(command) and command[at].startswith("-") and command[at] not in ("-m", "-c"):
        at += 2 if command[at] in ("-X", "-W") else 1
    if not Path(command[0]).name.startswith("python") or at >= len(command) or command[at] == "-c":
        raise click.UsageError(
            "--orbax: expected a command like `python train.py` or `python -m train`, found"
            f" {' '.join(command)}"
        )
    return (*command[:at], "-m", "holdfast.compat.orbax", *command[at:])


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "-n",
    "--num-processes",
    type=click.IntRange(1, Limits().tasks),
    required=True,
    help="How many processes.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Restarts after a death; progress refills them.",
)
@click.option(
    "--max-preemptions",
    type=click.IntRange(0),
    help="Restarts after a preemption.  [default: as --max-restarts]",
)
@click.option(
    "--min-processes",
    type=click.IntRange(1),
    help="Go on with that many where there is no room for more.  [default: -n]",
)
@click.option(
    "--capacity-file",
    type=click.Path(path_type=Path),
    help="Holds how many processes there is room for, read twice a second.",
)
@click.option(
    "--heartbeat-timeout-s",
    type=click.FloatRange(0.1),
    default=60.0,
    show_default=True,
    help="Silence after which a host is lost.",
)
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="A rotated file for each process, and the coordinator's log.",
)
@click.option(
    "--standby/--no-standby",
    default=None,
    help=(
        "Interpreters that wait to become the next attempt, jax imported.  [default: where restarts"
        " are allowed]"
    ),
)
@click.option(
    "--preload",
    default="",
    metavar="MODULES",
    help="What standbys import besides jax and holdfast: flax,optax",
)
@grace_options
@stall_timeout_option
@straggler_steps_option
@click.option("--job-id", help="Of this job, the same in each run of it.  [default: a new one]")
@click.option(
    "--view/--no-view",
    default=None,
    help="A live table of the processes.  [default: on a terminal]",
)
@click.option(
    "--ray",
    metavar="ADDRESS",
    help='Run on the Ray cluster there ("auto": the one this machine belongs to).',
)
@click.option(
    "--resource",
    "resources",
    multiple=True,
    callback=_amounts,
    metavar="NAME=AMOUNT",
    help="Ray: of one process.  [default: CPU=1]",
)
@click.option(
    "--slices",
    type=click.IntRange(1),
    help="Ray: TPU slices of equal size.  [default: 1]",
)
@click.option(
    "--startup-timeout-s",
    type=SECONDS,
    default=600.0,
    show_default=True,
    help=(
        "For machines for all processes; with --stall-timeout-s, from the start to the first step."
    ),
)
@click.option(
    "--insecure",
    is_flag=True,
    help=(
        "Ray: no token and certificates; whoever reaches the coordinator's port can disturb the"
        " job."
    ),
)
@click.option(
    "--web", is_flag=True, help="A live page of the job; its URL is printed. Needs the extra `web`."
)
@click.option(
    "--web-port",
    type=click.IntRange(0, 65535),
    default=0,
    show_default=True,
    help="Port of --web; 0 takes a free one.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="At the end print how it ended as JSON on stdout; the processes' lines go to stderr.",
)
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    help="Port for Prometheus, through all attempts; 0 takes a free one.",
)
@click.option(
    "--metrics-host", default="127.0.0.1", show_default=True, help="Address to serve metrics at."
)
@click.option(
    "--orbax",
    is_flag=True,
    help="COMMAND is python and a script, which gets holdfast where it imports orbax.checkpoint.",
)
@command_argument
def run(**options: Any) -> None:
    """Run COMMAND as N processes of one job, under a coordinator of their own.

    The first line on stderr names the coordinator's address; `holdfast status` finds it by
    itself on this machine.

    Ends with 0 when all are done, 75 when preempted (run it again; the last line says what is
    saved), 93 when a process said that a restart cannot help, 124 when it hangs, 130 after Ctrl-C,
    else with the code of the process that failed first (128 + the signal's number).

    \b
    holdfast run -n 4 -- python train.py
    holdfast run -n 4 --max-restarts 3 --max-preemptions 100 -- python train.py
    holdfast run --ray auto -n 8 --min-processes 4 --resource GPU=1 -- python train.py
    """
    chosen = RunOptions(**options)
    refuse(chosen.without_effect())
    try:
        result = _run(chosen)
    except (ValueError, ImportError) as error:
        raise click.UsageError(str(error)) from error
    except OSError as error:
        raise failure_of(error) from error
    if chosen.as_json:
        print_json(result.as_json())
    sys.exit(result.exit_code)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What the user has chosen: a field for each option of `holdfast run`, of its type."""

    command: tuple[str, ...]
    num_processes: int
    min_processes: int | None
    job_id: str | None
    heartbeat_timeout_s: float
    orbax: bool

    # When the job is started again, and when it hangs.
    max_restarts: int
    max_preemptions: int | None
    grace_s: float
    commit_grace_s: float
    preemption_grace_s: float
    startup_timeout_s: float
    stall_timeout_s: float
    straggler_steps: float

    # What is shown of the job.
    view: bool | None
    as_json: bool
    web: bool
    web_port: int

    # On this machine only.
    capacity_file: Path | None
    log_dir: Path | None
    standby: bool | None
    preload: str
    metrics_port: int | None
    metrics_host: str

    # On a Ray cluster only.
    ray: str | None
    resources: dict[str, float]
    slices: int | None
    insecure: bool

    def without_effect(self) -> dict[str, str]:
        """Returns the options that do nothing beside the others, and why."""
        idle: dict[str, str] = {}
        if not self.web:
            idle["--web-port"] = "is for the live page: add --web"
        if self.metrics_port is None:
            idle["--metrics-host"] = "is for Prometheus: add --metrics-port"
        if self.as_json:
            idle["--view"] = "is for people, --json for programs: leave one of them out"
        engine = self._without_effect_here() if self.ray is None else _NOT_ON_RAY
        return idle | engine

    def _without_effect_here(self) -> dict[str, str]:
        """Returns the options that do nothing for a job of this machine."""
        idle = dict.fromkeys(("--resource", "--slices", "--insecure"), _ON_RAY)
        if self.capacity_file is None:
            idle["--min-processes"] = (
                "is for jobs whose room changes: add --capacity-file FILE, or --ray ADDRESS"
            )
            if math.isinf(self.stall_timeout_s):
                idle["--startup-timeout-s"] = (
                    "is the time to the first step: add --stall-timeout-s, which minds it"
                )
        restarts = self.max_restarts or self.max_preemptions or self.min_processes
        if not restarts:
            idle["--standby"] = "is for the next attempt: add --max-restarts"
            idle["--preload"] = "is for standbys, of the next attempt: add --max-restarts"
        elif self.standby is False:
            idle["--preload"] = "is for standbys: leave --no-standby out"
        return idle

    def restart_policy(self) -> RestartPolicy:
        """Returns when the job is started again."""
        from holdfast.launch import RestartPolicy

        preemptions = self.max_preemptions
        return RestartPolicy(
            max_failures=self.max_restarts,
            max_preemptions=self.max_restarts if preemptions is None else preemptions,
            grace_s=self.grace_s,
            commit_grace_s=self.commit_grace_s,
            preemption_grace_s=self.preemption_grace_s,
            startup_timeout_s=self.startup_timeout_s,
            stall_timeout_s=self.stall_timeout_s,
            straggler_steps=self.straggler_steps,
        )

    def local_settings(self, job_id: str) -> RunSettings:
        """Returns how the job runs on this machine."""
        from holdfast.launch import MetricsSettings, RunSettings, StandbySettings

        preload = [name.strip() for name in self.preload.split(",") if name.strip()]
        metrics = None
        if self.metrics_port is not None:
            metrics = MetricsSettings(port=self.metrics_port, host=self.metrics_host)
        return RunSettings(
            restart=self.restart_policy(),
            min_processes=self.min_processes,
            job_id=job_id,
            capacity_file=self.capacity_file,
            heartbeat_timeout_s=self.heartbeat_timeout_s,
            log_dir=self.log_dir,
            standby=StandbySettings(wanted=self.standby, preload=preload),
            metrics=metrics,
        )

    def ray_spec(self, job_id: str) -> ray_engine.JobSpec:
        """Returns what the job needs of a Ray cluster."""
        from holdfast.launch import ray as ray_engine

        return ray_engine.JobSpec(
            num_processes=self.num_processes,
            min_processes=self.min_processes,
            resources=self.resources or {"CPU": 1.0},
            num_slices=self.slices or 1,
            restart=self.restart_policy(),
            job_id=job_id,
            heartbeat_timeout_s=self.heartbeat_timeout_s,
            insecure=self.insecure,
        )

    def open_output(self, stack: contextlib.ExitStack) -> ConsoleOutput:
        """Returns what shows the processes' lines: with a live table, where that is wanted."""
        from holdfast.launch import LiveView
        from holdfast.launch.workers.output import ConsoleOutput

        view = self.view
        if view is None:
            view = sys.stdout.isatty() and not self.as_json
        if view:
            return stack.enter_context(LiveView(sys.stdout, sys.stderr, self.num_processes))
        lines = sys.stderr if self.as_json else sys.stdout
        console = ConsoleOutput(lines, sys.stderr, self.num_processes)
        return stack.enter_context(contextlib.closing(console))


def _run(chosen: RunOptions) -> JobResult:
    from holdfast.launch import ray as ray_engine
    from holdfast.launch import run_local

    raise_at_interrupts()
    command = _with_orbax(chosen.command) if chosen.orbax else chosen.command
    place = "local" if chosen.ray is None else "ray"
    job_id = chosen.job_id or f"{place}-{uuid.uuid4().hex[:12]}"
    with contextlib.ExitStack() as stack:
        output = chosen.open_output(stack)
        with contextlib.ExitStack() as pages:
            if chosen.web:
                pages.enter_context(_page(job_id, chosen.web_port))
            if chosen.ray is None:
                settings = chosen.local_settings(job_id)
                result = run_local(command, chosen.num_processes, settings, output=output)
            else:
                spec = chosen.ray_spec(job_id)
                answer = ray_engine.run_command(command, spec, output=output, address=chosen.ray)
                result = answer.job
        if chosen.log_dir is not None:
            _write_report(chosen.log_dir, output)
        return result
