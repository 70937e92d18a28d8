"""Items of Orbax's turned into holdfast's and back: what both managers and checkpointers share."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np

import holdfast.compat.orbax.args as args_lib
from holdfast.checkpoint import (
    SAVED,
    ItemStructure,
    Json,
    Node,
    SaveCancelled,
    SaveHandle,
    StepExists,
    StepNotFound,
    Structure,
    TreeMismatch,
    UnsupportedLeaf,
)
from holdfast.checkpoint.agreement.exchange import ask_primary
from holdfast.checkpoint.arrays.jax_settings import own_settings
from holdfast.checkpoint.arrays.sharding import concrete_sharding
from holdfast.checkpoint.format.limits import encode_json
from holdfast.checkpoint.format.tree import FlatTree
from holdfast.checkpoint.restoring.match import HostShapeDtypeStruct, listed
from holdfast.multihost import coordination_timeout, default_group

from ..metadata import (
    ArrayMetadata,
    ScalarMetadata,
    StringMetadata,
    TreeMetadata,
    item_metadata_of,
    leaf_metadata,
    to_shape_dtype_struct,
    with_text_keys,
)
from ..own_handlers import to_path
from ..refusals import PAGE, not_covered
from ..transform_utils import SEPARATOR, Rules
from ..trees.flat import from_flat_dict, to_flat_dict
from ..trees.shardings import sharding_of

DEFAULT_ITEM = "default"
PLACEHOLDER = ...
NUMBERS = (bool, int, float, complex)
Reader: TypeAlias = Callable[..., Any]  # (like, item=, partial=, cast=) -> the item


class StepAlreadyExistsError(ValueError):
    """The step is there already."""


@contextlib.contextmanager
def orbax_errors(overwrite: str = "overwrite=True") -> Iterator[None]:
    """Raises what Orbax's callers expect: ValueError, FileNotFoundError.

    holdfast's own error is the cause and says more. `overwrite` is how the call would be allowed to
    replace what is there.
    """
    try:
        yield
    except (TreeMismatch, UnsupportedLeaf) as error:
        raise ValueError(str(error)) from error
    except StepExists as error:
        text = str(error).replace("overwrite=True", overwrite)
        raise StepAlreadyExistsError(text) from error
    except StepNotFound as error:
        raise FileNotFoundError(str(error)) from error


def cancel(handle: SaveHandle) -> bool:
    """Calls a save off and blocks until it has ended; returns False where that comes too late."""
    if not handle.cancel():
        return False
    with contextlib.suppress(SaveCancelled):
        handle.wait()
    return True


def to_save(call: str, args: Any) -> Any:
    """Returns an item for `save(items=...)`, of the arguments of a handler of Orbax's."""
    if isinstance(args, args_lib.JsonSave):
        return json_of_primary(args.item)
    if args is None:
        raise ValueError(f"{call}: an item has None for its args; expected StandardSave(tree), ...")
    if not isinstance(args, args_lib.TREE_SAVES):
        raise _unknown(call, args)
    item = args.item
    if item is None:
        raise ValueError(f"{call}: args.{type(args).__name__} has None for its item")
    if isinstance(args, args_lib.ArraySave) and not jax.tree_util.all_leaves([item]):
        raise ValueError(
            f"{call}: args.ArraySave expects one array, found a {type(item).__name__}; use"
            " StandardSave"
        )
    save_args = getattr(args, "save_args", None)
    if save_args is None:
        return item
    casts = _by_path(FlatTree.of(save_args))
    flat = FlatTree.of(item)
    unknown = sorted(casts.keys() - {*flat.paths})
    if unknown:
        raise ValueError(
            f"{call}: save_args has leaves that the item lacks: {listed(unknown)}; expected one, or"
            " None, for each of the item's"
        )
    return flat.with_leaves([*map(args_lib.cast, flat.leaves, map(casts.get, flat.paths))]).tree()


def json_of_primary(value: Any) -> Json:
    """Returns the primary's value, as Orbax saves it whatever the others have. Every process calls
    it; blocks.
    """

    def encoded() -> str:
        return encode_json(with_text_keys(value), "the JSON").decode()

    name = "holdfast.compat.orbax/json"
    return Json(json.loads(ask_primary(default_group(), name, encoded, coordination_timeout())))


