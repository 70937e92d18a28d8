"""What Ray reports of its machines, as nodes that the placement understands."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from holdfast.launch import Fatal
from holdfast.launch.engines.ray.cluster import load_ray, node_from_ray
from holdfast.launch.engines.ray.placement import Node

INFO = {"NodeID": "abc", "NodeManagerAddress": "10.0.0.7", "Alive": True}


@pytest.mark.parametrize(
    ("labels", "draining", "expected"),
    [
        (None, {}, Node("abc", "10.0.0.7", {"CPU": 2.0})),
        ({}, {"other": 5}, Node("abc", "10.0.0.7", {"CPU": 2.0})),
        (None, {"abc": 0}, Node("abc", "10.0.0.7", {"CPU": 2.0}, draining=True)),
        (
            None,
            {"abc": 90_000},
            Node("abc", "10.0.0.7", {"CPU": 2.0}, draining=True, deadline_unix_s=90.0),
        ),
        (
            {"ray.io/tpu-slice-name": "s9", "ray.io/tpu-worker-id": "3"},
            {},
            Node("abc", "10.0.0.7", {"CPU": 2.0}, slice_name="s9", worker_id=3),
        ),
    ],
    ids=["no labels", "another drains", "drains", "drains with a deadline", "a host of a slice"],
)
def test_a_machine_is_as_ray_reports_it(
    labels: dict[str, str] | None, draining: dict[str, int], expected: Node
) -> None:
    """Labels give slice and worker; a drain's deadline is in milliseconds there and in seconds
    here, 0 meaning none.
    """
    info: dict[str, Any] = INFO | {"Labels": labels}
    assert node_from_ray(info, {"CPU": 2.0}, draining) == expected


def test_a_worker_id_is_a_number() -> None:
    """No restart mends a label: the error names machine, label and value."""
    info: dict[str, Any] = INFO | {"Labels": {"ray.io/tpu-worker-id": "first"}}
    with pytest.raises(
        Fatal,
        match=(
            r"node abc at 10\.0\.0\.7 has label ray\.io/tpu-worker-id='first'; expected a whole"
            r" number"
        ),
    ):
        node_from_ray(info, {}, {})


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_extra_is_named() -> None:
    """The error says what to install."""
    with pytest.raises(
        ImportError, match=r"Ray is not installed: pip install 'holdfast-jax\[ray\]'"
    ):
        load_ray()
