"""Who a process is: arguments, a launcher's environment, what jax detects."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from holdfast.multihost import ProcessSpec
from holdfast.multihost.start.discovery import DiscoveredProcess, discover_process

SPEC = ProcessSpec(process_id=1, num_processes=2, coordinator="c:1", job_id="j", attempt=3)
CLUSTERS = (
    "HOLDFAST_",
    "SLURM_",
    "OMPI_",
    "JOB_",
    "KUBERNETES_",
    "JAX_",
    "TPU_",
    "CLOUD_TPU",
    "MEGASCALE_",
)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Takes every cluster's variables away."""
    for key in [key for key in os.environ if key.startswith(CLUSTERS)]:
        monkeypatch.delenv(key)
    return monkeypatch


def test_a_spec_allows_no_other_argument() -> None:
    """Whoever gives a whole spec speaks as a launcher; a part beside it is a mistake."""
    assert discover_process(SPEC, {}, [0], 1.0) == DiscoveredProcess(SPEC, True, [0])
    with pytest.raises(ValueError, match=r"initialize\(\) takes a spec or process_id, not both"):
        discover_process(SPEC, {"process_id": 1}, None, 1.0)


def test_the_environment_fills_in_what_lacks(
    environment: pytest.MonkeyPatch,
) -> None:
    """An argument beats the environment; the rest of the spec is the launcher's."""
    for key, value in SPEC.to_env().items():
        environment.setenv(key, value)
    assert discover_process(None, {}, None, 1.0) == DiscoveredProcess(SPEC, True)
    found = discover_process(None, {"coordinator": "other:2"}, None, 1.0)
    assert found.launched and found.spec is not None
    assert (found.spec.coordinator, found.spec.process_id, found.spec.attempt) == ("other:2", 1, 3)


def test_all_three_arguments_need_no_launcher(environment: pytest.MonkeyPatch) -> None:
    """The three of jax.distributed.initialize are enough, and win over a launcher's environment."""
    for key, value in SPEC.to_env().items():
        environment.setenv(key, value)
    given = {"coordinator": "d:4", "num_processes": 3, "process_id": 2}
    assert discover_process(None, given, None, 1.0) == DiscoveredProcess(
        ProcessSpec(coordinator="d:4", num_processes=3, process_id=2)
    )


def test_without_any_cluster_there_is_no_spec() -> None:
    """Nothing given and nothing found: one process alone. Half of it given: an error that names the
    rest.
    """
    assert discover_process(None, {}, None, 1.0) == DiscoveredProcess(None)
    message = (
        "initialize() knows {'process_id': 0} but not coordinator, num_processes: give them, or"
        " start with `holdfast run`"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        discover_process(None, {"process_id": 0}, None, 1.0)


def test_what_jax_detects_of_slurm_is_taken(environment: pytest.MonkeyPatch) -> None:
    """Inside a Slurm step jax knows the coordinator, the count and the number; no launcher of ours
    has said so.
    """
    step = {
        "SLURM_JOB_ID": "77",
        "SLURM_NTASKS": "4",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NODELIST": "n[1-2]",
    }
    for key, value in step.items():
        environment.setenv(key, value)
    found = discover_process(None, {}, None, 1.0)
    assert found.spec is not None and not found.launched
    assert (found.spec.process_id, found.spec.num_processes) == (3, 4)
    assert found.spec.coordinator.startswith("n1:")


@pytest.mark.parametrize("answers", [True, False])
def test_slurm_reads_its_list_of_nodes(
    environment: pytest.MonkeyPatch, tmp_path: Path, answers: bool
) -> None:
    """jax takes rack[1-2]n[3-4] for rack1; where Slurm does not say, an error has the list."""
    nodes = "rack[1-2]n[3-4],login"
    step = {
        "SLURM_JOB_ID": "77",
        "SLURM_NTASKS": "4",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NODELIST": nodes,
    }
    for key, value in step.items():
        environment.setenv(key, value)
    stub = tmp_path / "scontrol"
    says = '[ "$*" = "show hostnames $SLURM_STEP_NODELIST" ] && printf "rack1n3\\nrack1n4\\n"'
    stub.write_text(f"#!/bin/sh\n{says if answers else 'exit 1'}\n")
    stub.chmod(0o755)
    environment.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    if answers:
        found = discover_process(None, {}, None, 1.0)
        assert found.spec is not None and found.spec.coordinator.startswith("rack1n3:")
    else:
        with pytest.raises(
            ValueError,
            match=(
                r"scontrol show hostnames 'rack\[1-2\]n\[3-4\],login' failed: .*; give coordinator="
            ),
        ):
            discover_process(None, {}, None, 1.0)
    given = discover_process(None, {"coordinator": "host:1"}, None, 1.0)
    assert given.spec is not None and given.spec.coordinator == "host:1"