def _unknown(call: str, args: Any) -> ValueError:
    return ValueError(
        f"{call}: found {type(args).__name__} for the args of an item; expected StandardSave or"
        " StandardRestore for trees, JsonSave or JsonRestore for values, or a class that is"
        f" registered: args.register_with_handler. See {PAGE}"
    )


def item_of(checkpoint: Structure, name: str) -> ItemStructure:
    """Returns an item of a checkpoint; raises KeyError saying which there are."""
    if name not in checkpoint.items:
        raise KeyError(
            f"there is no item {name!r} in this checkpoint; it has {sorted(checkpoint.items)}"
        )
    return checkpoint.items[name]


@dataclass(frozen=True)
class SavedItem:
    """An item of a checkpoint, and who reads it; `call` is what the user called, for errors."""

    call: str
    name: str
    structure: ItemStructure
    reader: Reader

    @classmethod
    def find(cls, call: str, checkpoint: Structure, name: str, reader: Reader) -> SavedItem:
        """Returns an item of a checkpoint; raises KeyError as `item_of` does, and the error of an
        item that is damaged.
        """
        found = item_of(checkpoint, name)
        if found.error is not None:
            raise found.error
        return cls(call, name, found, reader)

    @property
    def kind(self) -> str:
        """What the item is: "tree", "json" or "files"."""
        return self.structure.kind

    def read(self, like: Any, **options: Any) -> Any:
        """Reads the item like `like`, with the options of `holdfast.checkpoint.load`."""
        return self.reader(like, item=self.name, **options)


def restore_item(item: SavedItem, args: Any) -> Any:
    """Restores an item as its arguments ask for."""
    for_json = isinstance(args, args_lib.JsonRestore)
    if args is not None and for_json != (item.kind == "json"):
        raise ValueError(
            f"{item.call}: the item {item.name!r} is a {item.kind}, found"
            f" {type(args).__name__} for its args"
        )
    if item.kind == "json":
        return item.read(None)
    match args:
        case (
            None
            | args_lib.JaxRandomKeyRestore()
            | args_lib.ArrayRestore(item=None, restore_args=None)
        ):
            return plain(item.read(SAVED))
        case args_lib.NumpyRandomKeyRestore():
            return tuple(plain(item.read(None)))
        case args_lib.ArrayRestore():
            return restore_tree(item, args.item, restore_args=args.restore_args)
        case args_lib.StandardRestore():
            return _restore_standard(item, args)
        case args_lib.PyTreeRestore():
            if args.transforms is not None:
                return _restore_transformed(item, args)
            return restore_tree(
                item,
                args.item,
                restore_args=args.restore_args,
                partial=args.partial_restore,
                as_saved=True,
            )
    raise _unknown(item.call, args)


def _restore_transformed(item: SavedItem, args: args_lib.PyTreeRestore) -> Any:
    """Restores the saved leaves that the transforms ask for, and transforms them."""
    if args.item is None:
        raise ValueError(
            f"{item.call}: transforms expect an item, whose structure the result has; found None"
        )
    rules = Rules.of(args.transforms, args.transforms_default_to_original, args.restore_args or {})
    asked = to_flat_dict(args.item, sep=SEPARATOR)
    wanted: dict[str, Any] = {}
    for path in asked:
        wanted |= rules.sources(path)
    saved = to_flat_dict(item.structure.tree, sep=SEPARATOR)
    chosen = {path: leaf if path in wanted else PLACEHOLDER for path, leaf in saved.items()}
    how = {path: wanted.get(path) or args_lib.RestoreArgs() for path in saved}
    restored = restore_tree(
        item,
        from_flat_dict(chosen, item.structure.tree, SEPARATOR),
        restore_args=from_flat_dict(how, item.structure.tree, SEPARATOR),
        as_saved=True,
    )
    original = {
        path: leaf
        for path, leaf in to_flat_dict(restored, sep=SEPARATOR).items()
        if leaf is not PLACEHOLDER
    }
    new = {path: rules.value(path, own, original, plain(restored)) for path, own in asked.items()}
    return from_flat_dict(new, args.item, SEPARATOR)


