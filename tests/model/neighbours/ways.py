"""Every command, and every way to open a root: each looks at what a site says and may change only
what it is asked to.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner

from holdfast.checkpoint import (
    CheckpointManager,
    KeepLast,
    Options,
    SaveFailed,
    StepExists,
    StepNotFound,
    convert,
    iterate_steps,
    load,
    load_async,
    save,
    structure,
    verify,
    wait_for_new_step,
)
from holdfast.cli.entry import main
from holdfast.compat import orbax as ocp
from holdfast.compat.orbax import v1 as ocp1
from holdfast.multihost import Solo

from .roots import Site
from .strangers import STRANGE, tree_of

NOTHING = 3  # the exit code where nothing is there


class Wrong(AssertionError):
    """Says in which way an answer is not what the site has."""


@dataclass
class Changed:
    """What a way was asked to change: steps of ours that it deleted, and those that it saved.

    With `anything_new` it may have saved whatever it likes.
    """

    deleted: set[int] = field(default_factory=set)
    saved: set[int] = field(default_factory=set)
    anything_new: bool = False


def expect(what: str, found: object, expected: object) -> None:
    """Raises Wrong where two are not equal."""
    if found != expected:
        raise Wrong(f"{what}: {found!r}, expected {expected!r}")


def _value(tree: Any) -> float:
    (value,) = {float(each) for each in np.asarray(tree["w"])}
    return value


def _loaded(path: Path | str) -> float:
    """Returns the value of the newest step of a root, or of a checkpoint, whatever its tree is
    called.
    """
    items = structure(path).items
    return _value(load(path, item="state" if "state" in items else "default"))


def _run(*words: object, codes: Collection[int] = (0,)) -> tuple[int, str]:
    """Runs a command; Wrong for a traceback, or another exit code."""
    arguments = [str(word) for word in words]
    result = CliRunner().invoke(main, arguments)
    ended = result.exception is None or isinstance(result.exception, SystemExit)
    if not ended or "Traceback" in result.output:
        raise Wrong(f"{arguments}: {result.exception!r}\n{result.output}") from result.exception
    if result.exit_code not in codes:
        raise Wrong(f"{arguments}: exit code {result.exit_code}\n{result.output}")
    return result.exit_code, result.output


def _answer(*words: object) -> Any:
    return json.loads(_run(*words, "--json")[1])


def _means_latest(site: Site) -> bool:
    """Says whether the root itself means its newest step, as far as the site knows."""
    return bool(site.steps) and not (site.has_whole and not site.past.own)


# --- commands


def _ls(site: Site) -> None:
    rows = _answer("ls", site.root)["steps"]
    there = {row["step"] for row in rows if row["state"] in ("whole", "left behind")}
    expect("ls", there, {*site.steps})
    wrong = [row["name"] for row in rows if row["state"] in ("damaged", "gone")]
    expect("ls: damaged", wrong, [])


def _ls_for_people(site: Site) -> None:
    _run("ls", site.root)


def _show(site: Site) -> None:
    expect("show", _answer("show", site.root)["step"], site.latest)
    _run("show", site.root, "--stats", "--verify")


def _show_steps(site: Site) -> None:
    for step in site.steps:
        _run("show", site.root, f"--step={step}", "--unfold")


def _verify(site: Site) -> None:
    (one,) = _answer("verify", site.root)["steps"]
    expect("verify", one["step"], site.latest)
    every = _answer("verify", site.root, "--all")["steps"]
    expect("verify --all", [each["step"] for each in every], sorted(site.steps))


def _diff(site: Site) -> None:
    _run("diff", site.root, site.root)


def _convert(to: str) -> Callable[[Site], None]:
    def way(site: Site) -> None:
        _run("convert", site.root, site.out, f"--to={to}")
        if to != "safetensors":
            expect("convert", _loaded(site.out), site.steps[site.latest or 0])
        _run("convert", site.root, site.out / "all", f"--to={to}", "--all")

    return way


def _convert_into_itself(site: Site) -> Changed:
    """Converts the root's newest step into the root: it is there already."""
    _run("convert", site.root, site.root, "--to=holdfast", codes=(5,))
    return Changed()


def _cp(site: Site) -> None:
    _run("cp", site.root, site.out)
    expect("cp", {row["step"] for row in _answer("ls", site.out)["steps"]}, {*site.steps})
    copied = {path.name for path in site.out.iterdir()} - {".holdfast"}
    expect("cp: what is no step", len(copied), len(site.steps))


