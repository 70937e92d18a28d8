"""`orbax.checkpoint.v1.options`, and the Context that carries them.

What only tunes how bytes lie or travel has no effect here.
"""

from __future__ import annotations

import contextvars
import enum
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, ClassVar, Self

from ..options import AsyncOptions as AsyncOptions
from ..options import FileOptions as FileOptions
from ..options import MultiprocessingOptions as MultiprocessingOptions
from ..refusals import refuse


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


class _Tuning:
    """Options without effect: any are taken."""

    def __init__(self, **options: Any) -> None:
        vars(self).update(options)


class AtomicityOptions(_Tuning):
    """How Orbax commits."""


class MemoryOptions(_Tuning):
    """How much memory is used (see holdfast.checkpoint.Options.host_memory_bytes)."""


class SafetensorsOptions(_Tuning):
    """How safetensors are read."""


@dataclass(kw_only=True)
class PyTreeOptions:
    """How trees are loaded: `partial_load` leaves out saved leaves that the target lacks."""

    class Saving(_Tuning):
        """Of no effect."""

    @dataclass(kw_only=True)
    class Loading:
        """What is loaded."""

        partial_load: bool = False

    saving: Any = None
    loading: Loading = field(default_factory=Loading)


@dataclass(kw_only=True)
class ArrayOptions:
    """How arrays are saved and loaded. What would change their values is refused."""

    class Saving(_Tuning):
        """How bytes lie in files: of no effect."""

        def __init__(
            self,
            *,
            storage_options: Any = None,
            scoped_storage_options_creator: Any = None,
            **options: Any,
        ) -> None:
            nearest = "cast the tree before saving it"
            refuse(
                "ArrayOptions.Saving",
                nearest,
                scoped_storage_options_creator=scoped_storage_options_creator,
            )
            refuse(
                "ArrayOptions.Saving(storage_options=...)",
                nearest,
                dtype=getattr(storage_options, "dtype", None),
            )
            super().__init__(storage_options=storage_options, **options)

    class StorageOptions(_Tuning):
        """Chunks and dtypes in files."""

        dtype: ClassVar[Any] = None

    class Loading(_Tuning):
        """How arrays come back."""

        def __init__(self, *, enable_padding_and_truncation: bool = False, **options: Any) -> None:
            refuse(
                "ArrayOptions.Loading",
                "load the saved shapes and slice them",
                enable_padding_and_truncation=enable_padding_and_truncation,
            )
            super().__init__(**options)

    saving: Any = None
    loading: Any = None


_current: contextvars.ContextVar[Context | None] = contextvars.ContextVar("context", default=None)


class Context:
    """Options that hold inside `with Context(...):`, and for the objects that are given it.

    Those of another context may be inherited.
    """

    def __init__(self, context: Context | None = None, **options: Any) -> None:
        inherited = {} if context is None else context.options
        unknown = {name: value for name, value in options.items() if name not in _KNOWN}
        refuse("v1.Context", "see holdfast.checkpoint.Options, or leave it out", **unknown)
        mode = getattr(options.get("file_options"), "path_permission_mode", None)
        refuse(
            "v1.Context(file_options=...)",
            "set the umask, or use CheckpointManager",
            path_permission_mode=mode,
        )
        given = {name: value for name, value in options.items() if value is not None}
        self.options: dict[str, Any] = inherited | given
        self._tokens: list[Any] = []

    @property
    def timeout_s(self) -> float:
        """How long a save may take, in seconds."""
        return float(self.options.get("async_options", AsyncOptions()).timeout_secs)

    @property
    def partial_load(self) -> bool:
        """Whether saved leaves that the target lacks are left out."""
        return bool(self.options.get("pytree_options", PyTreeOptions()).loading.partial_load)

    def __enter__(self) -> Self:
        self._tokens.append(_current.set(self))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _current.reset(self._tokens.pop())


_KNOWN = {
    "pytree_options",
    "array_options",
    "async_options",
    "multiprocessing_options",
    "file_options",
    "checkpoint_layout",
    "memory_options",
    "safetensors_options",
    "atomicity_options",
}


def current(context: Context | None = None) -> Context:
    """Returns the context that holds: the given one, that of the `with` block, or a plain one."""
    return context or _current.get() or Context()
