"""What a save does in the caller's thread: it plans trees, and takes snapshots of all items."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from holdfast.multihost import Group

from ..agreement.save_protocol import SaveKey
from ..arrays.jax_settings import own_settings
from ..errors import SaveFailed, error_text, failure_of
from ..format.json_state import Json, is_tree, state_of
from ..format.leaf_types import encode_leaf_types
from ..format.limits import check_item_name, check_metrics, copy_json, encode_json
from ..format.own_files import Files, StagedFiles, stage_files
from ..format.tree import FlatTree, paused_gc
from ..memory.budget import ALONE, MemoryBudget, Sharers
from ..options import Options
from ..policy import StepFacts
from ..steps.claims import writer_of
from ..steps.lineage import Position
from ..storage.base import Storage
from ..storage.steady_time import steady_time_s
from .cast import SaveDtype, cast_tree
from .commit import Cancellation
from .incremental import SaveHistory, Unmoved, link_unmoved, unlink
from .item_files import ItemTarget
from .plan import Plan
from .planner import Planner, refuse_deleted
from .record_builder import FILE_BYTES, check_sizes
from .replicas import ReplicaSums, turn_of, view_replicas
from .snapshot import ArrayWaits, ShardViews, Snapshot, blamed, take_snapshot


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

    def chosen_items(self) -> Mapping[str, Any]:
        """Returns the items by name. Raises ValueError unless state or items are given."""
        if (self.state is None) == (self.items is None):
            raise ValueError("save: give either a state or items")
        return {"state": self.state} if self.items is None else self.items

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


@dataclass(frozen=True)
class SaveRequest:
    """What one process saves as a step, into `folder` ("": the root itself).

    `save_id` is the writer's id and `counter`, which is the same on all processes; `place` says
    where its step stands among the others. `trees`,
    `values` and `files` are the items, `replicas` the sums of those trees whose replicas are
    compared. `broken` says why this process cannot take part: the others
    learn it from its report.
    """

    counter: int
    step: int
    save_id: str
    overwrite: bool = False
    folder: str = ""
    place: Position = field(default_factory=Position)
    trees: Mapping[str, tuple[Plan, Snapshot]] = field(default_factory=dict)
    replicas: Mapping[str, ReplicaSums] = field(default_factory=dict)
    values: Mapping[str, JsonValue] = field(default_factory=dict)
    files: Mapping[str, StagedFiles] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    metadata: Any = None
    broken: Exception | None = None
    started_s: float = field(default_factory=steady_time_s)  # Unix time, for the record
    began: float = field(default_factory=time.monotonic)  # what the save's time is counted from
    cancellation: Cancellation = field(default_factory=Cancellation)
    may_miss: bool = True  # where the options allow it
    waits: ArrayWaits = field(default_factory=ArrayWaits)

    @property
    def key(self) -> SaveKey:
        """What every message of the save carries."""
        return SaveKey(self.save_id, self.counter, self.step)

    @property
    def facts(self) -> StepFacts:
        """What the keep policy decides by."""
        return StepFacts(self.step, self.metrics, self.started_s, writer_of(self.save_id))

    @property
    def total_bytes(self) -> int:
        """The bytes that all processes write of the trees, and this one of files."""
        return sum(plan.total_bytes for plan, _ in self.trees.values()) + self._files_bytes

    @property
    def own_bytes(self) -> int:
        """The bytes that this process writes of trees and files."""
        return sum(plan.own_bytes for plan, _ in self.trees.values()) + self._files_bytes

    @property
    def _files_bytes(self) -> int:
        return sum(staged.nbytes for staged in self.files.values())

    def release(self) -> None:
        """Drops what the snapshots still hold, and removes scratch folders."""
        for _, snapshot in self.trees.values():
            snapshot.release()
        for staged in self.files.values():
            staged.release()


class SaveStager:
    """Plans and snapshots items; keeps a planner for each. For one thread at a time."""

    def __init__(
        self,
        storage: Storage,
        group: Group,
        options: Options,
        history: SaveHistory | None = None,
        *,
        sharers: Sharers = ALONE,
    ) -> None:
        self._memory = MemoryBudget(sharers, options.host_memory_bytes)
        self._history = history
        self._storage = storage
        self._group = group
        self._options = options
        self._planners: dict[str, Planner] = {}

    def stage(
        self, request: SaveRequest, order: SaveOrder, leaving: Collection[int] = ()
    ) -> SaveRequest:
        """Returns the request with what the order says, its trees cast, planned and taken.

        Ranks that are `leaving` write little. Raises UnsupportedLeaf, SaveFailed, TypeError,
        ValueError, holding nothing then.
        """
        trees: dict[str, tuple[Plan, Snapshot]] = {}
        replicas: dict[str, ReplicaSums] = {}
        values: dict[str, JsonValue] = {}
        files: dict[str, StagedFiles] = {}
        staged = replace(
            request,
            trees=trees,
            replicas=replicas,
            values=values,
            files=files,
            metadata=copy_json(order.metadata, "the metadata"),
        )
        try:
            for name, value in order.chosen_items().items():
                check_item_name(name)
                if isinstance(value, Files):
                    files[name] = self._stage_files(name, value)
                elif is_tree(value):
                    tree = encode_leaf_types(FlatTree.of(value))
                    for path, leaf in zip(tree.paths, tree.leaves, strict=True):
                        refuse_deleted(path, leaf)
                    with own_settings():
                        with request.waits.dispatching(() if order.dtype is None else tree.leaves):
                            cast = cast_tree(tree, order.dtype)
                        plan = self._planner(name).plan(cast, leaving)
                        with paused_gc():
                            sums = self._view_replicas(request, plan, tree)
                            views = sums.views if sums is not None and cast is tree else {}
                            snapshot = self._take_snapshot(request, name, plan, cast, views)
                        trees[name] = plan, snapshot
                        # After the copies: where devices share the host's cores they would wait.
                        if sums is not None and sums.dispatch(tree.leaves, request.waits):
                            replicas[name] = sums
                else:
                    values[name] = _stage_json(name, value)
            check_sizes(
                {name: (plan, snapshot.values) for name, (plan, snapshot) in trees.items()},
                self._name_bytes(values.values(), files.values()),
                staged.metadata,
            )
            if isinstance(order.metrics, Mapping):
                for value in order.metrics.values():
                    request.waits.wait(value)
            with own_settings():
                metrics = check_metrics(order.metrics)
            return replace(staged, metrics=metrics)
        except BaseException as error:
            staged.release()
            for name, (plan, snapshot) in trees.items():
                unlink(snapshot.unmoved, plan, self._place(request, name))
            if not isinstance(error, jax.errors.JaxRuntimeError):
                raise
            failed = blamed(order.named_arrays(), error)
            raise failure_of(failed, request.step, self._group.index) from error

    def _take_snapshot(
        self, request: SaveRequest, item: str, plan: Plan, tree: FlatTree, views: ShardViews
    ) -> Snapshot:
        place = self._place(request, item)
        unmoved: Unmoved | None = None
        if self._history is not None:
            unmoved = link_unmoved(self._history, plan, tree.leaves, place)
        try:
            return take_snapshot(
                plan,
                tree,
                memory=self._memory,
                unmoved=unmoved,
                waits=request.waits,
                # A network would be idle meanwhile. A disk's own writes would slow the copies.
                copies_later=self._storage.posix is None,
                views=views,
            )
        except BaseException:
            if unmoved is not None:
                unlink(unmoved, plan, place)
            raise

    def _name_bytes(self, values: Iterable[JsonValue], files: Iterable[StagedFiles]) -> int:
        """Returns how many bytes of the record say where JSON and files are, about."""
        count = self._group.count
        nbytes = sum(FILE_BYTES * (count if value.per_process else 1) for value in values)
        for staged in files:
            own = sum(FILE_BYTES + len(json.dumps(name)) for name in staged.names)
            nbytes += own * (count if staged.per_process else 1)
        return nbytes

    def _view_replicas(
        self, request: SaveRequest, plan: Plan, tree: FlatTree
    ) -> ReplicaSums | None:
        turn: int | None = None
        match self._options.on_replicas_differ:
            case "ignore":
                return None
            case "warn":
                turn = turn_of(request.save_id, request.counter)
        return view_replicas(plan, tree.leaves, turn, self._options.may_differ, request.waits)

    def _stage_files(self, item: str, value: Files) -> StagedFiles:
        writes = value.per_process or value.shared or self._group.index == 0
        try:
            return stage_files(value, writes=writes, max_file_bytes=self._storage.max_file_bytes)
        except Exception as error:
            message = (
                f"the item {item!r} was not written by its handler on process {self._group.index}:"
                f" {error_text(error)}"
            )
            raise SaveFailed(message, process=self._group.index) from error

    def _place(self, request: SaveRequest, item: str) -> ItemTarget:
        return ItemTarget(self._storage, request.folder, item, request.save_id)

    def _planner(self, item: str) -> Planner:
        if item not in self._planners:
            limit = self._storage.max_file_bytes
            per_process = self._options.per_process
            self._planners[item] = Planner.of_group(
                self._group, max_file_bytes=limit, per_process=per_process
            )
        return self._planners[item]


def _stage_json(item: str, value: Any) -> JsonValue:
    """Returns JSON, or the state of an iterator, as it is now."""
    if isinstance(value, Json):
        return JsonValue(encode_json(value.value, f"the item {item!r}"), value.per_process)
    data = encode_json(state_of(item, value), f"the state of the iterator {item!r}")
    return JsonValue(data, per_process=True)
