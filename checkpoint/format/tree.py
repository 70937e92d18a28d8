"""Trees as the record has them: described in JSON types, and rebuilt without any import.

A node is null for None, an integer for a leaf (its index in flatten order), or {"kind", "nodes"}
with, by kind: "dict" | "OrderedDict" | "defaultdict" and "keys" (str or int), "list", "tuple",
"namedtuple" and "type" and "keys", "object" (any other class that jax knows as a pytree) and "type"
and "keys".
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import keyword
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, PyTreeDef, SequenceKey

from ..errors import ONE_LEAF as ONE_LEAF
from ..errors import HostileCheckpoint, TreeMismatch, UnsupportedLeaf
from .static_data import canonical_static_data

Maker: TypeAlias = Callable[[dict[str, Any]], Any]
MAX_DEPTH = 200  # of nodes within nodes; Python and JSON parsers recurse
VALUE_TYPES = (bool, int, float, complex, str, bytes)

_LEAF_TYPES = (
    jax.Array,
    jax.ShapeDtypeStruct,
    np.ndarray,
    np.generic,
    *VALUE_TYPES,
)
_LIBRARIES = frozenset({"builtins", "numpy", "jax", "jaxlib", "ml_dtypes", "holdfast"})
_seen_leaf_types: set[type] = set()
_MAPPINGS = (dict, collections.OrderedDict, collections.defaultdict)
_MAPPING_KINDS = {cls.__name__ for cls in _MAPPINGS}
_KEYED = _MAPPING_KINDS | {"namedtuple", "object"}
_KEY_TYPES = frozenset({str, int})
_SEQUENCE = {"kind", "nodes"}
_MAPPING = {"kind", "nodes", "keys"}  # what a node's description has
_KEY = re.compile(r"(?:[^\\.]|\\.)+", re.DOTALL)  # of a leaf path
_ESCAPED = {ord(char): f"\\{char}" for char in "\\.[]"} | {
    code: f"\\x{code:02x}" for code in (*range(32), 127)
}


@dataclass(frozen=True)
class Node(Mapping[str | int, Any]):
    """Stands for an object whose class the checkpoint names but does not import.

    `type_name` is "module:qualname". A Node is a mapping of the object's fields: `node["params"]`.
    """

    type_name: str
    fields: Mapping[str | int, Any] = field(default_factory=dict)

    def __getitem__(self, key: str | int) -> Any:
        return self.fields[key]

    def __iter__(self) -> Iterator[str | int]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)


def _flatten_node(
    node: Node,
) -> tuple[list[tuple[DictKey, Any]], tuple[str, tuple[str | int, ...]]]:
    children = [(DictKey(key), value) for key, value in node.fields.items()]
    return children, (node.type_name, tuple(node.fields))


jax.tree_util.register_pytree_with_keys(
    Node,
    _flatten_node,
    lambda aux, children: Node(aux[0], dict(zip(aux[1], children, strict=True))),
)


@contextlib.contextmanager
def paused_gc() -> Iterator[None]:
    """Keeps the collector off the heap while tens of thousands of small objects are made."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def is_there(array: Any) -> bool:
    """Returns whether an array is computed; what is no array, or a tracer, is there."""
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
        return True
    # The stubs of jax lack this verb. An array of keys lacks it, what it wraps does not.
    known: Any = getattr(array, "_base_array", array)
    # One that was donated is found where it is read.
    return known.is_deleted() or bool(known.is_ready())


def is_key(leaf: Any) -> bool:
    """Returns whether an array, or its description, is of typed PRNG keys."""
    dtype = leaf.dtype
    return not isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def stored_form(array: jax.Array) -> tuple[str, str, jax.Array]:
    """Returns the kind of an array as a leaf, the implementation of its keys ("" for what is no
    keys), and the array that is written.
    """
    if not is_key(array):
        return "array", "", array
    return "key", str(jax.random.key_impl(array)), jax.random.key_data(array)


def flatten(tree: Any) -> tuple[list[Any], PyTreeDef]:
    """Returns leaves and treedef.

    Raises UnsupportedLeaf for a dict whose keys jax cannot sort, as one that mixes str and int.
    """
    try:
        return jax.tree_util.tree_flatten(tree)
    except ValueError as error:
        found = _find_unsorted(tree, "")
        if found is None:
            raise
        path, kinds = found
        raise UnsupportedLeaf(
            f"the dict at {path or 'the root'!r} has keys of {' and '.join(kinds)}, which jax"
            " cannot sort; use str or int alone",
            leaf=path,
            found="dict with unsorted keys",
        ) from error


