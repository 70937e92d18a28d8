"""`holdfast run`: the processes of a job on this machine."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .common import (
    command_argument,
    flag,
    heartbeat_timeout_option,
    idle_standbys,
    job_id_option,
    json_at_end_option,
    launch_command,
    launching,
    min_processes_option,
    num_processes_option,
    orbax_option,
    print_json,
    refuse,
    restart_options,
    standby_options,
    take_policy,
    take_standby,
    with_orbax,
)

if TYPE_CHECKING:
    from holdfast.launch import RunSettings
    from holdfast.launch.workers.output import ConsoleOutput, Output

_PAGE_END_S = 5.0


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


def _refuse_ray(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        raise click.UsageError(
            "--ray is a command of its own: use `holdfast ray`, with --address where it is not auto"
        )


def without_effect(chosen: Mapping[str, Any]) -> dict[str, str]:
    """Returns the options that do nothing beside the others, and why."""
    idle: dict[str, str] = {}
    if not chosen["web"]:
        idle["--web-port"] = "is for the live page: add --web"
    if chosen["metrics_port"] is None:
        idle["--metrics-host"] = "is for Prometheus: add --metrics-port"
    if chosen["as_json"]:
        idle["--view"] = "is for people, --json for programs: leave one of them out"
    if chosen["capacity_file"] is None:
        idle["--min-processes"] = "is for jobs whose room changes: add --capacity-file FILE"
        if math.isinf(chosen["stall_timeout_s"]):
            idle["--startup-timeout-s"] = (
                "is the time to the first step: add --stall-timeout-s, which minds it"
            )
    return idle | idle_standbys(chosen)


@launch_command()
@num_processes_option
@min_processes_option
@click.option(
    "--capacity-file",
    type=click.Path(path_type=Path),
    help="Holds how many processes there is room for, read twice a second.",
)
@restart_options(0)
@heartbeat_timeout_option
@standby_options
@job_id_option
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="A rotated file for each process, and the coordinator's log.",
)
@click.option(
    "--compile-cache",
    metavar="DIR|off",
    help="Where jax keeps what it compiles.  [default: a folder of this host and user]",
)
@click.option(
    "--view/--no-view",
    default=None,
    help="A live table of the processes.  [default: on a terminal]",
)
@flag("--web", help="A live page of the job; its URL is printed. Needs the extra `web`.")
@click.option(
    "--web-port",
    type=click.IntRange(0, 65535),
    default=0,
    show_default=True,
    help="Port of --web; 0 takes a free one.",
)
@json_at_end_option
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    help="Port for Prometheus, through all attempts; 0 takes a free one.",
)
@click.option(
    "--metrics-host", default="127.0.0.1", show_default=True, help="Address to serve metrics at."
)
@orbax_option
@click.option("--ray", hidden=True, expose_value=False, callback=_refuse_ray)
@command_argument
def run(
    command: tuple[str, ...],
    num_processes: int,
    *,
    as_json: bool,
    orbax: bool,
    view: bool | None,
    web: bool,
    web_port: int,
    **options: Any,
) -> None:
    """Run COMMAND as N processes of one job, under a coordinator of their own.

    The first line on stderr names the coordinator's address; `holdfast status` finds it by
    itself on this machine.

    Ends with 0 when all are done, 75 when preempted (run it again; the last line says what is
    saved), 93 when a process said that a restart cannot help, 124 when it hangs, 130 after Ctrl-C,
    else with the code of the process that failed first (128 + the signal's number).

    \b
    holdfast run -n 4 -- python train.py
    holdfast run -n 4 --max-restarts 3 --max-preemptions 100 -- python train.py
    """
    refuse(without_effect(click.get_current_context().params))
    with launching():
        from holdfast.launch import run_local

        options["job_id"] = options["job_id"] or f"local-{uuid.uuid4().hex[:12]}"
        settings = _settings(options)
        page = _page(options["job_id"], web_port) if web else contextlib.nullcontext()
        with _output(num_processes, view=view, as_json=as_json) as output:
            with page:
                its = with_orbax(command) if orbax else command
                result = run_local(its, num_processes, settings, output=output)
            if settings.log_folder is not None:
                _write_report(settings.log_folder, output)
    if as_json:
        print_json(result.as_json())
    sys.exit(result.exit_code)


def _settings(options: dict[str, Any]) -> RunSettings:
    from holdfast.launch import MetricsSettings, RunSettings

    standby = take_standby(options)
    port = options.pop("metrics_port")
    host = options.pop("metrics_host")
    metrics = None if port is None else MetricsSettings(port=port, host=host)
    # The others bear the names of its fields.
    return RunSettings(restart=take_policy(options), standby=standby, metrics=metrics, **options)


def _output(
    num_processes: int, *, view: bool | None, as_json: bool
) -> AbstractContextManager[ConsoleOutput]:
    """Returns what shows the processes' lines: with a live table, where that is wanted."""
    from holdfast.launch import LiveView
    from holdfast.launch.workers.output import ConsoleOutput

    if view is None:
        view = sys.stdout.isatty() and not as_json
    if view:
        return LiveView(sys.stdout, sys.stderr, num_processes)
    lines = sys.stderr if as_json else sys.stdout
    return contextlib.closing(ConsoleOutput(lines, sys.stderr, num_processes))