def _over_orbax(site: Site) -> None:
    """Saves, converts and copies a step of ours to where one of Orbax's is."""
    for step, name in site.past.orbax.items():
        made = site.out / str(step)
        save(made, tree_of(STRANGE), step=step)
        _run("convert", made, site.root, "--to=holdfast", codes=(5,))
        _run("cp", made, site.root / name, codes=(5,))
        over = functools.partial(save, site.root / name, tree_of(STRANGE), step=step)
        _refused(over, StepExists)


def _prune(site: Site) -> Changed:
    words = ("prune", site.root, "--keep=last:1")
    if not site.past.own:
        _run(*words, codes=(0, NOTHING))
        return Changed()
    told = _answer(*words, "--dry-run")
    expect("prune", _answer(*words)["deleted"], told["deleted"])
    return Changed(deleted=set(told["deleted"]))


def _sweep(site: Site) -> None:
    _run("sweep", site.root, codes=(0,) if site.steps else (0, NOTHING))


# --- holdfast's own ways


def _open(**options: Any) -> Callable[[Site], None]:
    def way(site: Site) -> None:
        with CheckpointManager(site.root, options=Options(**options)) as manager:
            expect("all_steps", manager.all_steps(), sorted(site.steps))
            expect("latest_step", manager.latest_step(), site.latest)
            if site.latest is not None:
                expect("restore", _value(manager.restore(None)), site.steps[site.latest])
            manager.reload()
            expect("reload", manager.all_steps(), sorted(site.steps))

    return way


def _restore_each(site: Site) -> None:
    with CheckpointManager(site.root) as manager:
        for step, value in site.steps.items():
            expect(f"restore({step})", _value(manager.restore(step, tree_of(0))), value)
            expect(f"structure({step})", manager.structure(step).step, step)
        for step in {2024, 500, 7} - site.steps.keys():
            _refused(functools.partial(manager.restore, step))


def _refused(call: Callable[[], object], error: type[Exception] = StepNotFound) -> None:
    try:
        call()
    except error:
        return
    raise Wrong(f"expected a {error.__name__}")


def _save(site: Site) -> Changed:
    step = max(site.steps, default=3) + 1
    with CheckpointManager(site.root) as manager:
        if not _saved(manager, step):
            return Changed()
        expect("all_steps", manager.all_steps(), sorted([*site.steps, step]))
    expect("load", _value(load(site.root)), float(step))
    return Changed(saved={step})


def _saved(manager: CheckpointManager, step: int) -> bool:
    """Saves a step; returns False where another library's checkpoint lies in its folder, or a file
    where one of its folders is to be.
    """
    try:
        manager.save(step, tree_of(step))
        manager.wait_until_finished()
    except StepExists:
        return False
    except SaveFailed as error:
        if "Not a directory" not in str(error):
            raise
        return False
    return True


def _save_and_keep_one(site: Site) -> Changed:
    """Saves with a keep policy: it deletes our older steps alone."""
    step = max(site.steps, default=3) + 1
    with CheckpointManager(site.root, keep_policy=KeepLast(1)) as manager:
        if not _saved(manager, step):
            return Changed()
        there = {*manager.all_steps()}
    own = {*site.steps} - {*site.past.orbax}
    deleted = {*site.steps} - there
    if deleted - own:
        raise Wrong(f"KeepLast(1) has deleted {deleted}")
    return Changed(saved={step}, deleted=deleted)


def _delete(site: Site) -> Changed:
    if not site.past.own:
        return Changed()
    with CheckpointManager(site.root) as manager:
        manager.delete(site.past.own[0])
        expect("all_steps", manager.all_steps(), sorted({*site.steps} - {site.past.own[0]}))
    return Changed(deleted={site.past.own[0]})


def _go_back(site: Site) -> Changed:
    """Restores the oldest step and saves the one after the next from there."""
    if len(site.past.own) < 2 or site.past.left:
        return Changed()
    with CheckpointManager(site.root) as manager:
        manager.restore(min(site.steps))
        step = min(site.steps) + 1
        if not _saved(manager, step):
            return Changed()
    expect("load after going back", _value(load(site.root)), float(step))
    return Changed(saved={step}, deleted={step} & {*site.past.own})


