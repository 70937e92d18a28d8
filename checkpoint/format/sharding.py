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
    spec = ", ".join("+".join(axes) if axes else "-" for axes in description["spec"])
    spec = f"({spec})" if any(description["spec"]) else "replicated"
    return f"{spec} on " + " ".join(
        f"{axis}={size}"
        for axis, size in zip(description["axes"], description["sizes"], strict=True)
    )


def axes_of(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes of one entry of a PartitionSpec."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def describe_sharding(sharding: Sharding) -> Any:
    """Returns a sharding in JSON types, the same on every process: for `show`, and for SAVED."""
    if isinstance(sharding, NamedSharding):
        mesh = sharding.mesh
        spec = [list(axes_of(entry)) for entry in sharding.spec]
        return {
            "axes": list(mesh.axis_names),
            "sizes": list(mesh.devices.shape),
            "devices": [int(device.id) for device in mesh.devices.reshape(-1).tolist()],
            "spec": spec,
        }
    if isinstance(sharding, SingleDeviceSharding):
        device: Any = next(iter(sharding.device_set))
        return {"device": device.id}
    return {"other": str(sharding)}


def parse_sharding(description: Any) -> Any:
    """Returns a description if it is one that `describe_sharding` makes, None included; raises
    ValueError for another.
    """
    if description is None or (
        isinstance(description, dict) and (set(description) in ({"device"}, {"other"}))
    ):
        return description
    if set(description) != {"axes", "sizes", "devices", "spec"} or not all(
        isinstance(description[key], list) for key in description
    ):
        raise ValueError("a sharding is not one that holdfast writes")
    return description
