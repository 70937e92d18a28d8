"""What the commands share: options, exit codes, errors as sentences, JSON, progress bars."""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import json
import math
import shlex
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from holdfast.coordination import HoldfastError
from holdfast.coordination.diagnosis.summary import counted, printable
from holdfast.coordination.limits import Limits, NumberRange

from .interrupts import EXIT_INTERRUPTED, raise_at_interrupts

if TYPE_CHECKING:
    from holdfast.launch import RestartPolicy, StandbySettings

EXIT_DIFFERENT = 1  # `diff` has found differences
EXIT_USAGE = 2  # the command line is wrong, as click has it
EXIT_NOTHING = 3  # there is no such checkpoint, step or item
EXIT_DAMAGED = 4  # bytes are not what was written
EXIT_FAILED = 5  # anything else: refused, not permitted, no space

_OF_ONE_FILE = {errno.EACCES, errno.EIO, errno.EISDIR, errno.EPERM}
# How a refusal names the promise of a program: a command has an option for it.
SINGLE_WRITER = "Options(single_writer=True); `save` takes single_writer=True itself"
JSON_VERSION = 1
"""Of what --json prints; it rises when a name goes or means something else, not with a new one."""
S = TypeVar("S")
T = TypeVar("T")
_Command = TypeVar("_Command", bound=Callable[..., Any])
SHOW_AFTER_S = 1.0
GROUPS = {
    "Launching": (
        "num_processes min_processes capacity_file num_slices address resources job_id host"
        " spares insecure compile_cache orbax"
    ),
    "Restarting": (
        "max_failures max_preemptions grace_s commit_grace_s preemption_grace_s stall_timeout_s"
        " startup_timeout_s heartbeat_timeout_s standby preload requeue"
    ),
    "Watching": ("straggler_steps view web web_port log_dir as_json metrics_port metrics_host"),
}
"""The parameters of what starts jobs, by the group in which their help stands."""


class _LaunchCommand(click.Command):
    """A command that starts a job, whose help has its options in groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        group_of = {name: title for title, names in GROUPS.items() for name in names.split()}
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in (*GROUPS, "Options")}
        for each in self.get_params(ctx):
            record = each.get_help_record(ctx)
            if record is not None and isinstance(each, click.Option):
                sections[group_of.get(str(each.name), "Options")].append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


launch_command = functools.partial(
    click.command, cls=_LaunchCommand, context_settings={"allow_interspersed_args": False}
)


def several_options(*options: Callable[[_Command], _Command]) -> Callable[[_Command], _Command]:
    """Adds several options, in this order."""

    def add(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def _complete(kind: str) -> Callable[..., list[CompletionItem]]:
    """Returns what has the shell complete an argument: by its own "file" or "dir"."""
    return lambda context, parameter, incomplete: [CompletionItem(incomplete, type=kind)]


def _check_command(
    context: click.Context, parameter: click.Parameter, command: tuple[str, ...]
) -> tuple[str, ...]:
    """Returns a command; a script that is none is a usage error, which says how to run it."""
    if command and command[0].endswith(".py") and shutil.which(command[0]) is None:
        raise click.UsageError(
            f"{command[0]} is a script, and no command that can be run: write python"
            f" {shlex.join(command)}"
        )
    return command


command_argument = click.argument(
    "command",
    nargs=-1,
    required=True,
    type=click.UNPROCESSED,
    callback=_check_command,
    shell_complete=_complete("file"),
)
flag = functools.partial(click.option, is_flag=True)
json_option = flag("--json", "as_json", help="Print JSON instead of a table.")


def _seconds_option(
    name: str, default: float, help: str, *, least: float = 0
) -> Callable[[_Command], _Command]:
    return click.option(
        name,
        type=NumberRange(least),
        default=default,
        show_default=True,
        metavar="SECONDS",
        help=help,
    )


grace_s_option = _seconds_option(
    "--grace-s", 5.0, "From SIGTERM to SIGKILL for what is left after a failure."
)
commit_grace_s_option = _seconds_option(
    "--commit-grace-s", 600.0, "To end a save that a failure did not spoil."
)
heartbeat_timeout_option = _seconds_option(
    "--heartbeat-timeout-s", 60.0, "Silence after which a host is lost.", least=0.1
)
insecure_option = flag(
    "--insecure",
    help="No token and certificates: whoever reaches the coordinator's port can disturb the job.",
)
# Of a job that a launcher starts: the parameters bear the names of the fields of its settings.
num_processes_option = click.option(
    "-n",
    "--num-processes",
    type=click.IntRange(1, Limits().tasks),
    required=True,
    help="How many processes.",
)
slices_option = click.option(
    "--slices",
    "num_slices",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="TPU slices of equal size.",
)
min_processes_option = click.option(
    "--min-processes",
    type=click.IntRange(1),
    help="Go on with that many where there is no room for more.  [default: -n]",
)
job_id_option = click.option(
    "--job-id", help="Of this job, the same in each run of it.  [default: a new one]"
)
orbax_option = flag(
    "--orbax",
    help="COMMAND is python and a script, which gets holdfast where it imports orbax.checkpoint.",
)
json_at_end_option = flag(
    "--json",
    "as_json",
    help="At the end print how it ended as JSON on stdout; the processes' lines go to stderr.",
)
single_writer_option = flag(
    "--single-writer",
    help="Promise that nobody else writes there: for stores that cannot make a commit safe.",
)


def _pairs(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, str]:
    for value in values:
        if "=" not in value:
            raise click.BadParameter(f"{value!r}: expected NAME=VALUE")
    return dict(value.split("=", 1) for value in values)


def pairs_option(*names: str, help: str) -> Callable[[_Command], _Command]:
    """Adds an option that may be given several times, for a dict of its names and values."""
    return click.option(*names, multiple=True, callback=_pairs, metavar="NAME=VALUE", help=help)


def folder_argument(name: str) -> Callable[[_Command], _Command]:
    """Adds a path, which the shell completes by its folders."""
    return click.argument(name, shell_complete=_complete("dir"))


def local_option(what: str) -> Callable[[_Command], _Command]:
    """Adds a host's folder, whose steps are taken "too", or "alone"."""
    return click.option(
        "--local",
        metavar="FOLDER",
        shell_complete=_complete("dir"),
        help=f"The folder of the local tier on this host, for its steps {what}.",
    )


