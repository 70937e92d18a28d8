"""Saves, loads and verifies one checkpoint without a manager, in the layout that managers use."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Literal

from holdfast.multihost import Group
from holdfast.multihost.group.group import given_or_default
from holdfast.multihost.instruments import Phase

from .agreement.exchange import ask_primary
from .agreement.host_sharing import find_sharers, launched_sharers
from .agreement.restore_verdict import RestoreAgreement, name_items, wanted_items
from .arrays.jax_settings import callers_settings
from .errors import UnsupportedLeaf, naming_path, naming_step
from .format.json_state import Json, is_iterator
from .format.limits import check_items
from .format.own_files import Files
from .format.rename import Names
from .layouts.base import CheckpointReader
from .layouts.detect import (
    find_checkpoint,
    is_single_file,
    open_checkpoint,
    open_found,
)
from .layouts.inspection import Structure, structure_of
from .layouts.restore import restore_items
from .memory.budget import ALONE, MemoryBudget
from .options import Options, absolute
from .restoring.match import spans_processes
from .restoring.per_process import PerProcessSelection
from .restoring.restore import RestoreOptions, VerifyReport
from .restoring.restore_peers import is_worth_sharing
from .restoring.sharing import Reading
from .restoring.surgery_rules import Rules
from .saving.async_saver import SaveHandle, is_interpreter_ending, refuse_after_end
from .saving.cast import SaveDtype
from .saving.stager import SaveOrder
from .single_save import SingleSave, save_as_orbax
from .step_restorer import restore_together
from .storage.path import StorePath, join, open_storage
from .storage.threads import do_beside
from .tools.convert import convert as convert_checkpoint


# More than eight parameters: they are the words of `CheckpointManager`, in one call.
def save(  # noqa: PLR0913
    path: str | os.PathLike[str],
    state: Any = None,
    *,
    item: str = "state",
    items: Mapping[str, Any] | None = None,
    step: int = 0,
    metadata: Any = None,
    dtype: SaveDtype = None,
    overwrite: bool = False,
    group: Group | None = None,
    timeout_s: float = 600.0,
    layout: Literal["holdfast", "orbax"] = "holdfast",
    per_process: Callable[[str], bool] | None = None,
    single_writer: bool = False,
) -> None:
    """Saves a tree as a checkpoint in the folder `path`, durably; blocks until it is there. Every
    process of the group calls it.

    It is the item `item`; `items` instead of a state names several, as in `CheckpointManager.save`,
    and `dtype` casts as there. `per_process` says which leaves each process keeps for itself, and
    `single_writer` promises that nobody else writes there (see Options).

    With `layout="orbax"` it is a checkpoint of Orbax's, which its v0 manager (as a step folder of a
    root) and its v1 functions restore. One state is the item "default" there. Several processes
    save in holdfast's layout first, and the primary converts that: it takes twice the room, and one
    process's time, so it is for handing over and not for training. The layout has no
    place for `step`, `overwrite` and `per_process`: they are a ValueError.

    Raises StepExists where one is there (unless `overwrite`), UnsupportedLeaf, SaveFailed naming
    the process that failed, CheckpointError for a folder that cannot be written; on every process
    alike. `group=None` is the job's processes, or this one alone. Where this process of a launched
    job has not joined it, and another writes to the folder, that is a CheckpointError too.
    """
    if layout not in ("holdfast", "orbax"):
        raise ValueError(f"save: layout={layout!r}: expected 'holdfast' or 'orbax'")
    path = absolute(path)
    refuse_after_end(f"step {step} of {path}")
    if layout == "orbax" and item == "state":
        item = "default"  # as Orbax calls the only one
    chosen = _chosen("save", state, item, items)
    order = SaveOrder(step, items=chosen, metadata=metadata, dtype=dtype, overwrite=overwrite)
    if layout == "orbax":
        _refuse_for_orbax(step, overwrite, per_process)
        _refuse_items_for_orbax(chosen)
        save_as_orbax(path, order, group, timeout_s)
        return
    options = Options(
        save_timeout_s=timeout_s, per_process=per_process, single_writer=single_writer
    )
    SingleSave.stage(path, group, order, options).save()


def save_async(path: str | os.PathLike[str], state: Any = None, **options: Any) -> SaveHandle:
    """Begins `save(path, state, ...)`; returns when the caller may donate or overwrite its arrays.

    Writing goes on in the background. `wait` of the handle blocks until the checkpoint is durable,
    and raises the error of a save that failed, which goes to the log too. An interpreter that exits
    waits for the save, at most 600 s. Raises what `save` raises before anything is written, and
    ValueError for another `layout`. In a group all processes begin their saves in one order.
    """
    path = absolute(path)
    given = inspect.signature(save).bind(path, state, **options)
    given.apply_defaults()
    words = given.arguments
    if words["layout"] != "holdfast":
        raise ValueError(
            f"save_async: layout={words['layout']!r} is written before the call returns; expected"
            " save(...)"
        )
    refuse_after_end(f"step {words['step']} of {path}")
    order = SaveOrder(
        words["step"],
        items=_chosen("save_async", state, words["item"], words["items"]),
        metadata=words["metadata"],
        dtype=words["dtype"],
        overwrite=words["overwrite"],
    )
    how = Options(
        save_timeout_s=words["timeout_s"],
        per_process=words["per_process"],
        single_writer=words["single_writer"],
    )
    handle = SingleSave.stage(path, words["group"], order, how).begin()
    if is_interpreter_ending():
        handle.wait()  # nobody may ask for the error
    return handle


def _chosen(call: str, state: Any, item: str, items: Mapping[str, Any] | None) -> dict[str, Any]:
    if (state is None) == (items is None):
        raise ValueError(f"{call}: give either a state or items")
    return {item: state} if items is None else check_items(call, items)


def _refuse_for_orbax(
    step: int, overwrite: bool, per_process: Callable[[str], bool] | None
) -> None:
    """Raises ValueError for what Orbax's layout cannot say or do."""
    refused = {
        "step": (step != 0, "its step is the name of its folder: expected a path that ends in it"),
        "overwrite": (
            overwrite,
            "it cannot be replaced in one step: expected a new folder, or delete the old one first",
        ),
        "per_process": (
            per_process is not None,
            "it keeps one copy of each leaf: expected a tree that is alike on all processes",
        ),
    }
    for name, (given, why) in refused.items():
        if given:
            raise ValueError(f"save: layout='orbax' does not take {name}=: {why}")