class Description(NamedTuple):
    """What a record says of a tree: its structure, the paths of its leaves in flatten order, and
    static data by the paths of their nodes, in canonical form.
    """

    tree: Any
    paths: list[str]
    statics: Mapping[str, Any]


@dataclass(frozen=True)
class FlatTree:
    """A tree that was taken apart once: its leaves in flatten order, and its treedef."""

    leaves: list[Any]
    treedef: PyTreeDef
    _described: Callable[[], Description]

    @classmethod
    def of(cls, tree: Any) -> Self:
        """Takes a tree apart. Raises UnsupportedLeaf as `flatten` does."""
        leaves, treedef = flatten(tree)
        # Made when asked for: a save whose plan is cached needs no paths.
        return cls(leaves, treedef, functools.cache(lambda: _describe_whole(tree)))

    @property
    def description(self) -> Any:
        """The tree's structure as the record has it."""
        return self._described().tree

    @property
    def paths(self) -> list[str]:
        """The paths of the leaves."""
        return self._described().paths

    @property
    def statics(self) -> Mapping[str, Any]:
        """The static data of nodes that have their children by position, by the nodes' paths."""
        return self._described().statics

    def with_leaves(self, leaves: list[Any]) -> Self:
        """Returns the tree with other leaves in the places of these."""
        return replace(self, leaves=leaves)

    def tree(self) -> Any:
        """Returns the tree, put together again."""
        return self.treedef.unflatten(self.leaves)


def _find_unsorted(tree: Any, path: str) -> tuple[str, list[str]] | None:
    """Returns where a dict is whose keys have no order, and the types of its keys."""
    try:
        children = _children(tree)
    except ValueError:
        return path, sorted({type(key).__name__ for key in tree})
    for key, child in children.pairs if children is not None else ():
        found = _find_unsorted(child, join_path(path, key))
        if found is not None:
            return found
    return None


def escape(key: str | int) -> str:
    """Returns a key as it stands in a leaf path, with all characters of structure escaped.

    Raises UnsupportedLeaf for a key that UTF-8 cannot hold (half of a surrogate pair): no reader of
    safetensors would open such a name.
    """
    text = str(key)
    if not text.isidentifier():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UnsupportedLeaf(
                f"the key {text!r} is not valid UTF-8 and cannot be saved; rename it",
                leaf=repr(text),
            ) from None
        text = text.translate(_ESCAPED)
    if text == "__metadata__":
        return "\\__metadata__"
    return text or "\\e"


def join_path(path: str, key: str | int) -> str:
    return f"{path}.{escape(key)}" if path else escape(key)


def keys_of(path: str) -> list[str]:
    """Returns the keys of a leaf path, escaped as they stand in it; empty ones are left out."""
    return _KEY.findall(path)


def plain_name(path: str) -> str:
    """Returns a leaf path without its escapes, as people write it: `\\.` is a dot."""
    return path if "\\" not in path else "".join(_unescaped(path))


def _unescaped(path: str) -> Iterator[str]:
    characters = iter(path)
    for character in characters:
        if character != "\\":
            yield character
            continue
        following = next(characters, "")
        if following == "x":
            yield chr(int(next(characters) + next(characters), 16))
        else:
            yield {"r": "value", "e": ""}.get(following, following)


def describe(tree: Any) -> tuple[Any, list[str]]:
    """Returns the tree's description and the paths of its leaves, in flatten order.

    A tree that is one leaf has the path `\\r`.
    """
    described = _describe_whole(tree)
    return described.tree, described.paths


def _describe_whole(tree: Any) -> Description:
    walk = _Walk([], [], [])
    description = _describe(tree, "", 0, walk)
    statics = zip(_distinct(walk.nodes), walk.statics, strict=True)
    known = {path: data for path, data in statics if data is not None}
    return Description(description, _distinct(walk.paths), known)


class _Walk(NamedTuple):
    """What a walk through a tree has met: the paths of leaves, and the paths and static data of
    nodes that have their children by position.
    """

    paths: list[str]
    nodes: list[str]
    statics: list[Any]