def restart_options(
    max_failures: int,
    max_preemptions: int | None = None,
    *,
    preemptions: str = "Restarts after a preemption.  [default: as --max-restarts]",
    startup: str = "For room for all processes; with --stall-timeout-s, to the first step.",
) -> Callable[[_Command], _Command]:
    """Adds the options that bear the names of the fields of RestartPolicy."""
    options = (
        click.option(
            "--max-restarts",
            "max_failures",
            type=click.IntRange(0),
            default=max_failures,
            show_default=True,
            help="Restarts after a death; progress refills them.",
        ),
        click.option(
            "--max-preemptions",
            type=click.IntRange(0),
            default=max_preemptions,
            show_default=max_preemptions is not None,
            help=preemptions,
        ),
        grace_s_option,
        commit_grace_s_option,
        _seconds_option("--preemption-grace-s", 120.0, "To save and leave after a notice."),
        click.option(
            "--stall-timeout-s",
            type=NumberRange(0, min_open=True),
            default=math.inf,
            metavar="SECONDS",
            help=(
                "Without a step of all, or of one that is behind, the job hangs: it is said who and"
                " where, and restarted.  [default: never]"
            ),
        ),
        click.option(
            "--straggler-steps",
            type=NumberRange(1),
            default=math.inf,
            metavar="STEPS",
            help="Say who is so many steps behind the median, and where.  [default: never]",
        ),
        _seconds_option("--startup-timeout-s", 600.0, startup),
    )
    return several_options(*options)


def take_policy(options: dict[str, Any]) -> RestartPolicy:
    """Takes the fields of RestartPolicy out of `options`."""
    from holdfast.launch import RestartPolicy

    names = {each.name for each in fields(RestartPolicy)}
    chosen = {name: options.pop(name) for name in names & options.keys()}
    if chosen["max_preemptions"] is None:
        chosen["max_preemptions"] = chosen["max_failures"]
    return RestartPolicy(**chosen)


standby_options = several_options(
    click.option(
        "--standby/--no-standby",
        default=None,
        help=(
            "Interpreters that wait to become the next attempt, jax imported.  [default: where"
            " restarts are allowed]"
        ),
    ),
    click.option(
        "--preload",
        default="",
        metavar="MODULES",
        help="What standbys import besides jax, holdfast and a script's first imports: flax",
    ),
)


