"""`holdfast verify PATH`: is every byte what was written."""

from __future__ import annotations

import time
from typing import Any

import click
from rich.filesize import decimal

from holdfast.coordination.diagnosis.summary import counted

from .common import (
    EXIT_DAMAGED,
    Failure,
    folder_argument,
    json_option,
    local_option,
    open_measured,
    print_json,
    progress_bar,
    sentences,
)

_MEASURABLE_S = 0.01


@click.command(
    epilog="""\b
Examples:
  holdfast verify /ckpt/run7               the latest step
  holdfast verify /ckpt/run7 --step 1000   one step
  holdfast verify gs://bucket/run7 --all   every step
  holdfast verify /ckpt/run7 --local /dev/shm/holdfast   this host's parts of local steps alone

Exit codes: 0 whole, 3 nothing there, 4 damaged, 5 could not be read."""
)
@folder_argument("path")
@click.option("--step", type=int, default=None, help="Verify this step of a root.")
@click.option("--all", "every", is_flag=True, help="Verify every step of a root.")
@local_option
@json_option
def verify(path: str, step: int | None, every: bool, local: str | None, as_json: bool) -> None:
    """Read every byte of the checkpoint in PATH (of a root of steps: the latest) and check it.

    holdfast's own checkpoints carry a checksum of every chunk. Orbax's and safetensors files do
    not: they are read and decoded whole.
    """
    with sentences():
        if local is not None:
            reports = _verify_local(path, local, step)
        elif every:
            reports = [_verify_one(path, number) for number in _steps(path)]
        else:
            reports = [_verify_one(path, step)]
    several = every or local is not None
    if as_json:
        print_json({"steps": reports})
    errors = [report["error"] for report in reports if "error" in report]
    if not as_json:
        for report in reports:
            if "error" not in report:
                _print_whole(report)
    if errors:
        if several:
            are = "is" if len(errors) == 1 else "are"
            errors.append(f"{len(errors)} of {counted(len(reports), 'step')} {are} damaged")
        raise Failure("\n".join(errors), EXIT_DAMAGED, printed=True)


def _print_whole(report: dict[str, Any]) -> None:
    rate = "at once"
    if report["seconds"] > _MEASURABLE_S:
        rate = f"{decimal(int(report['bytes'] / report['seconds']))}/s"
    leaves = f"{report['layout']}: {counted(report['leaves'], 'leaf', 'leaves')}"
    read = f"{decimal(report['bytes'])} read from {counted(report['files'], 'file')}, {rate}"
    click.echo(f"{report['path']}: whole ({leaves}, {read})")
    if report["layout"] != "holdfast":
        click.echo(
            "  this layout keeps no checksums of its arrays: they can be read, which is all"
            " that can be said",
            err=True,
        )


def _steps(path: str) -> list[int | None]:
    from holdfast.checkpoint import StepNotFound
    from holdfast.checkpoint.layouts.detect import find_steps, layout_of, nothing_at
    from holdfast.checkpoint.storage.path import StorePath, open_storage

    storage = open_storage(path)
    steps: list[int | None] = [*find_steps(storage)]
    if not steps:
        single = layout_of(StorePath(storage)) is not None
        hint = f"{storage.root} is a checkpoint, not a root of steps: leave --all out"
        raise StepNotFound(hint if single else nothing_at(storage), path=storage.root)
    return steps


def _verify_local(path: str, local: str, step: int | None) -> list[dict[str, Any]]:
    """Returns a report of each local step of which parts are in a host's folder."""
    from holdfast.checkpoint import StepNotFound
    from holdfast.checkpoint.local_tier.host_steps import list_host_steps
    from holdfast.checkpoint.storage.path import open_storage

    root = open_storage(path)
    reports = [
        _verify_host_step(root, local, host_step)
        for host_step in list_host_steps(root, local)
        if step in (None, host_step.key.step)
    ]
    if not reports:
        what = "part of a local step" if step is None else f"part of a local step {step}"
        raise StepNotFound(f"{local} has no {what} of {path}", path=local)
    return reports


def _verify_host_step(root: Any, local: str, host_step: Any) -> dict[str, Any]:
    from holdfast.checkpoint import Corrupt, HostileCheckpoint
    from holdfast.checkpoint.local_tier.host_steps import verify_host_step

    key = host_step.key
    began = time.perf_counter()
    report: dict[str, Any] = {
        "path": f"{local}: step {key.step} of branch {key.branch}",
        "step": key.step,
    }
    try:
        files = verify_host_step(root, local, host_step)
    except (Corrupt, HostileCheckpoint) as error:
        return report | {"error": str(error), "file": error.file, "leaf": ""}
    return report | {
        "layout": "holdfast",
        "files": files,
        "leaves": 0,
        "bytes": host_step.bytes,
        "seconds": _seconds_since(began),
    }


def _verify_one(path: str, step: int | None) -> dict[str, Any]:
    from holdfast.checkpoint import Corrupt, HostileCheckpoint
    from holdfast.checkpoint.layouts.base import total_bytes

    began = time.perf_counter()
    try:
        with progress_bar("verifying") as meter:
            checkpoint = open_measured(path, step, meter)
            meter.expect(total_bytes(checkpoint))
            verified = checkpoint.verify()
    except (Corrupt, HostileCheckpoint) as error:
        return {
            "path": path,
            "step": step,
            "error": str(error),
            "file": error.file,
            "leaf": getattr(error, "leaf", ""),
        }
    return {
        "path": verified.path,
        "step": checkpoint.info.step,
        "layout": checkpoint.info.layout,
        "files": verified.files,
        "leaves": verified.leaves,
        "bytes": verified.bytes,
        "seconds": _seconds_since(began),
    }


def _seconds_since(began: float) -> float:
    return round(time.perf_counter() - began, 3)
