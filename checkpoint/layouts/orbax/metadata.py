"""Orbax's JSON files and names, parsed: pure functions from bytes to values. docs/from-orbax.md
describes the layout.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from ...arrays.sharding import AXIS_TYPES, MEMORY_KIND, REDUCED, axes_of, parse_sharding
from ...errors import Corrupt, HostileCheckpoint

CHECKPOINT_METADATA = "_CHECKPOINT_METADATA"
# How the names of handlers of trees end: those of v0, and v1's.
TREE_HANDLERS = ("PyTreeCheckpointHandler", "StandardCheckpointHandler", "PyTreeHandler")
TREE_METADATA = "_METADATA"
SHARDING = "_sharding"
_AXIS_TYPE = "AxisType."  # before the name of an axis type
STRINGS = "_strings.json"
MANIFEST = "manifest.ocdbt"
ARRAY_METADATAS = "array_metadatas"
COMMITTED = "commit_success.txt"
MARKER = "orbax.checkpoint"
DELETION = "_CHECKPOINT_DELETION"
TEMPORARY = ".orbax-checkpoint-tmp"
JSON_FILES = ("metadata", "data.json", "metrics")  # v0's JSON item, v1's, and the metrics
MAX_DEPTH = 200  # keys in one path; Orbax's own trees have a few

_STEP = re.compile(r"(?:.*_)?(\d{1,18})\Z")
_EMPTIES: Mapping[str, type] = {"Dict": dict, "List": list, "Tuple": tuple}
_PRNG_TAGS = {"fry": "threefry2x32", "urbg": "unsafe_rbg"}
JsonObject: TypeAlias = dict[str, Any]
Key: TypeAlias = tuple[str, bool]  # whether it is an index
Keys: TypeAlias = tuple[Key, ...]


def leaf_name(keys: Keys) -> str:
    """Returns what the array of a leaf is called: its keys, joined by dots."""
    return ".".join([key for key, _ in keys])


class StoredLeaf(NamedTuple):
    """One line of `_METADATA`: `value_type` is Orbax's word for its kind; an `empty` one has no
    data.
    """

    keys: Keys
    value_type: str
    empty: bool

    @property
    def name(self) -> str:
        return leaf_name(self.keys)


@dataclass(frozen=True)
class TreeMetadata:
    """`_METADATA`, parsed. The flags are None where the file does not say."""

    leaves: tuple[StoredLeaf, ...]
    use_ocdbt: bool | None
    use_zarr3: bool
    fills: bool

    @property
    def is_single(self) -> bool:
        """Whether it is one array, which Orbax keeps under a name of its own, or a dict with a key
        of that name.
        """
        return [leaf.keys for leaf in self.leaves] == [(("checkpoint", False),)]


def parse_json(data: bytes, file: str) -> Any:
    """Parses a JSON file of Orbax's; raises Corrupt naming the file."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Corrupt(
            f"{file} is not JSON: {error}; the checkpoint is damaged", file=file
        ) from None


def parse_tree_metadata(data: bytes, file: str) -> TreeMetadata:
    """Parses `_METADATA`; raises Corrupt naming the file when it is not one."""
    value = parse_json(data, file)
    if not isinstance(value, dict) or not isinstance(value.get("tree_metadata"), dict):
        raise Corrupt(
            f"{file} has no 'tree_metadata'; it does not describe a tree of Orbax's", file=file
        )
    entries = value["tree_metadata"].items()
    return TreeMetadata(
        tuple([_parse_leaf(name, entry, file) for name, entry in entries]),
        value.get("use_ocdbt"),
        bool(value.get("use_zarr3")),
        not value.get("store_array_data_equal_to_fill_value", False),
    )


def _parse_leaf(name: str, entry: Any, file: str) -> StoredLeaf:
    try:
        keys = tuple([(str(key["key"]), key["key_type"] == 1) for key in entry["key_metadata"]])
        about = entry["value_metadata"]
        value_type = str(about.get("value_type", "jax.Array"))
        empty = bool(about.get("skip_deserialize", False))
    except (KeyError, TypeError, AttributeError):
        raise Corrupt(
            f"{file} describes the leaf {name} in a way that Orbax does not", file=file, leaf=name
        ) from None
    if len(keys) > MAX_DEPTH:
        raise HostileCheckpoint(
            f"{file} has a leaf {len(keys)} keys deep; at most {MAX_DEPTH} are read", file=file
        )
    return StoredLeaf(keys, value_type, empty)


def build_tree(leaves: Mapping[Keys, Any]) -> Any:
    """Returns the nested dicts and lists that `leaves`, by their keys, make up; one without keys is
    the tree itself.
    """
    if list(leaves) == [()]:
        return leaves[()]
    root: dict[Key, Any] = {}
    for keys, value in leaves.items():
        level = root
        for key in keys[:-1]:
            level = level.setdefault(key, {})
        level[keys[-1]] = (value,)  # a dict is a level
    return _finish(root)


