"""`orbax.checkpoint.args`: what to save or restore of each item, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from holdfast.checkpoint.arrays.jax_settings import cast_array

from .refusals import OWN_HANDLER, not_covered, refusing


class CheckpointArgs:
    """The base of all arguments."""


@dataclass(frozen=True)
class SaveArgs:
    """How one leaf is saved. `dtype` casts.

    The other fields have no effect: how bytes lie in files is holdfast's own affair.
    """

    aggregate: bool = False
    dtype: Any = None
    chunk_byte_size: int | None = None
    shard_axes: tuple[int, ...] = ()


@dataclass
class RestoreArgs:
    """As what one leaf is restored.

    `restore_type` is np.ndarray, jax.Array, int, ...; None: as saved.
    """

    restore_type: Any = None
    dtype: Any = None


@dataclass
class ArrayRestoreArgs(RestoreArgs):
    """Restores a jax.Array with a sharding.

    Another shape than the saved one is refused: nothing is padded or cut.
    """

    mesh: Any = None
    mesh_axes: Any = None
    sharding: Any = None
    global_shape: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None
    strict: bool = True

    def __post_init__(self) -> None:
        import jax

        self.restore_type = self.restore_type or jax.Array
        if self.sharding is None and self.mesh is not None:
            self.sharding = jax.sharding.NamedSharding(self.mesh, self.mesh_axes)


@dataclass
class StandardSave(CheckpointArgs):
    """Saves a tree."""

    item: Any
    save_args: Any = None
    custom_metadata: Any = None


@dataclass
class PyTreeSave(CheckpointArgs):
    """Saves a tree."""

    item: Any
    save_args: Any = None
    ocdbt_target_data_file_size: int | None = None
    custom_metadata: Any = None


@dataclass
class StandardRestore(CheckpointArgs):
    """Restores a tree like `item`; None: as it was saved, in dicts and lists."""

    item: Any = None
    strict: bool = True
    support_layout: bool = False
    fallback_sharding: Any = None


@dataclass
class PyTreeRestore(CheckpointArgs):
    """Restores a tree in the structure of `item`, each leaf as `restore_args` says.

    `partial_restore` leaves out what `item` lacks. `transforms` says which saved leaves become
    those of `item`.
    """

    item: Any = None
    restore_args: Any = None
    transforms: Any = None
    transforms_default_to_original: bool = True
    legacy_transform_fn: Any = None
    partial_restore: bool = False

    def __post_init__(self) -> None:
        if self.legacy_transform_fn is not None:
            raise not_covered(
                "args.PyTreeRestore(legacy_transform_fn=...)",
                "give transforms, or rename with holdfast.checkpoint.load(path, like, rename=...)",
            )


@dataclass
class JsonSave(CheckpointArgs):
    """Saves a JSON value."""

    item: Any


@dataclass
class JsonRestore(CheckpointArgs):
    """Restores a JSON value."""

    item: Any = None


@dataclass
class ArraySave(CheckpointArgs):
    """Saves one array."""

    item: Any
    save_args: SaveArgs | None = None


@dataclass
class ArrayRestore(CheckpointArgs):
    """Restores one array."""

    item: Any = None
    restore_args: RestoreArgs | None = None


@dataclass
class JaxRandomKeySave(CheckpointArgs):
    """Saves a random key of jax's, or several."""

    item: Any
    save_args: SaveArgs | None = None


@dataclass
class JaxRandomKeyRestore(CheckpointArgs):
    """Restores a random key of jax's."""

    restore_args: RestoreArgs | None = None


@dataclass
class NumpyRandomKeySave(CheckpointArgs):
    """Saves a state of numpy's: `np.random.get_state()`."""

    item: Any


@dataclass
class NumpyRandomKeyRestore(CheckpointArgs):
    """Restores a state of numpy's."""


