"""The environment of a worker process."""

from __future__ import annotations

import dataclasses

import pytest

from holdfast.coordination.names import DECIDES
from holdfast.launch.workers.environment import own_devices, worker_env
from holdfast.multihost import ProcessSpec

SPEC = ProcessSpec(process_id=1, num_processes=2, coordinator="c:1", job_id="j", attempt=3)


def test_it_is_the_base_with_the_spec() -> None:
    """What was there stays, a spec of an earlier attempt is replaced, and the base is not
    touched.
    """
    base = {"HOME": "/root", "HOLDFAST_ATTEMPT": "1"}
    env, lines = worker_env(base, SPEC)
    assert env == {"HOME": "/root", "PYTHONUNBUFFERED": "1"} | SPEC.to_env()
    assert (lines, base) == ([], {"HOME": "/root", "HOLDFAST_ATTEMPT": "1"})


def test_an_outer_job_says_nothing_of_this_one() -> None:
    """A process of a job may start a launcher. Certificates that no job has set are the user's."""
    outer = dataclasses.replace(
        SPEC, slice_address="h", local_rank=0, host_address="h", launched_ms=1, token_file="t"
    )
    assert worker_env(outer.to_env(), SPEC)[0] == {"PYTHONUNBUFFERED": "1"} | SPEC.to_env()
    own = {"HOLDFAST_TLS_CERT": "mine"}
    assert own.items() < worker_env(own, SPEC)[0].items()


def test_the_coordinator_is_past_proxies() -> None:
    """For a program that starts jax by itself, too."""
    env, _ = worker_env({"http_proxy": "p:1", "no_proxy": "a"}, SPEC)
    assert (env["http_proxy"], env["no_proxy"], env["no_grpc_proxy"]) == ("p:1", "a", "a,c")


def test_a_buffered_output_is_the_users_choice() -> None:
    """PYTHONUNBUFFERED is a default: who has set it keeps it."""
    assert worker_env({"PYTHONUNBUFFERED": ""}, SPEC)[0]["PYTHONUNBUFFERED"] == ""


def test_stale_slices_are_replaced_and_named() -> None:
    """With one slice, MEGASCALE_* variables of an earlier group are gone, with one line each."""
    env, lines = worker_env({"MEGASCALE_NUM_SLICES": "3", "MEGASCALE_PORT": "1"}, SPEC)
    assert not any(key.startswith("MEGASCALE_") for key in env)
    assert lines == [
        "MEGASCALE_NUM_SLICES: '3' -> removed, the job has one slice",
        "MEGASCALE_PORT: '1' -> removed, the job has one slice",
    ]


def test_a_process_has_its_share_of_gpus() -> None:
    """Of eight GPUs the second of four processes gets two; jax reads the variable, and one that is
    set stays.
    """
    spec = dataclasses.replace(SPEC, local_rank=1)
    base = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
    env, _ = worker_env(base, spec, share_of=4)
    assert (env["HOLDFAST_LOCAL_RANK"], env["JAX_LOCAL_DEVICE_IDS"]) == ("1", "2,3")
    assert (
        worker_env(base | {"JAX_LOCAL_DEVICE_IDS": "7"}, spec, share_of=4)[0][
            "JAX_LOCAL_DEVICE_IDS"
        ]
        == "7"
    )
    assert "JAX_LOCAL_DEVICE_IDS" not in worker_env(base, spec)[0]


@pytest.mark.parametrize(
    ("environment", "share_of", "devices"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 2, "1"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c,GPU-d"}, 2, "2,3"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, 2, ""),
        ({"CUDA_VISIBLE_DEVICES": ""}, 2, ""),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 1, ""),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_GPUS_ON_NODE": "4"}, 2, "2,3"),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_ON_NODE": "4"}, 2, ""),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_PER_TASK": "2"}, 2, ""),
    ],
    ids=[
        "one each",
        "by name",
        "too few",
        "none",
        "alone",
        "slurm, all see all",
        "slurm, bound",
        "slurm, per task",
    ],
)
def test_gpus_are_divided_where_all_see_the_same(
    environment: dict[str, str], share_of: int, devices: str
) -> None:
    """What Slurm has bound to a task already is not divided again."""
    assert own_devices(environment, 1, share_of) == devices


def test_only_who_decides_says_so() -> None:
    """Another launcher's word, inherited, is none of this one's."""
    assert worker_env({DECIDES: "1"}, SPEC)[0].keys().isdisjoint({DECIDES})
    assert worker_env({}, SPEC, decides=True)[0][DECIDES] == "1"