def idle_standbys(chosen: Mapping[str, Any]) -> dict[str, str]:
    """Returns the options of standbys that do nothing beside the others, and why."""
    if not (chosen["max_failures"] or chosen["max_preemptions"] or chosen["min_processes"]):
        return {
            "--standby": "is for the next attempt: add --max-restarts",
            "--preload": "is for standbys, of the next attempt: add --max-restarts",
        }
    if chosen["standby"] is False:
        return {"--preload": "is for standbys: leave --no-standby out"}
    return {}


def take_standby(options: dict[str, Any]) -> StandbySettings:
    """Takes what `standby_options` has added out of `options`."""
    from holdfast.launch import StandbySettings

    names = [name.strip() for name in options.pop("preload").split(",")]
    return StandbySettings(wanted=options.pop("standby"), preload=list(filter(None, names)))


@contextlib.contextmanager
def launching() -> Iterator[None]:
    """Turns what a launcher raises into a usage error, or a sentence."""
    importlib.import_module("holdfast.launch")  # interrupted there, it would be lost
    raise_at_interrupts()
    try:
        yield
    except (ValueError, ImportError) as error:
        raise click.UsageError(str(error)) from error
    except OSError as error:
        raise failure_of(error) from error


def with_orbax(command: tuple[str, ...]) -> tuple[str, ...]:
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


def refuse(idle: Mapping[str, str]) -> None:
    """Raises click.UsageError for an option that was typed and does nothing; `idle` says why."""
    context = click.get_current_context()
    for parameter in context.command.params:
        assert parameter.name is not None
        if context.get_parameter_source(parameter.name) is not ParameterSource.COMMANDLINE:
            continue
        is_off = parameter.secondary_opts and not context.params.get(parameter.name)
        option = (parameter.secondary_opts if is_off else parameter.opts)[-1]
        if option in idle:
            raise click.UsageError(f"{option} {idle[option]}")


class Failure(click.ClickException):
    """Ends a command with a sentence on stderr and an exit code.

    With --json it also prints {"error", "exit_code"} on stdout, unless `printed` says that the
    command has printed its JSON already.
    """

    def __init__(self, message: str, code: int = EXIT_FAILED, *, printed: bool = False) -> None:
        super().__init__(printable(message, lines=True))
        self.exit_code: int = code  # type: ignore[misc]
        self._prints_json = wants_json() and not printed
        self.indent = None if _has("watch") else 2  # a line among those of --watch

    def show(self, file: IO[Any] | None = None) -> None:
        """Prints the sentence."""
        if self._prints_json:
            print_json({"error": self.message, "exit_code": self.exit_code}, self.indent)
        super().show(file)
        if self.exit_code == EXIT_DAMAGED:
            say(
                "What is damaged cannot be mended: take another step (`holdfast ls` lists them), or"
                " a copy of this one.",
                err=True,
            )


def wants_json() -> bool:
    """Returns whether the command that runs was given --json."""
    return _has("as_json")


def _has(parameter: str) -> bool:
    context = click.get_current_context(silent=True)
    return bool(context and context.params.get(parameter))


@contextlib.contextmanager
def sentences() -> Iterator[None]:
    """Turns errors into sentences and exit codes: no traceback reaches a user.

    Ctrl-C is 130, as of a shell.
    """
    from holdfast.checkpoint import Corrupt, HostileCheckpoint, StepGone, StepNotFound

    try:
        yield
    except (StepNotFound, StepGone) as error:
        raise Failure(str(error), EXIT_NOTHING) from error
    except (Corrupt, HostileCheckpoint) as error:
        raise Failure(str(error), EXIT_DAMAGED) from error
    except (HoldfastError, ValueError) as error:
        text = str(error).replace(SINGLE_WRITER, "--single-writer")
        raise Failure(text) from error
    except KeyboardInterrupt:
        raise Failure("interrupted", EXIT_INTERRUPTED) from None
    except OSError as error:
        raise failure_of(error) from error


