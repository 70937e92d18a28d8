"""One save, from its order to its end, and what it does in the caller's thread: it plans trees, and
takes snapshots of all items.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from holdfast.multihost import Group
from holdfast.multihost.group.group import SaveStage, runtime_indices
from holdfast.multihost.group.late import AwaitedSave
from holdfast.multihost.instruments import Phase

from ..agreement.save_protocol import SaveKey
from ..arrays.jax_settings import own_settings
from ..errors import SaveCancelled, SaveFailed, error_text, failure_of
from ..format.json_state import Json, is_tree, state_of
from ..format.leaf_types import encode_leaf_types
from ..format.limits import (
    check_item_name,
    check_items,
    check_metrics,
    check_step,
    copy_json,
    encode_json,
    is_step,
)
from ..format.own_files import Files, StagedFiles, stage_files
from ..format.tree import FlatTree, paused_gc
from ..policy import StepFacts
from ..steps.background import BackgroundWorker
from ..steps.claims import writer_of
from ..steps.lineage import Position
from ..steps.opening import OpenRoot
from ..steps.step_files import delete_files
from ..storage.base import Storage
from ..storage.path import join
from ..storage.retries import until
from .cast import SaveDtype, cast_tree, is_refused
from .incremental import SaveHistory, Unmoved, link_unmoved
from .item_files import ItemTarget
from .plan import Plan
from .planner import Planner, check_leaf
from .record_builder import FILE_BYTES, check_sizes
from .replicas import ReplicaSums, turn_of, view_replicas
from .snapshot import ArrayWaits, ShardViews, Snapshot, blamed, take_snapshot

# Saves take turns at this many names: a process that is late for one save never meets the others in
# the next.
MESSAGE_NAMES = 64


@dataclass(frozen=True)
class JsonValue:
    """An item that is JSON, encoded: one for all processes, or this process's own."""

    data: bytes
    per_process: bool


