"""Shardings as the record has them: described, parsed, and shown to people."""

from __future__ import annotations

from typing import Any

from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding


def show_sharding(description: Any) -> str:
    """Returns a saved sharding for people."""
    if description is None:
        return "local"
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


def describe_sharding(sharding: Sharding) -> Any:
    """Returns a sharding in JSON types, the same on every process: for `show`, and for SAVED."""
    if isinstance(sharding, NamedSharding):
        mesh = sharding.mesh
        return {
            "axes": list(mesh.axis_names),
            "sizes": list(mesh.devices.shape),
            "devices": [int(device.id) for device in mesh.devices.reshape(-1).tolist()],
            "spec": [list(axes_of(entry)) for entry in sharding.spec],
        }
    if isinstance(sharding, SingleDeviceSharding):
        device: Any = next(iter(sharding.device_set))
        return {"device": device.id}
    return {"other": str(sharding)}


def parse_sharding(description: Any) -> Any:
    """Returns what `describe_sharding` makes, or None; raises ValueError for all else."""
    if description is None:
        return None
    if isinstance(description, dict):
        members = set(description)
        if members in ({"device"}, {"other"}):
            return description
        are_lists = all(isinstance(value, list) for value in description.values())
        if members == {"axes", "sizes", "devices", "spec"} and are_lists:
            return description
    raise ValueError("a sharding is not one that holdfast writes")