def _distinct(paths: list[str]) -> list[str]:
    """Makes paths distinct that custom nodes made equal."""
    if len(set(paths)) == len(paths):
        return paths
    seen: collections.Counter[str] = collections.Counter()
    distinct = []
    for path in paths:
        seen[path] += 1
        distinct.append(path if seen[path] == 1 else f"{path}\\~{seen[path]}")
    return distinct


def _describe(tree: Any, path: str, depth: int, walk: _Walk) -> Any:
    if tree is None:
        return None
    children = None if _is_leaf(tree) else _children(tree)
    if children is None:
        walk.paths.append(path or ONE_LEAF)
        return len(walk.paths) - 1
    if depth >= MAX_DEPTH:
        raise UnsupportedLeaf(
            f"the tree at {path!r} is nested deeper than {MAX_DEPTH}; flatten it",
            leaf=path,
            found=type(tree).__name__,
        )
    if children.by_position is not None:
        _, data = children.by_position.node_data()
        walk.nodes.append(path)
        walk.statics.append(canonical_static_data(data))
    nodes = [
        _describe(child, join_path(path, key), depth + 1, walk) for key, child in children.pairs
    ]
    return _kind(tree, [key for key, _ in children.pairs], path) | {"nodes": nodes}


def _is_leaf(tree: Any) -> bool:
    """Returns whether a value is surely a leaf, by its type where that was seen before."""
    cls = type(tree)
    if cls in _seen_leaf_types:
        return True
    # Any other class may be registered as a node, also one that is a str or an int: an enum's.
    library = cls.__module__.partition(".")[0]
    if library in _LIBRARIES and isinstance(tree, _LEAF_TYPES):
        _seen_leaf_types.add(cls)
        return True
    return False


class _Children(NamedTuple):
    """The (key, child) pairs one level below a node; its treedef, if the keys are positions."""

    pairs: list[tuple[Any, Any]]
    by_position: PyTreeDef | None = None


def _children(tree: Any) -> _Children | None:
    """Returns what is one level down, or None for a leaf."""
    # Dicts, lists and tuples are most of a tree: taken apart here, as jax does it, for speed.
    if type(tree) is dict:
        with contextlib.suppress(TypeError):  # keys that have no order: jax says so
            return _Children([(key, tree[key]) for key in sorted(tree)])
    if type(tree) in (list, tuple):
        return _Children(list(enumerate(tree)))
    return _registered_children(tree)


def _registered_children(tree: Any) -> _Children | None:
    """Returns what jax finds one level down by the class of a node, or None for a leaf."""
    found, treedef = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: node is not tree
    )
    if len(found) == 1 and not found[0][0]:
        return None
    keys = [path[0] for path, _ in found]
    children = [child for _, child in found]
    names = [_plain_key(key) for key in keys]
    if len(set(names)) < len(names):
        return _Children(list(enumerate(children)), treedef)
    # Keys of one text are told apart by their places, too.
    is_by_position = len(set(map(str, names))) < len(names) or any(
        isinstance(key, FlattenedIndexKey | SequenceKey) for key in keys
    )
    return _Children(list(zip(names, children, strict=True)), treedef if is_by_position else None)


def _plain_key(key: Any) -> Any:
    match key:
        case DictKey(key=value) | FlattenedIndexKey(key=value):
            return value
        case SequenceKey(idx=index):
            return index
        case GetAttrKey(name=name):
            return name
    return str(key)


def _kind(tree: Any, keys: list[Any], path: str) -> dict[str, Any]:
    cls = type(tree)
    if cls in _MAPPINGS:
        _check_keys(keys, path)
        return {"kind": cls.__name__, "keys": keys}
    if cls in (list, tuple):
        return {"kind": cls.__name__}
    if isinstance(tree, Node):
        return {"kind": "object", "type": tree.type_name, "keys": keys}
    name = type_name(cls)
    # One that was registered by itself may have fields that are no children.
    if isinstance(tree, tuple) and hasattr(tree, "_fields") and len(tree._fields) == len(keys):
        return {"kind": "namedtuple", "type": name, "keys": list(tree._fields)}
    texts = [key if type(key) is int else str(key) for key in keys]
    return {"kind": "object", "type": name, "keys": texts}


def _check_keys(keys: Iterable[Any], path: str) -> None:
    for key in keys:
        if type(key) not in (str, int):
            raise UnsupportedLeaf(
                f"the dict at {path or 'the root'!r} has the key {key!r}; keys must be str or int:"
                " rename it before saving",
                leaf=path,
                found=f"key of type {type(key).__name__}",
            )


