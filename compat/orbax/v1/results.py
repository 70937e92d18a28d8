"""What v1's calls return: metadata, and responses of what runs in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

import jax

from holdfast.checkpoint import ItemStructure, SaveHandle, Structure
from holdfast.checkpoint.restoring.match import HostShapeDtypeStruct

from ..handling.items import orbax_errors, plain
from ..metadata import StorageMetadata, custom_metadata_of, nanoseconds, shard_shape_of
from ..own_handlers import to_path
from ..trees.shardings import ShardingMetadata, describe_sharding

T = TypeVar("T")


class AsyncResponse(Generic[T]):
    """The outcome of what runs in the background; `wait` blocks for it."""

    def __init__(self, wait: Callable[[float | None], None], value: T) -> None:
        self._wait = wait
        self._value = value

    @classmethod
    def done(cls, value: T) -> AsyncResponse[T]:
        """Returns the response of a call that has blocked for its value."""
        return cls(lambda timeout: None, value)

    @classmethod
    def of(cls, handle: SaveHandle, value: T) -> AsyncResponse[T]:
        """Returns the response of a save."""

        def wait(timeout_s: float | None) -> None:
            with orbax_errors():
                handle.wait(timeout_s)

        return cls(wait, value)

    def result(self, timeout: float | None = None) -> T:
        """Blocks until it is done and returns its value; raises its error."""
        self._wait(timeout)
        return self._value

    def on_complete(self, callback: Callable[[T], None]) -> None:
        """Calls `callback(value)` on a thread once it is done; not where it fails."""

        def complete() -> None:
            try:
                value = self.result()
            except Exception:
                return  # `result` raises it
            callback(value)

        threading.Thread(target=complete, daemon=True).start()


@dataclass(eq=False)
class CheckpointMetadata(Generic[T]):
    """What is known of a checkpoint: `metadata` of its trees. Times are Unix nanoseconds."""

    path: Any = None
    _: KW_ONLY
    metadata: T
    init_timestamp_nsecs: int | None = None
    commit_timestamp_nsecs: int | None = None
    custom_metadata: Any = None
    step: int | None = None
    metrics: Mapping[str, Any] | None = None

    @property
    def init_timestamp(self) -> datetime | None:
        """When its save began."""
        return _time(self.init_timestamp_nsecs)

    @property
    def commit_timestamp(self) -> datetime | None:
        """When it was committed."""
        return _time(self.commit_timestamp_nsecs)

    @property
    def time(self) -> datetime | None:
        """When it was committed."""
        return self.commit_timestamp


class StepMetadata(CheckpointMetadata[T]):
    """What is known of a step: `training.CheckpointMetadata`, whose first parameter is the step."""

    def __init__(self, step: int, path: Any = None, *, metadata: T, **known: Any) -> None:
        super().__init__(path, metadata=metadata, step=step, **known)


class ArrayMetadata(jax.ShapeDtypeStruct):
    """An array of jax's. Serves as a target."""

    @property
    def sharding_metadata(self) -> ShardingMetadata | None:
        """How it was sharded; None where that does not fit this job's devices."""
        return describe_sharding(self.sharding)

    @property
    def storage_metadata(self) -> StorageMetadata:
        """How it lies in the checkpoint."""
        shards = shard_shape_of(self)
        return StorageMetadata(chunk_shape=shards, write_shape=shards)


class NumpyMetadata(HostShapeDtypeStruct):
    """An array of numpy's. Serves as a target."""

    @property
    def storage_metadata(self) -> StorageMetadata:
        """How it lies in the checkpoint."""
        return StorageMetadata(chunk_shape=self.shape)


class RootMetadata:
    """What is known of a root: where it is."""

    def __init__(self, directory: Any, custom_metadata: Any = None) -> None:
        self.directory = directory
        self.custom_metadata = custom_metadata or {}


def _time(nanoseconds: int | None) -> datetime | None:
    return None if nanoseconds is None else datetime.fromtimestamp(nanoseconds / 1e9, UTC)


def describe(
    saved: Structure, metadata: Any, *, step: int | None = None
) -> CheckpointMetadata[Any]:
    """Returns what is known of a checkpoint, with the `metadata` of its items."""
    known = {
        "metadata": metadata,
        "init_timestamp_nsecs": nanoseconds(saved.started_s),
        "commit_timestamp_nsecs": nanoseconds(saved.finished_s),
        "custom_metadata": custom_metadata_of(saved),
        "metrics": dict(saved.metrics) or None,
    }
    if step is None:
        return CheckpointMetadata(to_path(saved.path), **known)
    return StepMetadata(step, to_path(saved.path), **known)


def tree_of(item: ItemStructure) -> Any:
    """Returns an item's tree of jax.ShapeDtypeStructs with `storage_metadata`, in dicts and lists.

    A number is the zero of its type there, a text is "string".
    """

    def described(leaf: Any) -> Any:
        if not hasattr(leaf, "shape"):
            return "string" if isinstance(leaf, str) else type(leaf)()
        kind = NumpyMetadata if isinstance(leaf, HostShapeDtypeStruct) else ArrayMetadata
        return kind(leaf.shape, leaf.dtype, sharding=leaf.sharding)

    return plain(jax.tree.map(described, item.tree))
