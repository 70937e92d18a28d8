"""`orbax.checkpoint.v1.options`, and the Context that carries them.

What only tunes how bytes lie or travel has no effect here.
"""

from __future__ import annotations

import contextvars
import copy
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

from ..options import AsyncOptions as AsyncOptions
from ..options import FileOptions as FileOptionsV0
from ..options import MultiprocessingOptions as MultiprocessingOptions
from ..options import Settable
from ..refusals import check_options, refuse
from .registry import global_registry


@dataclass
class FileOptions(FileOptionsV0):
    """How files are made. `path_class` has no effect: paths are texts, pathlib's or etils's."""

    path_class: Any = None


class CheckpointLayout(enum.Enum):
    """Layouts. What is read is told apart by what is there; what is written is holdfast's."""

    ORBAX = "orbax"
    SAFETENSORS = "safetensors"
    AUTO = "auto"


class AtomicityMode(enum.Enum):
    """How Orbax commits. It has no effect."""

    AUTO = "auto"
    COMMIT_FILE = "commit_file"
    ATOMIC_RENAME = "atomic_rename"


class _Tuning(Settable):
    """Options by name, which are Orbax's with Orbax's defaults: the attributes of the class.

    A default that is a class is made anew for each. Raises TypeError for other names.
    """

    def __init__(self, **options: Any) -> None:
        cls = type(self)
        names = [name for name in dir(cls) if name.islower() and not hasattr(Settable, name)]
        check_options(cls.__qualname__, options, " ".join(names))
        for name in names:
            default = getattr(cls, name)
            usual = default() if isinstance(default, type) else default
            setattr(self, name, options.get(name, usual))


class AtomicityOptions(_Tuning):
    """How Orbax commits."""

    mode = AtomicityMode.AUTO
    allow_legacy_atomic_rename = False


class MemoryOptions(_Tuning):
    """How much memory is used (see holdfast.checkpoint.Options.host_memory_bytes)."""

    class RegulatorOptions(_Tuning):
        """How Orbax changes its limits while it runs."""

        max_memory_limit_gib = None
        profiler = None
        target_ratio = 0.8
        min_memory_limit_gib = 10.0
        kp = 0.4
        ki = 0.05
        kd = 0.1

    write_concurrent_bytes = None
    read_concurrent_bytes = None
    transfer_concurrent_bytes = None
    regulator_options = None
    expected_surge_bytes = None
    is_prioritized_key_fn = None
    serialization_status_callback = None
    deepcopy_host_arrays = True


class SafetensorsOptions(_Tuning):
    """How safetensors are read."""

    max_over_read_ratio = None
    read_chunk_bytes = None


class CheckpointablesOptions(_Tuning):
    """How items that are no trees are handled: by the handlers of `registry` (None: of all)."""

    registry = None


class DeletionOptions(_Tuning):
    """How steps are deleted: of no effect, since deletions are done when they return."""

    class GcsDeletionOptions(_Tuning):
        """Where deleted steps lie in a bucket: refused where a step would be deleted."""

        todelete_full_path = None

    gcs_deletion_options = GcsDeletionOptions


class PathwaysOptions(_Tuning):
    """How Pathways saves: of no effect, since a save needs nothing more there."""

    checkpointing_impl = None


class _PyTreeMetadataOptions(_Tuning):
    """How much of a tree's types Orbax writes down: holdfast's record has all of them."""

    support_rich_types = False


class PyTreeOptions(_Tuning):
    """How trees are loaded: `partial_load` leaves out saved leaves that the target lacks."""

    class Saving(_Tuning):
        """How bytes lie in files: of no effect."""

        pytree_metadata_options = _PyTreeMetadataOptions

    class Loading(_Tuning):
        """What is loaded."""

        partial_load = False

    saving = Saving
    loading = Loading


class ArrayOptions(_Tuning):
    """How arrays are saved and loaded."""

    class Saving(_Tuning):
        """`storage_options` of all leaves, and of each: `scoped_storage_options_creator`.

        How bytes lie in files has no effect.
        """

        class StorageOptions(_Tuning):
            """How arrays are saved: cast to `dtype`. Chunks have no effect."""

            dtype = None
            chunk_byte_size = None
            shard_axes = None

        class ScopedStorageOptionsCreator(Protocol):
            """Makes storage options for a leaf: for annotations."""

            def __call__(self, keypath: Any, value: Any) -> Any:
                """Returns the options of a leaf."""

        storage_options = StorageOptions
        use_ocdbt = True
        use_zarr3 = True
        use_compression = True
        ocdbt_target_data_file_size = None
        enable_pinned_host_transfer = None
        enable_post_merge_validation = True
        use_replica_parallel = None
        min_slice_bytes_for_replica_parallel = None
        max_replicas_for_replica_parallel = None
        enable_replica_parallel_separate_folder = False
        enable_write_sharding_file = True
        array_metadata_store = None
        scoped_storage_options_creator = None

    class Loading(_Tuning):
        """How arrays come back: with `enable_padding_and_truncation` in the target's shape."""

        class LoadAndBroadcastOptions(_Tuning):
            """Who reads what is replicated: each host, once."""

            replica_axis_index = 0
            primary_replica_id = 0
            broadcast_memory_limit_bytes = None
            broadcast_memory_scaling_factor = 0.75

        enable_padding_and_truncation = False
        raise_array_data_missing_error = True
        use_load_and_broadcast = False
        load_and_broadcast_options = LoadAndBroadcastOptions

    saving = Saving
    loading = Loading