def _refuse_items_for_orbax(items: Mapping[str, Any]) -> None:
    """Raises UnsupportedLeaf for an item that Orbax's layout has no place for."""
    for name, value in items.items():
        is_own = isinstance(value, Json) and value.per_process
        if isinstance(value, Files) or is_own or is_iterator(value):
            raise UnsupportedLeaf(
                f"save: layout='orbax' does not take the item {name!r}, a {type(value).__name__}"
                " of each process or of files: it holds trees and Json; save it beside them",
                leaf=name,
                found=type(value).__name__,
            )


# More than eight parameters: they are the words of `CheckpointManager`, in one call.
def load(  # noqa: PLR0913
    path: str | os.PathLike[str],
    like: Any = None,
    *,
    item: str = "state",
    items: Mapping[str, Any] | None = None,
    partial: bool | Callable[[str], bool] = False,
    cast: bool = False,
    types: Sequence[type] = (),
    plain: bool = False,
    rename: Names = None,
    rules: Rules | None = None,
    read: Reading = "auto",
    host_memory_bytes: int | None = None,
    process: int | None = None,
    group: Group | None = None,
    timeout_s: float = 600.0,
) -> Any:
    """Restores one item of the checkpoint in the folder `path`, or of the latest step where it is a
    root of steps (the log says which).

    The checkpoint may be holdfast's, Orbax's, or a safetensors file or folder. The arguments mean
    what they mean for `CheckpointManager.restore`; with `items` a dict of several comes back.
    `rules` of surgery make other leaves of the stored ones while they are read: see `convert`.

    Without a `group` each process of a job may call it by itself, with shardings of its own devices
    or of all; of a root only with those of its own, since each takes the latest step that it sees.
    With a group every process calls it: all take the step that the primary finds, and end alike,
    waiting for each other for at most `timeout_s`. `read` says how a group reads what several of
    its processes need (see `CheckpointManager.restore`). Blocks.
    Raises StepNotFound, TreeMismatch, Corrupt, HostileCheckpoint, StepGone, CheckpointError where
    the store cannot be read, ValueError for a root and a `like` that spans processes without a
    group.
    """
    if group is not None:
        group = given_or_default(group)
    options = RestoreOptions(
        partial=partial,
        cast=cast,
        types=types,
        plain=plain,
        rename=rename,
        rules=rules,
        read=read,
        per_process=PerProcessSelection.of(process, group),
        memory=MemoryBudget(launched_sharers() or ALONE, host_memory_bytes),
    )
    wanted = wanted_items(item, like, items)
    with Phase("restore"):
        if group is not None:
            values = _load_alike(path, wanted, options, group, timeout_s)
        else:
            path = absolute(path)
            with naming_path(path), _named(_open_alone(path, wanted)) as checkpoint:
                values = restore_items(checkpoint, wanted, options)
    return values[item] if items is None else values


@contextlib.contextmanager
def _named(checkpoint: CheckpointReader) -> Iterator[CheckpointReader]:
    """Has a TreeMismatch say which checkpoint it is about."""
    info = checkpoint.info
    with naming_step(info.path, info.step, info.path):
        yield checkpoint


def load_async(path: str | os.PathLike[str], like: Any = None, **options: Any) -> Future[Any]:
    """Begins `load(path, like, ...)` on a thread of its own, under the caller's mesh, default
    device and x64 mode; returns at once the future of what it returns or raises. Thread-safe.

    An interpreter that exits does not wait for it. Raises ValueError for a `group`, whose processes
    load one after the other.
    """
    if options.get("group") is not None:
        raise ValueError(
            "load_async: group= expects all processes to load in one order, which threads do not"
            " keep; expected load(...)"
        )
    path = absolute(path)
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()

    settings = callers_settings()

    def run() -> None:
        try:
            with settings():
                future.set_result(load(path, like, **options))
        except BaseException as error:
            future.set_exception(error)

    do_beside(run)
    return future