@dataclass(frozen=True)
class SaveOrder:
    """What a caller of `save` asks for. What is wrong with it is found when it is staged."""

    step: int
    state: Any = None
    items: Mapping[str, Any] | None = None
    metrics: Mapping[str, Any] | None = None
    metadata: Any = None
    dtype: SaveDtype = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        if is_step(self.step):  # an array of jax's, too: a train state has its step as one
            object.__setattr__(self, "step", check_step(self.step))

    def chosen_items(self) -> Mapping[str, Any]:
        """Returns the items by name. Raises ValueError unless state or items are given."""
        if (self.state is None) == (self.items is None):
            raise ValueError("save: give either a state or items")
        return {"state": self.state} if self.items is None else check_items("save", self.items)

    def arrays(self) -> list[jax.Array]:
        """Returns the arrays of jax that are to be saved; none where a tree cannot be flattened."""
        with contextlib.suppress(Exception):  # `stage` says what is wrong
            leaves = jax.tree_util.tree_leaves((self.state, self.items, self.metrics))
            return [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
        return []

    def named_arrays(self) -> Iterator[tuple[str, Any]]:
        """Yields the leaves of all trees with their paths, and the metrics."""
        for value in self.chosen_items().values():
            if is_tree(value) and not isinstance(value, Files):
                tree = FlatTree.of(value)
                yield from zip(tree.paths, tree.leaves, strict=True)
        for name, value in (self.metrics or {}).items():
            yield f"metrics[{name!r}]", value


class Cancellation:
    """Calls a save off, until `close`. Thread-safe: the first call decides."""

    def __init__(self) -> None:
        # No lock: an interrupt (Ctrl-C) between its two ends would leave it held. `setdefault` of a
        # dict is one step of the interpreter.
        self._first: dict[None, str] = {}

    def cancel(self) -> bool:
        """Calls the save off; returns whether that came in time.

        In time means that nothing of the save is or will be committed.
        """
        return self._first.setdefault(None, "cancelled") == "cancelled"

    def check(self, step: int, process: int) -> None:
        """Raises SaveCancelled where the save was called off."""
        if self._first.get(None) == "cancelled":
            raise SaveCancelled(
                f"step {step} was not saved: process {process} called it off; nothing of it stays",
                step=step,
                process=process,
            )

    def close(self, step: int, process: int) -> None:
        """Lets no later `cancel` come in time: from here on others may commit.

        Raises SaveCancelled where the save was called off.
        """
        self._first.setdefault(None, "closed")
        self.check(step, process)


@dataclass(kw_only=True, eq=False)
class OneSave:
    """One save as one process does it: where it goes, what it saves, and what of it is begun.

    `folder` is the step's in the store ("" for the root itself), and `place` where the step stands
    among the others. `trees`, `values` and `files` are the items, `replicas` the sums of those
    trees whose replicas are compared. `broken` says why this process cannot take part: the others
    learn it from its report. `begun` are the files that this process may have written by now, by
    names relative to the folder. `began` is by the monotonic clock. For one thread at a time: the
    caller's, which stages it, and then the one that does it.
    """

    root: OpenRoot
    key: SaveKey
    folder: str = ""
    overwrite: bool = False
    place: Position = field(default_factory=Position)
    trees: dict[str, Snapshot] = field(default_factory=dict)
    replicas: dict[str, ReplicaSums] = field(default_factory=dict)
    values: dict[str, JsonValue] = field(default_factory=dict)
    files: dict[str, StagedFiles] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    metadata: Any = None
    broken: Exception | None = None
    begun: list[str] = field(default_factory=list)
    may_miss: bool = False  # where the options allow it
    is_local: bool = False  # onto the hosts: no record is committed, and no launcher waits for it
    reports_step: bool = False  # to the launcher, once it is saved
    # for files that cannot be deleted yet; without it they are left to a sweep
    worker: BackgroundWorker | None = None
    started_s: float = 0.0  # Unix time, for the record
    began: float = 0.0  # what the save's time is counted from
    cancellation: Cancellation = field(default_factory=Cancellation)
    waits: ArrayWaits = field(default_factory=ArrayWaits)

    def __post_init__(self) -> None:
        self.begin()

    @property
    def step(self) -> int:
        return self.key.step

    @property
    def group(self) -> Group:
        return self.root.group

    @property
    def storage(self) -> Storage:
        """The store for what is written: its requests end with the save's time, where they can."""
        return until(self.root.storage, self.end_s)

    @property
    def claim(self) -> str:
        """The name of the writer's claim in the store."""
        return self.root.writer.claim

    @property
    def kind(self) -> str:
        """What other people's tools call a save like this."""
        return "local_save" if self.is_local else "save"

    def phase(self, name: str = "") -> Phase:
        """Surrounds the save, or what of it has a name, for other people's tools."""
        if name:
            return Phase(f"{self.kind}/{name}")
        save_id = self.key.save_id
        return Phase(
            self.kind,
            trace=save_id,
            began_s=self.began,
            save=save_id,
            step=self.step,
            process=self.group.index,
        )

    @property
    def messages(self) -> str:
        """What the names of the save's messages begin with."""
        lane = "/local" if self.is_local else ""
        return f"{self.root.messages}{lane}/{self.key.counter % MESSAGE_NAMES}"

    @property
    def where(self) -> str:
        """The step's folder, as messages show it."""
        return join(self.root.where, self.folder)

    @property
    def timeout_s(self) -> float:
        return self.root.options.save_timeout_s

    @property
    def end_s(self) -> float:
        """When the save's time ends, by the monotonic clock."""
        return self.began + self.timeout_s

    @property
    def remaining_s(self) -> float:
        """The seconds that remain of the save's time."""
        return max(0.0, self.end_s - time.monotonic())

    @property
    def awaited(self) -> AwaitedSave:
        """The save as the launcher, and those who wait, know it. A manager's call has a step."""
        call = f"save({self.step})" if self.folder else "save"
        return AwaitedSave(call, int(writer_of(self.key.save_id), 16), self.key.counter)

    @property
    def facts(self) -> StepFacts:
        """What the keep policy decides by."""
        return StepFacts(self.step, self.metrics, self.started_s, writer_of(self.key.save_id))

    @property
    def plans(self) -> dict[str, Plan]:
        """The plans of the trees, by item."""
        return {item: snapshot.plan for item, snapshot in self.trees.items()}

    @property
    def total_bytes(self) -> int:
        """The bytes that all processes write of the trees, and this one of files."""
        return sum(plan.total_bytes for plan in self.plans.values()) + self._files_bytes

    @property
    def own_bytes(self) -> int:
        """The bytes that this process writes of trees and files."""
        return sum(plan.own_bytes for plan in self.plans.values()) + self._files_bytes

    @property
    def _files_bytes(self) -> int:
        return sum(staged.nbytes for staged in self.files.values())

    def item(self, name: str) -> ItemTarget:
        """Returns where the files of an item go."""
        return ItemTarget(self.storage, self.folder, name, self.key.save_id, self.begun)

    def report(self, stage: SaveStage, **progress: int | str) -> None:
        """Reports to the launcher where this process's part stands: it waits for the end before it
        ends a process.
        """
        if not self.is_local:
            awaited = self.awaited
            self.group.report(
                save=awaited.number, save_stage=stage, save_writer=awaited.writer, **progress
            )

    def begin(self) -> None:
        """Begins its time, anew where it has waited for the save before."""
        self.started_s = self.root.clock.now_s()
        self.began = time.monotonic()

    def stand(self, place: Position, *, may_miss: bool) -> None:
        """Notes where its step stands, and whether its failure may be a miss."""
        self.place = place
        self.overwrite = place.replaces
        self.may_miss = may_miss

    def fail(self, error: Exception) -> None:
        """Notes why this process cannot take part."""
        self.broken = error

    def move(self, storage: Storage, folder: str) -> None:
        """Notes that it goes elsewhere: where a local save goes is known once it has begun."""
        self.root = replace(self.root, storage=storage)
        self.folder = folder

    def describe(self, order: SaveOrder) -> None:
        """Takes metadata, and metrics, for which it waits. Raises TypeError, ValueError."""
        self.metadata = copy_json(order.metadata, "the metadata")
        if isinstance(order.metrics, Mapping):
            for name, value in order.metrics.items():
                if is_refused(value):
                    check_leaf(f"metrics[{name!r}]", value)
                self.waits.wait(value)
        with own_settings():
            self.metrics = check_metrics(order.metrics)

    def close_cancelling(self) -> None:
        """Lets no later cancel come in time. Raises SaveCancelled where one did."""
        self.cancellation.close(self.step, self.group.index)

    def drop(self) -> None:
        """Lets go of all that it has taken and begun, and is empty then: it could not be staged."""
        self.release()
        if self.begun:
            with contextlib.suppress(OSError):  # what cannot be deleted is left to a sweep
                delete_files(self.storage, self.folder, self.begun)
        for begun in (self.begun, self.trees, self.replicas, self.values, self.files):
            begun.clear()

    def release(self) -> None:
        """Drops what the snapshots still hold, and removes scratch folders."""
        for snapshot in self.trees.values():
            snapshot.release()
        for staged in self.files.values():
            staged.release()


class SaveStager:
    """Plans and snapshots items; keeps a planner for each. For one thread at a time."""

    def __init__(self, root: OpenRoot, history: SaveHistory | None = None) -> None:
        self._root = root
        self._history = history
        self._planners: dict[str, Planner] = {}

    def stage(self, save: OneSave, order: SaveOrder, leaving: Collection[int] = ()) -> None:
        """Gives a save what the order says, its trees cast, planned and taken.

        Ranks that are `leaving` write little. Raises UnsupportedLeaf, SaveFailed, TypeError,
        ValueError: the save has nothing then.
        """
        try:
            for name, value in order.chosen_items().items():
                check_item_name(name)
                if isinstance(value, Files):
                    save.files[name] = self._stage_files(name, value)
                elif is_tree(value):
                    self._stage_tree(save, name, value, order.dtype, leaving)
                else:
                    save.values[name] = _stage_json(name, value)
            save.describe(order)
            check_sizes(save.trees, self._name_bytes(save), save.metadata)
        except BaseException as error:
            save.drop()
            if not isinstance(error, jax.errors.JaxRuntimeError):
                raise
            failed = blamed(order.named_arrays(), error)
            raise failure_of(failed, save.step, self._root.group.index) from error

    def _stage_tree(
        self, save: OneSave, name: str, value: Any, dtype: SaveDtype, leaving: Collection[int]
    ) -> None:
        tree = encode_leaf_types(FlatTree.of(value))
        for number, leaf in enumerate(tree.leaves):
            if is_refused(leaf):
                check_leaf(tree.paths[number], leaf)  # no cached plan knows of that
        with own_settings():
            with save.waits.dispatching(() if dtype is None else tree.leaves):
                cast = cast_tree(tree, dtype)
            plan = self._planner(name).plan(cast, leaving)
            with paused_gc():
                sums = self._view_replicas(save, plan, tree)
                views = sums.views if sums is not None and cast is tree else {}
                save.trees[name] = self._take_snapshot(save, name, plan, cast, views)
            # After the copies: where devices share the host's cores they would wait.
            if sums is not None and sums.dispatch(tree.leaves, save.waits):
                save.replicas[name] = sums

    def _take_snapshot(
        self, save: OneSave, item: str, plan: Plan, tree: FlatTree, views: ShardViews
    ) -> Snapshot:
        unmoved: Unmoved | None = None
        if self._history is not None:
            unmoved = link_unmoved(self._history, plan, tree.leaves, save.item(item))
        return take_snapshot(
            plan,
            tree,
            memory=self._root.memory,
            unmoved=unmoved,
            waits=save.waits,
            # A network would be idle meanwhile. A disk's own writes would slow the copies.
            copies_later=self._root.storage.posix is None,
            views=views,
        )

    def _name_bytes(self, save: OneSave) -> int:
        """Returns how many bytes of the record say where JSON and files are, about."""
        count = self._root.group.count
        nbytes = 0
        for value in save.values.values():
            nbytes += FILE_BYTES * (count if value.per_process else 1)
        for staged in save.files.values():
            own = sum(FILE_BYTES + len(json.dumps(name)) for name in staged.names)
            nbytes += own * (count if staged.per_process else 1)
        return nbytes

    def _view_replicas(self, save: OneSave, plan: Plan, tree: FlatTree) -> ReplicaSums | None:
        how = self._root.options.on_replicas_differ
        if how == "ignore":
            return None
        turn = turn_of(save.key.save_id, save.key.counter) if how == "warn" else None
        return view_replicas(plan, tree.leaves, turn, self._root.options.may_differ, save.waits)

    def _stage_files(self, item: str, value: Files) -> StagedFiles:
        process = self._root.group.index
        limit = self._root.storage.max_file_bytes
        writes = value.per_process or value.shared or process == 0
        try:
            return stage_files(value, writes=writes, max_file_bytes=limit)
        except Exception as error:
            raise SaveFailed(
                f"the item {item!r} was not written by its handler on process {process}:"
                f" {error_text(error)}",
                process=process,
            ) from error

    def _planner(self, item: str) -> Planner:
        if item not in self._planners:
            root = self._root
            self._planners[item] = Planner(
                root.group.index,
                root.group.count,
                processes=runtime_indices(root.group),
                max_file_bytes=root.storage.max_file_bytes,
                per_process=root.options.per_process,
            )
        return self._planners[item]


def _stage_json(item: str, value: Any) -> JsonValue:
    """Returns JSON, or the state of an iterator, as it is now."""
    if isinstance(value, Json):
        return JsonValue(encode_json(value.value, f"the item {item!r}"), value.per_process)
    data = encode_json(state_of(item, value), f"the state of the iterator {item!r}")
    return JsonValue(data, per_process=True)
