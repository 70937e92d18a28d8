"""Shardings as the record has them: described, parsed, and shown to people."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

MEMORY_KIND = "memory_kind"  # the member of a description whose array is in no default memory


def show_sharding(description: Any) -> str:
    """Returns a saved sharding for people."""
    if description is None:
        return "local"
    if MEMORY_KIND in description:
        rest = {name: value for name, value in description.items() if name != MEMORY_KIND}
        return f"{show_sharding(rest)} in {description[MEMORY_KIND]}"
    if "device" in description:
        return f"device {description['device']}"
    if "spec" not in description:
        return str(description.get("other", description))
    spec = "replicated"
    if any(description["spec"]):
        spec = "(" + ", ".join("+".join(axes) or "-" for axes in description["spec"]) + ")"
    axes = zip(description["axes"], description["sizes"], strict=True)
    return f"{spec} on " + " ".join(f"{axis}={size}" for axis, size in axes)


def axes_of(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes of one entry of a PartitionSpec."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def spec_of_axes(sharding: NamedSharding, rank: int) -> tuple[Any, ...]:
    """Returns the entries of a spec for the axes that an array has."""
    # jax takes a spec with more Nones than that, as P(None) of a scalar.
    return tuple(sharding.spec)[:rank]


def chosen_memory_kind(sharding: Sharding) -> str | None:
    """Returns the kind of memory that a sharding names; None for the default of its devices."""
    kind = sharding.memory_kind
    if kind is None:
        return None
    # A device of another process may be among them: this process asks one of its own.
    device: Any = next(iter(sharding.device_set))
    default = jax.local_devices(backend=device.platform)[0].default_memory().kind
    return None if kind == default else str(kind)


def describe_sharding(sharding: Sharding, rank: int) -> Any:
    """Returns the sharding of an array with `rank` axes in JSON types.

    It is the same on every process: for `show`, and for SAVED.
    """
    description = _describe(sharding, rank)
    kind = chosen_memory_kind(sharding)
    return description if kind is None else description | {MEMORY_KIND: kind}


def _describe(sharding: Sharding, rank: int) -> dict[str, Any]:
    if isinstance(sharding, NamedSharding):
        mesh = sharding.mesh
        return {
            "axes": list(mesh.axis_names),
            "sizes": list(mesh.devices.shape),
            "devices": [int(device.id) for device in mesh.devices.reshape(-1).tolist()],
            "spec": [list(axes_of(entry)) for entry in spec_of_axes(sharding, rank)],
        }
    if isinstance(sharding, SingleDeviceSharding):
        device: Any = next(iter(sharding.device_set))
        return {"device": device.id}
    return {"other": str(sharding)}


def _is_plain(description: dict[str, Any]) -> bool:
    match description:
        case {"device": value}:
            return type(value) is int and len(description) == 1
        case {"other": value}:
            return type(value) is str and len(description) == 1
    return False


def _is_named(description: dict[str, Any]) -> bool:
    """Says whether this describes a mesh, and a spec of its axes."""
    if description.keys() != {"axes", "sizes", "devices", "spec"}:
        return False
    axes = description["axes"]
    sizes = description["sizes"]
    spec = description["spec"]
    if not _are(str, axes) or not _are(int, sizes) or not _are(int, description["devices"]):
        return False
    if not _are(list, spec) or not all(_are(str, entry) for entry in spec):
        return False
    used = [axis for entry in spec for axis in entry]
    return (
        len(set(axes)) == len(axes) == len(sizes)
        and math.prod(sizes) == len(description["devices"])
        and len(set(used)) == len(used)
        and set(used) <= set(axes)
    )


def _are(kind: type, values: Any) -> bool:
    return type(values) is list and all(type(value) is kind for value in values)


def parse_sharding(description: Any) -> Any:
    """Returns what `describe_sharding` makes, or None; raises ValueError for all else."""
    if description is None:
        return None
    if isinstance(description, dict):
        rest = {name: value for name, value in description.items() if name != MEMORY_KIND}
        has_kind = type(description.get(MEMORY_KIND, "")) is str
        if has_kind and (_is_plain(rest) or _is_named(rest)):
            return description
    raise ValueError("a sharding is not one that holdfast writes")
