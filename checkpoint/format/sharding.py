"""Shardings as the record has them: described, parsed, and shown to people."""

from __future__ import annotations

from typing import Any

from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding


def show_sharding(facts: Any) -> str:
    """Returns a saved sharding for people."""
    if facts is None:
        return "local"
    if "device" in facts:
        return f"device {facts['device']}"
    if "spec" not in facts:
        return str(facts.get("other", facts))
    spec = ", ".join("+".join(axes) if axes else "-" for axes in facts["spec"])
    spec = f"({spec})" if any(facts["spec"]) else "replicated"
    return f"{spec} on " + " ".join(f"{axis}={size}" for axis, size in zip(facts["axes"], facts["sizes"], strict=True))


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


def parse_sharding(facts: Any) -> Any:
    """Returns a sharding if it is one that we write; it is only shown, and used by SAVED."""
    if facts is None or (isinstance(facts, dict) and (set(facts) in ({"device"}, {"other"}))):
        return facts
    if set(facts) != {"axes", "sizes", "devices", "spec"} or not all(isinstance(facts[key], list) for key in facts):
        raise ValueError("a sharding is not one that holdfast writes")
    return facts