def _restore_standard(item: SavedItem, args: args_lib.StandardRestore) -> Any:
    if args.item is None and args.fallback_sharding is None:
        return plain(item.read(SAVED))
    fallback = args.fallback_sharding
    return restore_tree(item, args.item, fits_shapes=not args.strict, fallback=fallback)


def _as_it_was_saved(item: SavedItem, path: str, saved: Any, leaf: Any) -> Any:
    """Returns what an array of another shape is read like: whole, by each process."""
    shape = None if isinstance(leaf, type) else getattr(leaf, "shape", None)
    if shape is None or not hasattr(saved, "shape") or saved.shape == shape:
        return leaf
    if len(saved.shape) != len(shape):
        raise ValueError(
            f"{item.call}: the leaf {path!r} has the shape {saved.shape} in the checkpoint and"
            f" {shape} in the target; expected as many axes, also with strict=False"
        )
    return _on_host(saved.shape, leaf.dtype)


def _fitted(value: Any, leaf: Any) -> Any:
    """Returns an array in the shape of a target's leaf; numpy's stay as they were saved."""
    shape = None if isinstance(leaf, type) else getattr(leaf, "shape", None)
    if shape is None or isinstance(leaf, np.ndarray) or np.shape(value) == shape:
        return value
    fitted = np.zeros(shape, value.dtype)
    common = tuple(slice(0, min(sizes)) for sizes in zip(shape, value.shape, strict=True))
    fitted[common] = value[common]
    sharding = sharding_of(getattr(leaf, "sharding", None))
    with own_settings():
        if sharding is not None:
            sharding = concrete_sharding(sharding)
        if sharding is None:
            return jax.numpy.asarray(fitted)
        return jax.make_array_from_callback(shape, sharding, lambda index: fitted[index])


def _tree(given: Any) -> Any:
    return given.tree if isinstance(given, TreeMetadata) else given


def _placed(item: SavedItem, path: str, leaf: Any, fallback: Any) -> Any:
    """Returns what a leaf is to be like, with a sharding where it is one of jax's arrays."""
    on_devices = isinstance(leaf, jax.ShapeDtypeStruct)
    if not on_devices or isinstance(leaf, HostShapeDtypeStruct) or leaf.sharding is not None:
        return leaf
    if fallback is None:
        raise ValueError(
            f"{item.call}: {path!r} has no saved sharding that fits this job's"
            f" {jax.device_count()} devices; expected one in the target, or a fallback_sharding"
        )
    return _on_devices(leaf.shape, leaf.dtype, fallback)


def _by_path(flat: FlatTree) -> dict[str, Any]:
    return dict(zip(flat.paths, flat.leaves, strict=True))


def restore_tree(
    item: SavedItem,
    target: Any,
    *,
    restore_args: Any = None,
    partial: bool = False,
    as_saved: bool = False,
    fits_shapes: bool = False,
    fallback: Any = None,
) -> Any:
    """Restores in the structure of `target` (None: as saved).

    Leaves are like `restore_args`, then (not `as_saved`) like `target`. With `partial` saved leaves
    that the target lacks are left out, and the target keeps its own where nothing was saved. With
    `fits_shapes` arrays of other shapes are cut, or get zeros at their ends. An array that has no
    sharding here, neither in the target nor by its saved one, gets `fallback`. Raises ValueError
    where ranks differ, and where there is no sharding.
    """
    target = _tree(target)
    flat = FlatTree.of(item.structure.tree)
    saved = _by_path(flat)
    if target is not None:
        flat = FlatTree.of(_mark_nones(target, saved))
    leaves = _by_path(flat)
    given = {} if restore_args is None else _by_path(FlatTree.of(_tree(restore_args)))
    args = {path: _typed(saved.get(path), each) for path, each in given.items()}
    as_saved = as_saved or target is None
    likes = []
    for path, leaf in leaves.items():
        if fits_shapes:
            leaf = _as_it_was_saved(item, path, saved.get(path), leaf)
        like = _like(saved.get(path), leaf, args.get(path), as_saved)
        if getattr(saved.get(path), "sharding", like) is None:
            like = _placed(item, path, like, fallback)
        likes.append(like)
    left_out = {
        path
        for path, leaf in leaves.items()
        if _is_left_out(leaf) or (partial and path not in saved)
    }
    if left_out and not partial:
        _check_all_are_asked_for(item, saved, leaves)
    chosen = (lambda path: path not in left_out) if left_out else partial
    value = flat.with_leaves(likes).tree()
    if not leaves or len(left_out) < len(leaves):
        value = item.read(value, partial=chosen, cast=True)
    numbers = {
        path: each.restore_type
        for path, each in args.items()
        if each.restore_type in NUMBERS and path not in left_out
    }
    # With the Nones and the numbers of the target.
    found = FlatTree.of(value)
    ended = [
        _as_asked(
            item,
            path,
            numbers.get(path, asked),
            leaf,
            as_saved=as_saved and path not in numbers,
        )
        for (path, asked), leaf in zip(leaves.items(), found.leaves, strict=True)
    ]
    if fits_shapes:
        ended = [*map(_fitted, ended, flat.leaves)]
    value = found.with_leaves(ended).tree()
    return plain(value) if target is None else value