def type_name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def rebuild(
    description: Any,
    leaves: Sequence[Any],
    types: Sequence[type] = (),
    *,
    plain: bool = False,
    makers: Mapping[str, Maker] | None = None,
) -> Any:
    """Returns the tree of a checked description.

    Classes in `types` are called with their fields by name, others become Nodes. With `plain`
    others, namedtuples too, become dicts of their fields, or lists where the fields are numbered.
    `makers` are for leaf types.
    """
    known = {type_name(cls): cls for cls in types}
    return _Builder(leaves, known, plain, makers or {}).build(description)


@dataclass(frozen=True)
class _Builder:
    leaves: Sequence[Any]
    types: Mapping[str, type]
    plain: bool
    makers: Mapping[str, Maker]

    def build(self, node: Any) -> Any:
        if node is None:
            return None
        if isinstance(node, int):
            return self.leaves[node]
        children = [self.build(child) for child in node["nodes"]]
        match node["kind"]:
            case "list":
                return children
            case "tuple":
                return tuple(children)
            case "OrderedDict":
                return collections.OrderedDict(zip(node["keys"], children, strict=True))
            case "dict" | "defaultdict":
                return dict(zip(node["keys"], children, strict=True))
        return self._object(node, children)

    def _object(self, node: Any, children: list[Any]) -> Any:
        name = node["type"]
        keys = node["keys"]
        if name in self.types:
            return _call(self.types[name], keys, children)
        fields: Any = dict(zip(keys, children, strict=True))
        if name in self.makers:
            return self.makers[name](fields)
        if self.plain:
            numbered = keys and keys == list(range(len(children)))
            return children if numbered else fields
        if node["kind"] == "namedtuple":
            short = name.rpartition(":")[2].rpartition(".")[2]
            return _namedtuple(short, tuple(keys))(*children)
        return Node(name, fields)


def _call(cls: type, keys: Sequence[str | int], children: Sequence[Any]) -> Any:
    try:
        if all(isinstance(key, str) for key in keys):
            return cls(**dict(zip(map(str, keys), children, strict=True)))
        return cls(*children)
    except (TypeError, ValueError) as error:
        raise TreeMismatch(
            f"{type_name(cls)} cannot be made of its fields {list(keys)}: {error}; pass a `like`"
            " that holds one instead",
            expected=type_name(cls),
            found=str(list(keys)),
        ) from error


@functools.lru_cache(256)
def _namedtuple(name: str, fields: tuple[str, ...]) -> type:
    is_name = name.isidentifier() and not keyword.iskeyword(name)
    return collections.namedtuple(name if is_name else "Tuple", fields, rename=True)


def check_description(node: Any, leaf_count: int, path: str) -> None:
    """Raises HostileCheckpoint unless `describe` can have made this description.

    It has each leaf once and in order.
    """
    if _check(node, 0, 0, path) != leaf_count:
        raise HostileCheckpoint.at(
            path, f"the tree and its list of {leaf_count} leaves do not belong together"
        )


def _check(node: Any, done: int, depth: int, path: str) -> int:
    if node is None:
        return done
    if type(node) is int and node == done:
        return done + 1
    if depth > MAX_DEPTH or not isinstance(node, dict) or not _is_node(node):
        raise HostileCheckpoint.at(path, "the tree's description is not one that holdfast writes")
    for child in node["nodes"]:
        done = _check(child, done, depth + 1, path)
    return done


def _is_node(node: dict[str, Any]) -> bool:
    kind = node.get("kind")
    nodes = node.get("nodes")
    keys = node.get("keys")
    if not isinstance(nodes, list):
        return False
    if kind in ("list", "tuple"):
        return node.keys() == _SEQUENCE
    if kind not in _KEYED or not isinstance(keys, list) or len(keys) != len(nodes):
        return False
    types = set(map(type, keys))
    if not types <= _KEY_TYPES or len(set(keys)) != len(keys):
        return False
    if kind not in _MAPPING_KINDS:
        return isinstance(node.get("type"), str) and len(node) == 4
    # jax sorts the keys of all but an OrderedDict, so none was saved with keys of two types.
    return node.keys() == _MAPPING and (kind == "OrderedDict" or len(types) < 2)