def _finish(level: Any) -> Any:
    if type(level) is tuple:
        return level[0]
    if level and all(index and key.isdecimal() for key, index in level):
        return [
            _finish(value) for _, value in sorted(level.items(), key=lambda pair: int(pair[0][0]))
        ]
    return {key: _finish(value) for (key, _), value in level.items()}


def empty_value(value_type: str) -> Any:
    """Returns the container (or None) that an entry without data stands for."""
    container = _EMPTIES.get(value_type)
    return None if container is None else container()


def parse_array_metadata(data: bytes, file: str) -> dict[str, str]:
    """Returns the PRNG implementation of each typed key, by the leaf's name, from one file of
    `array_metadatas`.
    """
    found: dict[str, str] = {}
    if (
        b'"random_key_impl"' not in data
    ):  # most trees have no keys: nothing else of the file is read
        return found
    value = parse_json(data, file)
    for entry in value.get("array_metadatas", ()) if isinstance(value, dict) else ():
        about = entry.get("array_metadata", {})
        implementation = (about.get("ext_metadata") or {}).get("random_key_impl")
        if implementation:
            found[str(about.get("param_name"))] = prng_name(implementation)
    return found


def prng_name(implementation: Any) -> str:
    """Returns jax's name of a PRNG implementation, which old files call by its tag."""
    return _PRNG_TAGS.get(implementation, str(implementation))


def read_shardings(coded: Mapping[str, Any]) -> JsonObject:
    """Returns each leaf's saved sharding, by its name, as our own record says it; leaves that it
    cannot be read for are left out. `coded` is the content of `_sharding`.
    """
    found: JsonObject = {}
    known: JsonObject = {}  # most leaves have the sharding of another one
    for name, text in coded.items():
        with contextlib.suppress(ValueError, TypeError):
            if text not in known:
                known[text] = read_sharding(json.loads(text))
            found[base64.urlsafe_b64decode(name).decode()] = known[text]
    return found


def read_sharding(about: Any) -> Any:
    """Returns a saved sharding as our own record says it, None for one that it cannot."""
    try:
        if about["sharding_type"] == "SingleDeviceSharding":
            device = int(str(about["device_str"]).rpartition(":")[2].rpartition("_")[2])
            own = {MEMORY_KIND: about[MEMORY_KIND]} if MEMORY_KIND in about else {}
            return parse_sharding({"device": device} | own)
        if about["sharding_type"] != "NamedSharding":
            return None
        spec = [list(axes_of(axis)) for axis in about["partition_spec"]]
        sizes = [int(size) for size in about["shape"]]
        devices = list(range(math.prod(sizes)))
        if about.get("device_mesh"):
            devices = _flat(about["device_mesh"]["mesh"])
        description = {
            "axes": [str(axis) for axis in about["axis_names"]],
            "sizes": sizes,
            "devices": devices,
            "spec": spec,
        }
        axis_types = [str(name).removeprefix(_AXIS_TYPE) for name in about.get(AXIS_TYPES) or ()]
        if any(name != "Auto" for name in axis_types):
            description[AXIS_TYPES] = axis_types
        own = {name: about[name] for name in (REDUCED, MEMORY_KIND) if name in about}
        return parse_sharding(description | own)
    except (KeyError, TypeError, ValueError):
        return None


def sharding_json(
    description: Any, device_names: Mapping[int, str], usual_device: int
) -> JsonObject:
    """Returns a sharding of a record as Orbax writes it, on the usual device where it has no words
    for it.

    What Orbax does not know, a kind of memory and reduced axes, is there for this reader.
    """
    description = description or {}
    own = {name: description[name] for name in (REDUCED, MEMORY_KIND) if name in description}
    if "spec" not in description:
        device = description.get("device", usual_device)
        name = device_names.get(device, device_names[usual_device])
        return {"sharding_type": "SingleDeviceSharding", "device_str": name} | own
    axis_types = description.get(AXIS_TYPES, ["Auto"] * len(description["axes"]))
    mesh: Any = [{"id": number} for number in description["devices"]]
    for size in reversed(description["sizes"][1:]):
        mesh = [mesh[i : i + size] for i in range(0, len(mesh), size)]
    return {
        "sharding_type": "NamedSharding",
        "shape": description["sizes"],
        "axis_names": description["axes"],
        "axis_types": [f"{_AXIS_TYPE}{name}" for name in axis_types],
        "partition_spec": [_axis_json(axes) for axes in description["spec"]],
        "device_mesh": {"mesh": mesh},
    } | own


def _axis_json(axes: list[str]) -> Any:
    """Returns an entry of a partition's spec: a list only of several axes."""
    if len(axes) > 1:
        return axes
    return axes[0] if axes else None


def _flat(mesh: Any) -> list[int]:
    if isinstance(mesh, list):
        return [number for row in mesh for number in _flat(row)]
    return [int(mesh["id"])]


def step_of(name: str) -> int | None:
    """Returns the step in a folder's name, `[prefix_]step` with or without leading zeros; None
    where there is none.
    """
    match = _STEP.match(name)
    return int(match.group(1)) if match and TEMPORARY not in name else None
