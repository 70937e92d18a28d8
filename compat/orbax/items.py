"""Items of Orbax's turned into holdfast's and back: what both managers and checkpointers share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np

from holdfast.checkpoint import (
    SAVED,
    ItemStructure,
    Json,
    Node,
    StepExists,
    StepNotFound,
    Structure,
    TreeMismatch,
)
from holdfast.checkpoint.format.tree import describe, flatten
from holdfast.checkpoint.restoring.match import HostShapeDtypeStruct

from . import args as args_lib
from . import handlers as handlers_lib
from .metadata import ArrayMetadata, ScalarMetadata, StringMetadata, TreeMetadata, leaf_metadata
from .refusals import not_covered

DEFAULT_ITEM = "default"
PLACEHOLDER = ...
Read: TypeAlias = Callable[..., Any]  # (item, like, partial=, cast=) -> the item


class StepAlreadyExistsError(ValueError):
    """The step is there already."""


@contextlib.contextmanager
def orbax_errors() -> Iterator[None]:
    """Raises what Orbax's callers expect: ValueError, FileNotFoundError; holdfast's own error is
    the cause and says more.
    """
    try:
        yield
    except TreeMismatch as error:
        raise ValueError(str(error)) from error
    except StepExists as error:
        raise StepAlreadyExistsError(str(error)) from error
    except StepNotFound as error:
        raise FileNotFoundError(str(error)) from error


def to_save(call: str, args: Any, handler: Any = None) -> Any:
    """Returns an item for `save(items=...)`; `handler` is the one that was given for it."""
    own = handlers_lib.own_handler(handler, args)
    if own is not None:
        return handlers_lib.files_to_save(own, args)
    if isinstance(args, args_lib.JsonSave):
        return Json(args.item)
    if not isinstance(args, args_lib.TREE_SAVES):
        raise _unknown(call, args)
    item, save_args = args.item, getattr(args, "save_args", None)
    if getattr(args, "custom_metadata", None):
        raise not_covered(
            f"{call}: custom_metadata of an item", "pass custom_metadata to save itself"
        )
    if save_args is None:
        return item
    is_leaf = lambda node: isinstance(node, args_lib.SaveArgs)  # noqa: E731
    casts = jax.tree.leaves(save_args, is_leaf=is_leaf)
    leaves, treedef = flatten(item)
    if len(casts) != len(leaves):
        raise ValueError(
            f"{call}: save_args has {len(casts)} leaves, the item {len(leaves)}; expected one for"
            " each"
        )
    return jax.tree.unflatten(
        treedef, [args_lib.cast(leaf, cast) for leaf, cast in zip(leaves, casts, strict=True)]
    )


def _unknown(call: str, args: Any) -> NotImplementedError:
    nearest = (
        "use StandardSave/StandardRestore for trees, JsonSave/JsonRestore for values, or register"
        " it: args.register_with_handler"
    )
    return not_covered(f"{call} with args.{type(args).__name__}", nearest)


def restore_item(
    call: str, name: str, item: ItemStructure, args: Any, read: Read, handler: Any = None
) -> Any:
    """Restores an item as its arguments ask for; `handler` is the one that was given for it."""
    if item.kind == "files":
        own = handlers_lib.own_handler(handler, args)
        if own is None:
            nearest = (
                f"give it: CheckpointManager(item_handlers={{{name!r}: handler}}), or restore the"
                " files with holdfast.checkpoint.load"
            )
            raise not_covered(
                f"{call}: the item {name!r}, of a handler that only its writer knows", nearest
            )
        return read(name, handlers_lib.files_to_restore(own, args))
    if item.kind == "json" or isinstance(args, args_lib.JsonRestore):
        return read(name, None)
    match args:
        case (
            None
            | args_lib.JaxRandomKeyRestore()
            | args_lib.ArrayRestore(item=None, restore_args=None)
        ):
            return plain(read(name, SAVED))
        case args_lib.NumpyRandomKeyRestore():
            return tuple(plain(read(name, None)))
        case args_lib.ArrayRestore():
            return restore_tree(name, item, args.item, read, restore_args=args.restore_args)
        case args_lib.StandardRestore():
            return _restore_standard(call, name, item, args, read)
        case args_lib.PyTreeRestore():
            partial = args.partial_restore or args.transforms is not None
            return restore_tree(
                name,
                item,
                args.item,
                read,
                restore_args=args.restore_args,
                partial=partial,
                as_saved=True,
            )
    raise _unknown(call, args)


def _restore_standard(
    call: str, name: str, item: ItemStructure, args: args_lib.StandardRestore, read: Read
) -> Any:
    target = args.item.tree if isinstance(args.item, TreeMetadata) else args.item
    if target is None and args.fallback_sharding is not None:
        target = jax.tree.map(lambda leaf: _with_fallback(leaf, args.fallback_sharding), item.tree)
        return plain(read(name, target, cast=True))
    if target is None:
        return plain(read(name, SAVED))
    if not args.strict and _shapes_differ(item.tree, target):
        raise not_covered(
            f"{call} with StandardRestore(strict=False)",
            "nothing is padded or cut; restore the saved shapes and slice them",
        )
    return restore_tree(name, item, target, read)


def _with_fallback(leaf: Any, sharding: Any) -> Any:
    if (
        not isinstance(leaf, jax.ShapeDtypeStruct)
        or isinstance(leaf, HostShapeDtypeStruct)
        or leaf.sharding is not None
    ):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)  # type: ignore[no-untyped-call]


def _shapes_differ(saved: Any, target: Any) -> bool:
    wanted = dict(_by_path(target))
    return any(
        getattr(wanted.get(path), "shape", None) not in (None, getattr(leaf, "shape", None))
        for path, leaf in _by_path(saved)
    )


def _by_path(tree: Any) -> Iterator[tuple[str, Any]]:
    return zip(describe(tree)[1], flatten(tree)[0], strict=True)


def restore_tree(
    name: str,
    item: ItemStructure,
    target: Any,
    read: Read,
    *,
    restore_args: Any = None,
    partial: bool = False,
    as_saved: bool = False,
) -> Any:
    """Restores in the structure of `target` (None: as saved). Leaves are like `restore_args`, then
    (not `as_saved`) like `target`.
    """
    target, restore_args = (
        each.tree if isinstance(each, TreeMetadata) else each for each in (target, restore_args)
    )
    saved = dict(_by_path(item.tree))
    leaves, treedef = flatten(item.tree if target is None else target)
    paths = describe(item.tree if target is None else target)[1]
    given = [None] * len(leaves)
    if restore_args is not None:
        found = dict(_by_path(restore_args))
        given = [found.get(path) for path in paths]
    as_saved = as_saved or target is None
    likes = [
        _like(saved.get(path), leaf, args, as_saved)
        for path, leaf, args in zip(paths, leaves, given, strict=True)
    ]
    left_out = {path for path, leaf in zip(paths, leaves, strict=True) if leaf is PLACEHOLDER}
    chosen = (lambda path: path not in left_out) if left_out else partial
    value = read(name, jax.tree.unflatten(treedef, likes), partial=chosen, cast=True)
    return plain(value) if target is None else value


def _like(saved: Any, target: Any, args: Any, as_saved: bool) -> Any:
    """Returns what a leaf is to be like."""
    if target is PLACEHOLDER or saved is None:
        return target
    if args is not None and (args.restore_type is not None or args.dtype is not None):
        return _like_args(saved, args)
    if isinstance(target, StringMetadata):
        return ""
    if as_saved or not hasattr(target, "shape"):
        return (
            saved
            if as_saved
            or (isinstance(target, bool | int | float) and isinstance(saved, bool | int | float))
            else target
        )
    unplaced = (
        isinstance(target, jax.ShapeDtypeStruct | ArrayMetadata | ScalarMetadata)
        and target.sharding is None
    )
    if unplaced and (isinstance(saved, HostShapeDtypeStruct | bool | int | float)):
        return HostShapeDtypeStruct(target.shape, target.dtype)  # type: ignore[no-untyped-call]
    if unplaced and isinstance(saved, jax.ShapeDtypeStruct) and saved.shape == target.shape:
        return jax.ShapeDtypeStruct(target.shape, target.dtype, sharding=saved.sharding)  # type: ignore[no-untyped-call]
    return target


def _like_args(saved: Any, args: Any) -> Any:
    if args.restore_type in (int, float, bool, str, complex, bytes):
        return args.restore_type()
    if not hasattr(saved, "shape"):
        saved = np.asarray(saved)
    dtype = saved.dtype if args.dtype is None else args.dtype
    shape = getattr(args, "global_shape", None) or getattr(args, "shape", None) or saved.shape
    if tuple(shape) != tuple(saved.shape) and not args.strict:
        raise not_covered(
            "ArrayRestoreArgs(strict=False)",
            "nothing is padded or cut; restore the saved shape and slice it",
        )
    if args.restore_type is np.ndarray:
        return HostShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]
    sharding = getattr(args, "sharding", None) or getattr(saved, "sharding", None)
    return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding)  # type: ignore[no-untyped-call]


def plain(tree: Any) -> Any:
    """Returns a tree as Orbax gives it back without a target: dicts and lists; an empty namedtuple
    is None.
    """
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return {key: plain(value) for key, value in zip(tree._fields, tree, strict=True)} or None
    if isinstance(tree, list | tuple):
        return [plain(value) for value in tree] if tree or isinstance(tree, list) else ()
    if isinstance(tree, Node):
        numbered = len(tree) and list(tree) == list(range(len(tree)))
        return (
            [plain(value) for value in tree.values()]
            if numbered
            else {str(key): plain(value) for key, value in tree.items()} or None
        )
    if isinstance(tree, Mapping):
        return {key: plain(value) for key, value in tree.items()}
    return tree


def tree_metadata(item: ItemStructure, directory: Any) -> Any:
    """Returns the metadata of an item: a TreeMetadata, None for JSON."""
    if item.kind != "tree":
        return None
    leaves, treedef = flatten(item.tree)
    names = describe(item.tree)[1]
    described = [
        leaf_metadata(name, leaf, directory) for name, leaf in zip(names, leaves, strict=True)
    ]
    return TreeMetadata(plain(jax.tree.unflatten(treedef, described)))


def find(found: Structure, name: str) -> ItemStructure:
    """Returns an item of a structure; raises KeyError saying which there are."""
    if name not in found.items:
        raise KeyError(
            f'Item "{name}" was not found in the checkpoint. Available items: {sorted(found.items)}'
        )
    return found.items[name]