def _load(site: Site) -> None:
    if not _means_latest(site):
        return
    value = site.steps[site.latest or 0]
    expect("load", _value(load(site.root, tree_of(0))), value)
    expect("load(group)", _value(load(site.root, group=Solo())), value)
    expect("load_async", _value(load_async(site.root).result(60)), value)
    expect("structure", structure(site.root).step, site.latest)
    verify(site.root)
    expect("convert", _loaded(convert(site.root, site.out)), value)


def _load_each(site: Site) -> None:
    for step in site.past.own:
        folder = site.root / site.past.name_of(step)
        expect(f"load({step})", _value(load(folder)), site.steps[step])
        expect(f"structure(step={step})", structure(site.root, step).step, step)
        verify(folder)


def _watch(site: Site) -> None:
    """Waits for steps: those of ours."""
    own = {*site.past.own} - {*site.past.left}
    if not own:
        return
    newest = wait_for_new_step(site.root, timeout_s=20)
    expect("wait_for_new_step", newest in {*site.steps}, True)
    steps = iterate_steps(site.root, timeout_s=0.01, skip_to_newest=False)
    expect("iterate_steps", own <= {*steps}, True)


def _save_beside(site: Site) -> None:
    """Saves one checkpoint into a new folder of the root, under no step's name."""
    save(site.root / "by itself", tree_of(STRANGE))
    if _means_latest(site):
        expect("load", _value(load(site.root)), site.steps[site.latest or 0])


# --- Orbax's ways


def _orbax_manager(site: Site) -> Changed:
    if site.past.step_format != "{:d}":
        return Changed()
    options = ocp.CheckpointManagerOptions(cleanup_tmp_directories=True)
    with ocp.CheckpointManager(site.root, options=options) as manager:
        expect("Orbax's all_steps", sorted(manager.all_steps()), sorted(site.steps))
        if site.latest is not None:
            found = manager.restore(site.latest)
            tree = found if "w" in found else found.get("state", found.get("default"))
            expect("Orbax's restore", _value(tree), site.steps[site.latest])
        step = max(site.steps, default=3) + 1
        try:
            manager.save(step, args=ocp.args.StandardSave(tree_of(step)))
            manager.wait_until_finished()
        except (StepExists, ValueError):
            return Changed()
    return Changed(saved={step})


def _orbax_v1(site: Site) -> None:
    if site.past.step_format != "{:d}":
        return
    with ocp1.training.Checkpointer(site.root) as checkpointer:
        expect("v1's checkpoints", {each.step for each in checkpointer.checkpoints}, {*site.steps})
        if site.latest is not None:
            (tree,) = checkpointer.load_checkpointables(site.latest).values()
            expect("v1's load", _value(tree), site.steps[site.latest])
    for step in site.past.own:
        expect("v1's load of a step", _value(ocp1.load(site.root / str(step))), site.steps[step])


def _orbax_paths(site: Site) -> None:
    """Asks what is there; deletes what is no checkpoint."""
    names = ocp.path.step.standard_name_format()
    folders = [site.past.name_of(step) for step in site.past.own]
    plain = {int(name) for name in [*folders, *site.past.orbax.values()] if name.isdigit()}
    found = {each.step for each in names.find_all(site.root)}
    expect("find_all", plain - found, set())
    if site.past.own:
        expect("is_orbax_checkpoint", ocp1.is_orbax_checkpoint(site.root), False)
        expect("v1's delete", ocp1.delete(site.root, missing_ok=True), False)


WAYS: Mapping[str, Callable[[Site], Changed | None]] = {
    "ls": _ls,
    "ls for people": _ls_for_people,
    "show": _show,
    "show each step": _show_steps,
    "verify": _verify,
    "diff": _diff,
    "convert to holdfast": _convert("holdfast"),
    "convert to orbax": _convert("orbax"),
    "convert to safetensors": _convert("safetensors"),
    "convert into itself": _convert_into_itself,
    "cp": _cp,
    "over orbax": _over_orbax,
    "prune": _prune,
    "sweep": _sweep,
    "open": _open(),
    "open read-only": _open(read_only=True),
    "restore each": _restore_each,
    "save": _save,
    "save and keep one": _save_and_keep_one,
    "delete": _delete,
    "go back": _go_back,
    "load": _load,
    "load each": _load_each,
    "watch": _watch,
    "save beside": _save_beside,
    "orbax manager": _orbax_manager,
    "orbax v1": _orbax_v1,
    "orbax paths": _orbax_paths,
}