def _open_alone(path: str | os.PathLike[str], wanted: Mapping[str, Any]) -> CheckpointReader:
    if any(map(spans_processes, wanted.values())) and not is_single_file(path):
        folder, _ = find_checkpoint(open_storage(path))
        if folder.name:
            raise ValueError(
                f"load: {os.fspath(path)} is a root of steps, and `like` spans processes: each"
                f" would take the latest step that it sees, here {folder}; pass"
                " group=holdfast.multihost.default_group(), or the folder of one step"
            )
    return open_checkpoint(path)


def _load_alike(
    path: str | os.PathLike[str],
    wanted: Mapping[str, Any],
    options: RestoreOptions,
    group: Group,
    timeout_s: float,
) -> dict[str, Any]:
    """Loads on all processes of a group what the primary finds; it ends alike on all."""
    # By the path as it was given: processes may have other current folders.
    name = f"checkpoint/load/{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}"
    path = absolute(path)

    def find() -> tuple[str, bool, bool]:
        with naming_path(path):
            asks = launched_sharers() is None
            if is_single_file(path):
                return "", asks, False
            storage = open_storage(path)
            return (
                find_checkpoint(storage)[0].name,
                asks,
                is_worth_sharing(options.read, storage, group),
            )

    def opened() -> contextlib.AbstractContextManager[CheckpointReader]:
        if is_single_file(path):
            return _named(open_checkpoint(path))
        return _named(open_found(StorePath(open_storage(path), folder)))

    folder, asks_hosts, shares = ask_primary(group, f"{name}/folder", find, timeout_s)
    sharers = find_sharers(group, f"{name}/hosts", timeout_s, asks=asks_hosts)
    what = f"{name_items(wanted)} of {join(path, folder)}"
    agreement = RestoreAgreement(group, name, what, timeout_s)
    options = replace(options, memory=replace(options.memory, sharers=sharers))
    values, verdict, _ = restore_together(
        agreement, opened, wanted, options, path=path, shares=shares
    )
    if verdict.error is not None:
        raise verdict.error
    assert values is not None
    return values


def convert(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str],
    layout: str = "holdfast",
    *,
    step: int | None = None,
    rules: Rules | None = None,
    **options: Any,
) -> str:
    """Writes the checkpoint in `path` anew in `target`, in the layout "holdfast", "orbax" or
    "safetensors"; returns where. Blocks.

    `path` is a checkpoint of any layout, or a root of steps (`step`; None: the latest). For
    holdfast and Orbax `target` is a root, which gets the step; for safetensors it is the folder of
    the files. `rules` make other leaves of the stored ones:

        {r"layers\\.(\\d+)\\.(.*)\\.weight": [Transpose(), Stack(r"layers.\\2.kernel")]}

    The left side is a regular expression that matches whole names, as safetensors has them: keys
    with dots between. The right side is one rule, or several in order: Transpose, Cast, Reshape and
    Repeat for each leaf, one of Rename (a text stands for it), Stack, Unstack, Fuse, Split and
    Drop, and again Transpose and so on for each result. Add has a name on its left. Leaves that no
    rule touches stay. A sequence of mappings is applied one after the other. Where a name changes,
    the tree becomes nested dicts by the dots in the names.

    Arrays pass through memory in pieces, of which the largest is a leaf (of a stacked one: a
    layer). `options` are `items` (names; none: all), `under` (a path: the leaves below it),
    `rename` as in `load`, `process` (whose copies of what was kept per process), and for
    safetensors `shards` (how many files there will be; None: as many as there were) or
    `shard_bytes` (how large each is at most). Config, tokenizer and what else lies beside
    safetensors is an item of files, "files", which lies beside them again. A checkpoint of a
    trainer has none: `beside` is the folder of a model whose files lie beside the tensors then.

    Raises StepExists, UnsupportedLeaf for what the layout cannot hold, TreeMismatch for rules that
    match no leaf or the same leaf twice, ValueError for what are no rules, and what `load` raises.
    What was begun is removed then.
    """
    path = absolute(path)
    target = absolute(target)
    with naming_path(path), _named(open_checkpoint(path, step)) as checkpoint:
        return convert_checkpoint(
            checkpoint, StorePath(open_storage(target)), layout, rules=rules, **options
        )


def verify(path: str | os.PathLike[str]) -> VerifyReport:
    """Reads every byte of the checkpoint in `path` (of a root: its latest step) and checks it;
    raises as `load` does.
    """
    path = absolute(path)
    with naming_path(path):
        return open_checkpoint(path).verify()


def structure(path: str | os.PathLike[str], step: int | None = None) -> Structure:
    """Returns what the checkpoint in `path` holds (of a root: the step `step`, None: the latest),
    without reading an array; blocks.

    `load(path, structure(path).items["state"].tree)` restores as saved, where the devices allow it.
    Raises as `load` does.
    """
    path = absolute(path)
    with naming_path(path):
        return structure_of(open_checkpoint(path, step))
