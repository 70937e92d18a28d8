"""`holdfast status`: what a coordinator knows of its job, as a table that may stay live, or as JSON."""

from __future__ import annotations

import json
import time
from typing import Any

import click
import grpc
from google.protobuf.json_format import MessageToDict
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from holdfast.coordination import Credentials, HoldfastError
from holdfast.proto import coordination_pb2, session_pb2

_METHOD = "/holdfast.Coordination/GetStatus"
_STACKS = "/holdfast.Coordination/GetStacks"
_STACKS_TIMEOUT_S = 30.0  # the coordinator waits 20 s for a process
_FILE = click.Path(exists=True, dir_okay=False)
_COLOURS = {"CONNECTED": "green", "ERROR": "red", "DISCONNECTED": "yellow"}
_MISSING_SHOWN = 20


@click.command()
@click.argument("address")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--watch", is_flag=True, help="Stay and show changes, until interrupted.")
@click.option("--stacks", is_flag=True, help="Print where each thread of every process is, and what watchdogs have left.")
@click.option("--interval-s", type=click.FloatRange(0.1), default=1.0, show_default=True, help="Between two looks, with --watch.")
@click.option("--timeout-s", type=click.FloatRange(0.1), default=5.0, show_default=True, help="For one answer.")
@click.option("--token-file", type=_FILE, help="File with the token of a secured coordinator.")
@click.option("--tls-cert", type=_FILE, help="PEM certificate for a secured coordinator.")
@click.option("--tls-key", type=_FILE, help="PEM key of --tls-cert.")
@click.option("--tls-ca", type=_FILE, help="PEM certificate of the authority of the coordinator's certificate.")
def status(address: str, as_json: bool, watch: bool, stacks: bool, interval_s: float, timeout_s: float, **files: Any) -> None:
    """Shows the job that the coordinator at ADDRESS (host:port) serves: processes, barriers and who is missing, keys."""
    try:
        credentials = Credentials(**files)
        with credentials.channel(address, ()) as channel:
            asker = _Asker(channel, credentials, address, timeout_s)
            if stacks:
                asker.print_stacks()
            else:
                _show(asker, as_json, watch, interval_s)
    except (HoldfastError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        pass


class _Asker:
    """Asks one coordinator."""

    def __init__(self, channel: grpc.Channel, credentials: Credentials, address: str, timeout_s: float) -> None:
        self._method = channel.unary_unary(_METHOD, response_deserializer=session_pb2.StatusResponse.FromString)
        self._metadata, self._address, self._timeout_s, self._channel = credentials.metadata(), address, timeout_s, channel

    def __call__(self) -> session_pb2.StatusResponse:
        try:
            answer = self._method(b"", timeout=self._timeout_s, metadata=self._metadata, wait_for_ready=True)
        except grpc.RpcError as error:
            raise click.ClickException(f"{self._address}: {error.code().name}: {error.details()}") from None
        assert isinstance(answer, session_pb2.StatusResponse)
        return answer

    def print_stacks(self) -> None:
        """Prints the stacks of all processes, asked at once, in order."""
        ask = self._channel.unary_unary(
            _STACKS,
            request_serializer=session_pb2.StacksRequest.SerializeToString,
            response_deserializer=session_pb2.StacksResponse.FromString,
        )
        tasks = [task.task_id for task in self().tasks]
        asked = [ask.future(session_pb2.StacksRequest(task_id=n), timeout=_STACKS_TIMEOUT_S, metadata=self._metadata) for n in tasks]
        for number, answer in zip(tasks, asked, strict=True):
            try:
                text = answer.result().stacks.decode(errors="replace")
            except grpc.RpcError as error:
                text = f"{error.code().name}: {error.details()}"
            click.echo(f"--- process {number}\n{text.rstrip()}")


def _show(ask: _Asker, as_json: bool, watch: bool, interval_s: float) -> None:
    if as_json:
        while True:
            shown = MessageToDict(ask(), preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
            click.echo(json.dumps(shown, indent=None if watch else 2))
            if not watch:
                return
            time.sleep(interval_s)
    if not watch:
        Console().print(_tables(ask()))
        return
    with Live(_tables(ask()), refresh_per_second=4) as live:
        while True:
            time.sleep(interval_s)
            live.update(_tables(ask()))


def _tables(found: session_pb2.StatusResponse) -> Group:
    parts: list[str | Table] = [f"[bold]{_headline(found)}[/bold]", _processes(found)]
    if found.barriers:
        parts.append(_barriers(found))
    return Group(*parts)


def _headline(found: session_pb2.StatusResponse) -> str:
    job = f"job {found.job} attempt {found.attempt}, " if found.job else ""
    flags = [
        name for name, on in (("recoverable", found.recoverable), ("survivable", found.survivable), (found.journal, found.journal)) if on
    ]
    kept = f"{found.keys} keys, {found.key_bytes / 1024:.1f} KiB"
    passed = f"{found.barriers_passed} barriers passed, {found.barriers_failed} failed"
    return f"{job}{found.num_processes} processes, {found.phase}, up {found.up_s:.0f} s; {kept}; {passed}" + "".join(
        f"; {flag}" for flag in flags
    )


def _processes(found: session_pb2.StatusResponse) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("process", "state", "host", "pid", "last seen", "step", "saved", "waits", "error"):
        table.add_column(title, justify="right" if title in ("process", "pid", "last seen", "step", "saved", "waits") else "left")
    for task in found.tasks:
        state = coordination_pb2.TaskState.Name(task.state)
        seen = "never" if task.heartbeat_age_s < 0 else f"{task.heartbeat_age_s:.1f} s"
        step = str(task.progress.step) if task.progress.HasField("step") else ""
        saved = str(task.progress.saved_step) if task.progress.HasField("saved_step") else ""
        coloured = f"[{_COLOURS.get(state, 'white')}]{state}[/]"
        table.add_row(
            str(task.task_id), coloured, task.host, str(task.pid or ""), seen, step, saved, str(task.waiting_calls or ""), task.error
        )
    return table


def _barriers(found: session_pb2.StatusResponse) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("barrier", "waiting (for)", "missing", "time left"):
        table.add_column(title)
    for barrier in found.barriers:
        waiting = ", ".join(f"{each.task_id} ({each.since_s:.1f} s)" for each in barrier.waiting[:_MISSING_SHOWN])
        missing = ", ".join(map(str, barrier.missing[:_MISSING_SHOWN]))
        more = f" and {len(barrier.missing) - _MISSING_SHOWN} more" if len(barrier.missing) > _MISSING_SHOWN else ""
        left = "" if barrier.left_s < 0 else f"{barrier.left_s:.1f} s"
        table.add_row(barrier.barrier_id, waiting, f"[red]{missing}{more}[/]", left)
    return table
