"""`holdfast verify PATH`: is every byte what was written."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click
from rich.filesize import decimal

from holdfast.coordination.diagnosis.summary import counted

from .common import (
    EachStep,
    Failure,
    flag,
    folder_argument,
    json_option,
    local_option,
    print_json,
    progress_bar,
    refuse,
    say,
    sentences,
)

if TYPE_CHECKING:
    from holdfast.checkpoint.layouts.base import CheckpointReader

_MEASURABLE_S = 0.01


@click.command(
    epilog="""\b
Examples:
  holdfast verify /ckpt/run7               the latest step
  holdfast verify /ckpt/run7 --step 1000   one step
  holdfast verify gs://bucket/run7 --all   every step
  holdfast verify /ckpt/run7 --local /dev/shm/ckpt   this host's parts alone

Exit codes: 0 whole, 3 nothing there, 4 damaged, 5 could not be read."""
)
@folder_argument("path")
@click.option("--step", type=int, help="Verify this step of a root.")
@flag("--all", "every", help="Verify every step of a root.")
@local_option("alone")
@json_option
def verify(path: str, step: int | None, every: bool, local: str | None, as_json: bool) -> None:
    """Read every byte of the checkpoint in PATH (of a root of steps: the latest) and check it.

    holdfast's own checkpoints carry a checksum of every chunk. Orbax's and safetensors files do
    not: they are read and decoded whole.
    """
    if every:
        refuse({"--step": "names one step: leave --all out"})
    each = EachStep(several=every or local is not None)
    with sentences():
        if local is not None:
            reports = _verify_local(path, local, step, each)
        elif every:
            reports = _verify_all(path, each)
        else:
            outcomes = each.run([step], lambda step: _verify_one(path, step))
            reports = [_report(path, number, outcome) for number, outcome in outcomes]
    if as_json:
        print_json({"steps": reports})
    else:
        for report in reports:
            if "error" not in report:
                _print(report)
    each.end()


def _print(report: dict[str, Any]) -> None:
    if "gone" in report:
        say(f"{report['path']}: gone meanwhile")
        return
    rate = "at once"
    if report["seconds"] > _MEASURABLE_S:
        rate = f"{decimal(int(report['bytes'] / report['seconds']))}/s"
    leaves = f"{report['layout']}: {counted(report['leaves'], 'leaf', 'leaves')}"
    read = f"{decimal(report['bytes'])} read from {counted(report['files'], 'file')}, {rate}"
    say(f"{report['path']}: whole ({leaves}, {read})")
    if report["layout"] != "holdfast":
        say(
            "  this layout keeps no checksums of its arrays: they can be read, which is all"
            " that can be said",
            err=True,
        )


def _verify_all(path: str, each: EachStep) -> list[dict[str, Any]]:
    """Returns a report of each step of a root."""
    from .roots import Root

    root = Root(path)
    if not root.steps:
        raise root.nothing()

    def verify_step(step: int) -> dict[str, Any]:
        with progress_bar("verifying") as meter, root.opened(step, meter) as checkpoint:
            return _verify(checkpoint)

    outcomes = each.run(root.steps, verify_step)
    return [_report(str(root.folder(step)), step, outcome) for step, outcome in outcomes]


def _verify_local(path: str, local: str, step: int | None, each: EachStep) -> list[dict[str, Any]]:
    """Returns a report of each local step of which parts are in a host's folder."""
    from holdfast.checkpoint import StepNotFound
    from holdfast.checkpoint.local_tier.host_steps import (
        HostStep,
        list_host_steps,
        verify_host_step,
    )
    from holdfast.checkpoint.storage.path import open_storage

    root = open_storage(path)
    chosen = [found for found in list_host_steps(root, local) if step in (None, found.key.step)]
    if not chosen:
        what = "part of a local step" if step is None else f"part of a local step {step}"
        raise StepNotFound(f"{local} has no {what} of {path}", path=local)

    def verify_parts(host_step: HostStep) -> dict[str, Any]:
        began = time.perf_counter()
        files = verify_host_step(root, local, host_step)
        return {
            "layout": "holdfast",
            "files": files,
            "leaves": 0,
            "bytes": host_step.bytes,
            "seconds": _seconds_since(began),
        }

    return [
        _report(
            f"{local}: step {found.key.step} of branch {found.key.branch}", found.key.step, outcome
        )
        for found, outcome in each.run(chosen, verify_parts)
    ]


def _report(path: str, step: int | None, outcome: dict[str, Any] | Failure) -> dict[str, Any]:
    """Returns what is said of a step that was verified, or could not be."""
    report: dict[str, Any] = {"path": path, "step": step}
    if not isinstance(outcome, Failure):
        return report | outcome
    from holdfast.checkpoint import StepGone

    error = outcome.__cause__
    if isinstance(error, StepGone):
        return report | {"gone": outcome.message}
    file = getattr(error, "file", "")
    return report | {"error": outcome.message, "file": file, "leaf": getattr(error, "leaf", "")}


def _verify_one(path: str, step: int | None) -> dict[str, Any]:
    from .roots import open_measured

    with progress_bar("verifying") as meter:
        return _verify(open_measured(path, step, meter))


def _verify(checkpoint: CheckpointReader) -> dict[str, Any]:
    began = time.perf_counter()
    verified = checkpoint.verify()
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