class EachStep:
    """Takes one step, or several of a root, whose job may go on meanwhile.

    One that is damaged, or that is deleted before it is done, does not stop the others, nor does
    one of which a file cannot be read. Any other error does, Ctrl-C too, and hides nothing of what
    was done before.
    """

    def __init__(self, *, several: bool) -> None:
        self._several = several
        self._gone: list[str] = []
        self._failures: list[Failure] = []
        self._left = 0  # steps that were not begun
        self.done = 0

    def run(self, steps: Iterable[S], work: Callable[[S], T]) -> list[tuple[S, T | Failure]]:
        """Does `work` on each; returns what each returned, or how it failed. Raises Failure where
        that is not damage, and nothing was done before.
        """
        from holdfast.checkpoint import StepGone

        outcomes: list[tuple[S, T | Failure]] = []
        steps = list(steps)
        for step in steps:
            try:
                with sentences():
                    done = work(step)
            except Failure as failure:
                is_gone = self._several and isinstance(failure.__cause__, StepGone)
                is_its_own = failure.exit_code == EXIT_DAMAGED or (
                    self._several and _is_of_one_file(failure)
                )
                if not (is_its_own or is_gone or outcomes):
                    raise
                outcomes.append((step, failure))
                if is_gone:
                    self._gone.append(failure.message)
                    continue
                self._failures.append(failure)
                if not is_its_own:
                    self._left = len(steps) - len(outcomes)
                    break
            else:
                self.done += 1
                outcomes.append((step, done))
        return outcomes

    @property
    def errors(self) -> list[str]:
        """What is damaged or cannot be read, and what has ended the command."""
        return [failure.message for failure in self._failures]

    def end(self) -> None:
        """Says which steps went; raises Failure for what is damaged or cannot be read, for what has
        ended the command, and where all steps went. The command has printed its JSON.
        """
        for message in self._gone:
            say(message, err=True)
        lines = self.errors
        codes = [failure.exit_code for failure in self._failures]
        damaged = codes.count(EXIT_DAMAGED)
        if damaged and self._several:
            count = counted(self.done + len(lines), "step")
            lines.append(f"{damaged} of {count} {'is' if damaged == 1 else 'are'} damaged")
        if self._left:
            lines.append(f"{counted(self._left, 'step')} after that: not looked at")
        if codes:
            raise Failure("\n".join(lines), max(codes), printed=True)
        if self._gone and not self.done:
            raise Failure("no step is left", EXIT_NOTHING, printed=True)


def _is_of_one_file(error: BaseException | None) -> bool:
    """Returns whether an error is what the system says of one file, and not of all."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _OF_ONE_FILE:
            return True
        error = error.__cause__
    return False


def failure_of(error: OSError) -> Failure:
    """Returns what the system refused, and where, as a sentence."""
    where = f"{error.filename}: " if error.filename else ""
    return Failure(f"{where}{error.strerror or error}")


def say(text: str, *, err: bool = False) -> None:
    """Prints text, which may hold names that others chose: none steers the terminal."""
    click.echo(printable(text, lines=True), err=err)


def print_json(value: Mapping[str, Any], indent: int | None = 2) -> None:
    """Prints one JSON object on stdout; `version` says which shape of docs/cli.md it has."""
    click.echo(dump_json({"version": JSON_VERSION, **value}, indent=indent))


def dump_json(value: Any, *, indent: int | None = None) -> str:
    """Returns JSON. What it has no number for is text, as in a record: "nan", "inf", "-inf"."""
    plain = json.loads(
        json.dumps(value, default=str), parse_constant=lambda name: repr(float(name))
    )
    return json.dumps(plain, indent=indent)


class Meter:
    """Counts bytes for a progress bar, from any thread; `expect` says that more will come."""

    def __init__(self, bar: Progress, what: str) -> None:
        self._bar = bar
        self._task = bar.add_task(what, total=None)
        self._expected_bytes = 0

    def __call__(self, done_bytes: int) -> None:
        """Moves the bar."""
        self._bar.advance(self._task, done_bytes)

    def expect(self, more_bytes: int) -> None:
        """Makes the bar full at so many bytes more."""
        self._expected_bytes += more_bytes
        self._bar.update(self._task, total=self._expected_bytes)


@contextlib.contextmanager
def progress_bar(what: str, *, counts: bool = True) -> Iterator[Meter]:
    """Shows a bar on stderr once the block has lasted a second.

    It does so on a terminal only, and not with --json. Without `counts` nothing is measured: the
    bar only shows that something is going on.
    """
    columns: tuple[ProgressColumn, ...] = (TimeElapsedColumn(),)
    if counts:
        columns = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *columns,
        console=Console(stderr=True),
        transient=True,
    )
    timer = threading.Timer(SHOW_AFTER_S, bar.start)
    timer.daemon = True
    if bar.console.is_terminal and not wants_json():
        timer.start()
    try:
        yield Meter(bar, what)
    finally:
        timer.cancel()
        if timer.ident is not None:
            timer.join()
        if bar.live.is_started:
            bar.stop()


def shown_time(seconds: float | None) -> str:
    """Returns a time as people read it, in their own zone."""
    import datetime

    if not seconds:
        return ""
    return datetime.datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")