# Stands for a None in a target where a leaf was saved: it is not read.
_NO_LEAF = object()


def _is_left_out(leaf: Any) -> bool:
    """Says whether a leaf of a target is not read."""
    return leaf is PLACEHOLDER or leaf is _NO_LEAF


def _mark_nones(target: Any, saved: Mapping[str, Any]) -> Any:
    """Returns a target whose Nones are leaves where leaves were saved."""
    is_none = lambda leaf: leaf is None  # noqa: E731
    marked = jax.tree.map(lambda leaf: _NO_LEAF if leaf is None else leaf, target, is_leaf=is_none)
    flat = FlatTree.of(marked)
    leaves = [
        None if leaf is _NO_LEAF and path not in saved else leaf
        for path, leaf in _by_path(flat).items()
    ]
    return flat.with_leaves(leaves).tree()


def _check_all_are_asked_for(
    item: SavedItem, saved: Mapping[str, Any], leaves: Mapping[str, Any]
) -> None:
    unasked = sorted(saved.keys() - leaves)
    if unasked:
        raise ValueError(
            f"{item.call}: the item {item.name!r} has leaves that the target lacks:"
            f" {listed(unasked)}; expected an array, a number, None or PLACEHOLDER for each"
        )


def _as_asked(item: SavedItem, path: str, asked: Any, value: Any, *, as_saved: bool) -> Any:
    """Returns a leaf that was read as the target has it: numbers in the target's type, exactly."""
    if asked is _NO_LEAF:
        return None
    kind = asked if isinstance(asked, type) else type(asked)
    if as_saved or kind not in NUMBERS:
        return value
    number = value.item() if hasattr(value, "item") else value
    if type(number) is kind:
        return number
    try:
        exact = kind(number)
    except (OverflowError, TypeError, ValueError):
        exact = None
    if exact is None or exact != number:
        raise ValueError(
            f"{item.call}: the leaf {path!r} was expected as {kind.__name__}, and the checkpoint"
            f" has {number!r}, which is none; give {type(number).__name__} in the target"
        )
    return exact


def _like(saved: Any, target: Any, args: Any, as_saved: bool) -> Any:
    """Returns what a leaf is to be like."""
    if _is_left_out(target) or saved is None:
        return target
    if args is not None and args.restore_type is not None:
        return _like_args(saved, args)
    if isinstance(target, StringMetadata):
        return ""
    if isinstance(target, ArrayMetadata):
        target = to_shape_dtype_struct(target)
    if as_saved:
        return saved
    if isinstance(target, type):
        return _like_type(saved, target)
    if type(target) in NUMBERS:
        return _like_number(saved, target)
    if not hasattr(target, "shape"):
        return target
    if isinstance(target, np.ndarray) and target.shape == (0,) and hasattr(saved, "shape"):
        return _on_host(saved.shape, target.dtype)
    if not isinstance(target, np.generic) and not hasattr(target, "sharding"):
        return _on_host(target.shape, target.dtype)
    abstract = isinstance(target, jax.ShapeDtypeStruct | ScalarMetadata)
    if not abstract or target.sharding is not None:
        return target
    if isinstance(saved, HostShapeDtypeStruct | bool | int | float):
        return _on_host(target.shape, target.dtype)
    if isinstance(saved, jax.ShapeDtypeStruct) and saved.shape == target.shape:
        return _on_devices(target.shape, target.dtype, saved.sharding)
    return target