_current: contextvars.ContextVar[Context | None] = contextvars.ContextVar("context", default=None)


def _own_copy(value: Any) -> Any:
    """Returns options that may be set on without a change of these. What they hold is the caller's:
    a handler with a lock can neither be copied, nor would a copy be the handler.
    """
    if isinstance(value, dict):
        return {name: _own_copy(each) for name, each in value.items()}
    if not isinstance(value, Settable):
        return value
    own = copy.copy(value)
    vars(own).update(_own_copy(vars(value)))
    vars(own).pop("_active", None)
    return own


def _add_active(options: Mapping[str, Any], blocks: int) -> None:
    """Notes with options, and those inside of them, that their context is entered or left."""
    for value in options.values():
        if isinstance(value, Settable):
            value.add_active(blocks)
            _add_active(vars(value), blocks)


class Context:
    """Options that hold inside `with Context(...):`, and for the objects that are given it.

    Those of another context may be inherited.
    """

    def __init__(self, context: Context | None = None, **options: Any) -> None:
        inherited = {} if context is None else _own_copy(context.options)
        check_options("Context", options, " ".join(_defaults()))
        given = {name: value for name, value in options.items() if value is not None}
        self.options: dict[str, Any] = _defaults() | inherited | given
        self._tokens: list[Any] = []

    @property
    def timeout_s(self) -> float:
        """How long a save may take, in seconds."""
        # Asked by each save: options of a context may be set after it was made.
        refuse(
            "v1.Context(file_options=...)",
            "set the umask, or use CheckpointManager",
            path_permission_mode=self.options["file_options"].path_permission_mode,
        )
        return float(self.options["async_options"].timeout_secs)

    @property
    def registry(self) -> Any:
        """The registry of handlers that holds here."""
        return self.options["checkpointables_options"].registry or global_registry()

    @property
    def fits_shapes(self) -> bool:
        """Whether arrays of other shapes than the target's are cut or padded."""
        return bool(self.options["array_options"].loading.enable_padding_and_truncation)

    @property
    def partial_load(self) -> bool:
        """Whether saved leaves that the target lacks are left out."""
        return bool(self.options["pytree_options"].loading.partial_load)

    def __setattr__(self, name: str, value: Any) -> None:
        known = self._known(name)
        if known is None:
            super().__setattr__(name, value)
            return
        if self._tokens:
            raise RuntimeError(
                f"Context.{name} is set inside of its own `with`; expected before it: options hold"
                " for the whole block"
            )
        self.options[known] = value

    def _known(self, name: str) -> str | None:
        """Returns the long name of a kind of options, None for other names."""
        options = self.__dict__.get("options", {})
        long = f"{_SHORT.get(name, name)}_options"
        return next((known for known in (name, long) if known in options), None)

    def __getattr__(self, name: str) -> Any:
        options = self.__dict__.get("options", {})
        known = self._known(name)
        if known is not None:
            return options[known]
        raise AttributeError(f"a v1.Context has no {name!r}; expected one of {sorted(options)}")

    def __dir__(self) -> list[str]:
        short = {long: name for name, long in _SHORT.items()}
        kinds = [name.removesuffix("_options") for name in self.options]
        return [*super().__dir__(), *self.options, *(short.get(kind, kind) for kind in kinds)]

    def __enter__(self) -> Self:
        self._tokens.append(_current.set(self))
        _add_active(self.options, 1)
        return self

    def __exit__(self, *error: Any) -> None:
        _add_active(self.options, -1)
        _current.reset(self._tokens.pop())


_SHORT = {"asynchronous": "async"}  # the short names that are not the long ones' beginnings


def _defaults() -> dict[str, Any]:
    """Returns what a context has where nothing else is given."""
    return {
        "pytree_options": PyTreeOptions(),
        "array_options": ArrayOptions(),
        "async_options": AsyncOptions(),
        "multiprocessing_options": MultiprocessingOptions(),
        "file_options": FileOptions(),
        "checkpoint_layout": CheckpointLayout.ORBAX,
        "memory_options": MemoryOptions(),
        "safetensors_options": SafetensorsOptions(),
        "atomicity_options": AtomicityOptions(),
        "checkpointables_options": CheckpointablesOptions(),
        "deletion_options": DeletionOptions(),
        "pathways_options": PathwaysOptions(),
    }


def current(context: Context | None = None) -> Context:
    """Returns the context that holds: the given one, that of the `with` block, or a plain one."""
    return context or _current.get() or Context()
