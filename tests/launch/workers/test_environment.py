"""The environment of a worker process."""

from __future__ import annotations

from holdfast.launch.workers.environment import worker_env
from holdfast.multihost import ProcessSpec

SPEC = ProcessSpec(process_id=1, num_processes=2, coordinator="c:1", job_id="j", attempt=3)


def test_it_is_the_base_with_the_spec() -> None:
    """What was there stays, a spec of an earlier attempt is replaced, and the base is not touched."""
    base = {"HOME": "/root", "HOLDFAST_ATTEMPT": "1"}
    env, lines = worker_env(base, SPEC)
    assert env == {"HOME": "/root", "PYTHONUNBUFFERED": "1"} | SPEC.to_env()
    assert (lines, base) == ([], {"HOME": "/root", "HOLDFAST_ATTEMPT": "1"})


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
