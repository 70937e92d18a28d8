"""Shardings as the record has them: described, parsed, and shown to people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from ..errors import UnsupportedLeaf, leaf_at

MEMORY_KIND = "memory_kind"  # the member of a description whose array is in no default memory
AXIS_TYPES = "axis_types"  # of the mesh, where not all are Auto
REDUCED = "reduced"  # the mesh axes over which an array is the sum of what is to come
# Of what each member of a named sharding is a list.
_MEMBERS = {
    "axes": str,
    "sizes": int,
    "devices": int,
    "spec": list,
    AXIS_TYPES: str,
    REDUCED: str,
}


def show_sharding(description: Any) -> str:
    """Returns a saved sharding for people."""
    if description is None:
        return "local"
    if MEMORY_KIND in description:
        rest = dict(description)
        kind = rest.pop(MEMORY_KIND)
        return f"{show_sharding(rest)} in {kind}"
    if "device" in description:
        return f"device {description['device']}"
    if "spec" not in description:
        return str(description.get("other", description))
    spec = "replicated"
    if any(description["spec"]):
        spec = "(" + ", ".join("+".join(axes) or "-" for axes in description["spec"]) + ")"
    axes = zip(description["axes"], description["sizes"], strict=True)
    shown = f"{spec} on " + " ".join(f"{axis}={size}" for axis, size in axes)
    if AXIS_TYPES in description:
        shown += f" ({', '.join(description[AXIS_TYPES])})"
    if REDUCED in description:
        shown += f", reduced over {'+'.join(description[REDUCED])}"
    return shown


def axes_of(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes of one entry of a PartitionSpec."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return tuple(entry) if isinstance(entry, tuple | list) else (entry,)


def spec_of_axes(sharding: NamedSharding, rank: int) -> tuple[Any, ...]:
    """Returns the entries of a spec for the axes that an array has."""
    spec: Any = sharding.spec
    if spec.reduced or spec.unreduced:  # jax has such a spec not iterated over
        spec = spec.update(reduced=frozenset(), unreduced=frozenset())
    # jax takes a spec with more Nones than that, as P(None) of a scalar.
    return tuple(spec)[:rank]


def refuse_partial_sums(path: str, sharding: Sharding) -> None:
    """Raises UnsupportedLeaf for an array whose shards are not added up yet: its numbers are on no
    device.
    """
    if isinstance(sharding, NamedSharding) and sharding.spec.unreduced:
        over = "+".join(sorted(map(str, sharding.spec.unreduced)))
        raise UnsupportedLeaf(
            f"{leaf_at(path)} is unreduced over {over}: each device has a part of its sum; add it"
            " up before it is saved: jax.sharding.reshard(array, jax.P(...))",
            leaf=path,
            found=str(sharding),
        )


def _text_axes(mesh: Any) -> dict[Any, str]:
    """Returns the names of a mesh's axes as text, and alike on every process.

    Any object may name an axis; that of `jax.pmap` shows its address.
    """
    return {
        name: name if isinstance(name, str) else f"#{number}"
        for number, name in enumerate(mesh.axis_names)
    }


def has_text_axes(sharding: Sharding) -> bool:
    """Says whether the axes of a sharding's mesh are named by texts, if it has one."""
    names = sharding.mesh.axis_names if isinstance(sharding, NamedSharding) else ()
    return all(isinstance(name, str) for name in names)


def concrete_sharding(sharding: Sharding) -> Sharding | None:
    """Returns a sharding on devices: that of an abstract mesh lies on the mesh that is set.

    None where it is of no mesh at all. Raises ValueError where the abstract mesh is another one, or
    none is set.
    """
    if not isinstance(sharding, NamedSharding) or isinstance(sharding.mesh, Mesh):
        return sharding
    wanted = sharding.mesh
    if wanted.empty:
        return None
    current = jax.sharding.get_mesh()
    if current.shape_tuple != wanted.shape_tuple:
        found = "none is set" if current.empty else f"{_show_mesh(current)} is set"
        raise ValueError(
            f"its sharding is of an abstract mesh, {_show_mesh(wanted)}, and {found}; call this"
            " under jax.set_mesh(mesh), or give shardings on a Mesh"
        )
    return NamedSharding(current, sharding.spec, memory_kind=sharding.memory_kind)


def _show_mesh(mesh: Any) -> str:
    return " ".join(f"{axis}={size}" for axis, size in mesh.shape_tuple)


def _spec(axes: Sequence[Sequence[str]], reduced: Sequence[str]) -> Any:
    make: Any = PartitionSpec
    return make(*(tuple(entry) or None for entry in axes), reduced=frozenset(reduced))


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
        text = _text_axes(mesh)
        spec = spec_of_axes(sharding, rank)
        description: dict[str, Any] = {
            "axes": list(text.values()),
            "sizes": list(mesh.devices.shape),
            "devices": [int(device.id) for device in mesh.devices.reshape(-1).tolist()],
            "spec": [[text[name] for name in axes_of(entry)] for entry in spec],
        }
        axis_types = [axis_type.name for axis_type in mesh.axis_types]
        if set(axis_types) - {AxisType.Auto.name}:
            description[AXIS_TYPES] = axis_types
        reduced = [text[name] for name in mesh.axis_names if name in sharding.spec.reduced]
        if reduced:
            description[REDUCED] = reduced
        return description
    if isinstance(sharding, SingleDeviceSharding):
        device: Any = next(iter(sharding.device_set))
        return {"device": device.id}
    return {"other": str(sharding)}


def _is_plain(description: dict[str, Any]) -> bool:
    kinds = {name: type(value) for name, value in description.items()}
    return kinds in ({"device": int}, {"other": str})


def _is_named(description: dict[str, Any]) -> bool:
    """Says whether this describes a mesh, and a spec of its axes."""
    # Without types of its axes they are of one type: as many as there are axes.
    members: dict[str, Any] = {AXIS_TYPES: description.get("axes"), REDUCED: []} | description
    return (
        members.keys() == _MEMBERS.keys()
        and all(_are(kind, members[name]) for name, kind in _MEMBERS.items())
        and all(_are(str, entry) for entry in members["spec"])
        and _is_consistent(members)
    )


def _is_consistent(members: dict[str, Any]) -> bool:
    """Says whether the members of a named sharding fit each other."""
    axes = members["axes"]
    used = [axis for entry in (*members["spec"], members[REDUCED]) for axis in entry]
    return (
        len(set(axes)) == len(axes) == len(members["sizes"]) == len(members[AXIS_TYPES])
        and math.prod(members["sizes"]) == len(members["devices"])
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
        rest = dict(description)
        has_kind = type(rest.pop(MEMORY_KIND, "")) is str
        if has_kind and (_is_plain(rest) or _is_named(rest)):
            return description
    raise ValueError("a sharding is not one that holdfast writes")


def make_sharding(description: Any) -> Sharding:
    """Returns the sharding of a description on the devices of this job.

    Raises KeyError, TypeError or ValueError where they do not fit.
    """
    devices = {device.id: device for device in jax.devices()}
    kind = description.get(MEMORY_KIND)
    if "device" in description:
        return SingleDeviceSharding(devices[description["device"]], memory_kind=kind)
    flat = np.array([devices[number] for number in description["devices"]], object)
    axis_types = tuple(AxisType[name] for name in description.get(AXIS_TYPES, ()))
    mesh = Mesh(
        flat.reshape(description["sizes"]), description["axes"], axis_types=axis_types or None
    )
    return NamedSharding(
        mesh, _spec(description["spec"], description.get(REDUCED, ())), memory_kind=kind
    )