def _on_host(shape: Any, dtype: Any) -> HostShapeDtypeStruct:
    return HostShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]


def _on_devices(shape: Any, dtype: Any, sharding: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)  # type: ignore[no-untyped-call]


def _like_type(saved: Any, kind: type) -> Any:
    """Returns what a leaf is to be like whose target is a type, as v1 has it."""
    if kind in NUMBERS:
        return _like_number(saved, kind())
    if kind in (str, bytes):
        return kind()
    if not hasattr(saved, "shape"):
        saved = np.asarray(saved)
    if kind is np.ndarray:
        return _on_host(saved.shape, saved.dtype)
    if issubclass(kind, jax.Array | jax.ShapeDtypeStruct):
        sharding = getattr(saved, "sharding", None)
        return _on_devices(saved.shape, saved.dtype, sharding)
    return kind


def _like_number(saved: Any, target: Any) -> Any:
    """Returns what a number is to be read like: it is turned into the target's type later."""
    if isinstance(saved, NUMBERS):
        return saved
    if getattr(saved, "shape", None) == () and np.dtype(saved.dtype).kind in "biufc":
        return _on_host((), saved.dtype)
    return target


def _typed(saved: Any, args: args_lib.RestoreArgs) -> args_lib.RestoreArgs:
    """Returns the arguments of a leaf with its type: with a dtype alone it stays what it is."""
    if args.restore_type is not None or args.dtype is None:
        return args
    kind: Any = jax.Array
    if isinstance(saved, NUMBERS):
        kind = type(np.dtype(args.dtype).type(0).item())
    elif isinstance(saved, HostShapeDtypeStruct):
        kind = np.ndarray
    elif not hasattr(saved, "shape"):
        kind = type(saved)
    return args_lib.RestoreArgs(kind, args.dtype)


def _like_args(saved: Any, args: Any) -> Any:
    kind = args.restore_type
    if kind in (*NUMBERS, str, bytes):
        return _like_type(saved, kind)
    if not hasattr(saved, "shape"):
        saved = np.asarray(saved)
    dtype = saved.dtype if args.dtype is None else args.dtype
    shape = getattr(args, "global_shape", None) or getattr(args, "shape", None) or saved.shape
    if tuple(shape) != tuple(saved.shape) and not args.strict:
        raise not_covered(
            "ArrayRestoreArgs(strict=False)",
            "nothing is padded or cut; restore the saved shape and slice it",
        )
    if kind is np.ndarray:
        return _on_host(shape, dtype)
    given = sharding_of(getattr(args, "sharding", None))
    return _on_devices(tuple(shape), dtype, given or getattr(saved, "sharding", None))


def plain(tree: Any) -> Any:
    """Returns a tree as Orbax gives it back without a target: dicts, whose keys are texts, and
    lists. An empty namedtuple is None.
    """
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return {key: plain(value) for key, value in zip(tree._fields, tree, strict=True)} or None
    if isinstance(tree, tuple) and not tree:
        return ()
    if isinstance(tree, list | tuple):
        return [plain(value) for value in tree]
    if isinstance(tree, Node):
        if len(tree) and list(tree) == list(range(len(tree))):
            return [plain(value) for value in tree.values()]
        return {str(key): plain(value) for key, value in tree.items()} or None
    if isinstance(tree, Mapping):
        return {str(key): plain(value) for key, value in tree.items()}
    return tree


def trees_metadata(saved: Structure) -> dict[str, Any]:
    """Returns the metadata of each item."""
    path = to_path(saved.path)
    return {
        name: tree_metadata(item, path / name, item_metadata_of(saved, name))
        for name, item in saved.items.items()
    }


def tree_metadata(item: ItemStructure, directory: Any, custom_metadata: Any = None) -> Any:
    """Returns the metadata of an item: a TreeMetadata, None for JSON and what is damaged."""
    if item.kind != "tree" or item.error is not None:
        return None
    flat = FlatTree.of(item.tree)
    described = [leaf_metadata(path, leaf, directory) for path, leaf in _by_path(flat).items()]
    return TreeMetadata(plain(flat.with_leaves(described).tree()), custom_metadata)