class Composite(CheckpointArgs, Mapping[str, Any]):
    """Several items by name: arguments on the way in, what was restored on the way out.

    A mapping whose members are attributes too.
    """

    def __init__(self, **items: Any) -> None:
        self._items = items

    def __getitem__(self, name: str) -> Any:
        if name not in self._items:
            raise KeyError(f"Unknown key: {name}. Available keys: {sorted(self._items)}")
        return self._items[name]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._items:
            raise AttributeError(f"there is no item {name!r}")
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"Composite({self._items!r})"


TREE_SAVES = (StandardSave, PyTreeSave, ArraySave, JaxRandomKeySave, NumpyRandomKeySave)


def cast(value: Any, save_args: SaveArgs | None) -> Any:
    """Returns a leaf in the dtype that its SaveArgs ask for."""
    dtype = getattr(save_args, "dtype", None)
    if dtype is None or not hasattr(value, "dtype") or value.dtype == np.dtype(dtype):
        return value
    return cast_array(value, np.dtype(dtype))


class CheckpointHandler:
    """The base of handlers of one's own.

    `save(directory, args=...)` writes files, `restore(directory, args=...)` reads them.
    """

    has_item: ClassVar[bool] = False  # whether it hands on an item, and writes no files

    def metadata(self, directory: Any) -> Any:
        """Returns None; nobody asks."""
        return None

    def finalize(self, directory: Any) -> None:
        """Ends the work of `save`, on the primary."""

    def close(self) -> None:
        """Does nothing."""

    @classmethod
    def typestr(cls) -> str:
        """Returns the name of the class."""
        return f"{cls.__module__}.{cls.__qualname__}"


_handlers: dict[str, dict[type, type]] = {"save": {}, "restore": {}}


def register_with_handler(
    handler_cls: type, for_save: bool = False, for_restore: bool = False
) -> Callable[[type], type]:
    """Returns a decorator of a class of arguments, by which items are `handler_cls`'s."""
    if not (for_save or for_restore):
        raise ValueError("register_with_handler: expected for_save=True, for_restore=True, or both")

    def register(cls: type) -> type:
        if not issubclass(cls, CheckpointArgs):
            raise TypeError(
                f"register_with_handler: expected a class below CheckpointArgs, found {cls}"
            )
        for verb, wanted in (("save", for_save), ("restore", for_restore)):
            if wanted:
                _handlers[verb][cls] = handler_cls
        return cls

    return register


def get_registered_handler_cls(arg: Any) -> type:
    """Returns the handler that a class of arguments, or one of them, is registered with.

    Raises TypeError for what is no class of arguments, ValueError where there is none.
    """
    cls = arg if isinstance(arg, type) else type(arg)
    if not issubclass(cls, CheckpointArgs):
        raise TypeError(f"expected a class below CheckpointArgs, found {cls}")
    handler_cls = handler_of_args(cls)
    if handler_cls is None:
        raise ValueError(
            f"no handler is registered for {cls}; decorate it with register_with_handler"
        )
    return handler_cls


def handler_of_args(args_cls: type) -> type | None:
    """Returns the handler that a class of arguments is registered with, None for none."""
    return _handlers["save"].get(args_cls) or _handlers["restore"].get(args_cls)


def registered_args_of(handler: Any, verb: str) -> type | None:
    """Returns the arguments that a handler was registered with, None for none."""
    cls = handler if isinstance(handler, type) else type(handler)
    return next((args for args, each in _handlers[verb].items() if each is cls), None)


def get_registered_args_cls(handler: Any) -> tuple[type, type]:
    """Returns the classes of arguments that a handler was registered with: to save and to restore.

    Raises ValueError.
    """
    to_save = registered_args_of(handler, "save")
    to_restore = registered_args_of(handler, "restore")
    if to_save is None or to_restore is None:
        raise ValueError(f"no arguments are registered for {handler}")
    return to_save, to_restore


def has_registered_args(handler: Any) -> bool:
    """Returns whether a handler was registered with arguments to save and to restore."""
    return None not in (registered_args_of(handler, "save"), registered_args_of(handler, "restore"))


REFUSED = "ProtoRestore ProtoSave"
__getattr__ = refusing(__name__, OWN_HANDLER, REFUSED)
