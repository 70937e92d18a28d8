"""ProcessSpec and the rules of the MEGASCALE_* variables."""

from __future__ import annotations

import pytest

from holdfast.multihost import ProcessSpec

SPEC = ProcessSpec(
    process_id=3,
    num_processes=4,
    coordinator="10.0.0.1:4321",
    job_id="j",
    attempt=2,
    slice_id=1,
    num_slices=2,
)
STALE = {
    "MEGASCALE_NUM_SLICES": "3",
    "MEGASCALE_SLICE_ID": "2",
    "MEGASCALE_COORDINATOR_ADDRESS": "10.9.9.9",
    "MEGASCALE_PORT": "9999",
    "HOME": "/root",
}


def test_the_environment_carries_all_of_it() -> None:
    """from_env reads back exactly what to_env wrote, every field set or not."""
    full = ProcessSpec(
        process_id=0,
        num_processes=1,
        coordinator="[::1]:80",
        token_file="t",
        tls_cert="c",
        tls_key="k",
        tls_ca="a",
        slice_address="h:1",
        host_address="10.0.0.2",
        local_rank=1,
        local_count=2,
        launched_ms=1_790_000_000_000,
    )
    assert ProcessSpec.from_env(SPEC.to_env()) == SPEC
    assert ProcessSpec.from_env(full.to_env()) == full
    assert SPEC.to_env() == {
        "HOLDFAST_JOB_ID": "j",
        "HOLDFAST_ATTEMPT": "2",
        "HOLDFAST_PROCESS_ID": "3",
        "HOLDFAST_NUM_PROCESSES": "4",
        "HOLDFAST_COORDINATOR": "10.0.0.1:4321",
        "HOLDFAST_SLICE_ID": "1",
        "HOLDFAST_NUM_SLICES": "2",
        "JAX_COORDINATOR_ADDRESS": "10.0.0.1:4321",
        "JAX_COORDINATOR_BIND_ADDRESS": "127.0.0.1:0",
    }


def test_an_environment_of_nobody_is_none() -> None:
    """Without a launcher of ours there is no spec; a token file alone makes none."""
    assert ProcessSpec.from_env({}) is None
    assert (
        ProcessSpec.from_env({"HOLDFAST_TOKEN_FILE": "x", "JAX_COORDINATOR_ADDRESS": "a:1"}) is None
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"HOLDFAST_PROCESS_ID": None},
            (
                "HOLDFAST_PROCESS_ID is not set, but .*HOLDFAST_COORDINATOR.* is: start the process"
                " with `holdfast run`"
            ),
        ),
        (
            {"HOLDFAST_NUM_PROCESSES": "four"},
            "HOLDFAST_NUM_PROCESSES='four': expected a whole number",
        ),
        (
            {"HOLDFAST_PROCESS_ID": "4"},
            "process_id=4 with num_processes=4: expected 0 <= process_id < num_processes",
        ),
        ({"HOLDFAST_COORDINATOR": "10.0.0.1"}, "coordinator='10.0.0.1': expected HOST:PORT"),
        (
            {"HOLDFAST_COORDINATOR": "unix:here"},
            "coordinator='unix:here': expected unix: and an absolute path",
        ),
        (
            {"HOLDFAST_COORDINATOR": "unix:/s", "HOLDFAST_SLICE_ADDRESS": ""},
            "num_slices=2: slices need a slice_address to meet at",
        ),
        ({"HOLDFAST_NUM_SLICES": "3"}, "num_processes=4 in num_slices=3: a slice is incomplete"),
        (
            {"HOLDFAST_SLICE_ID": "0"},
            (
                "process_id=3 reports slice_id=0, expected 1: sort the processes by slice and"
                " worker, 2 a slice"
            ),
        ),
        ({"HOLDFAST_ATTEMPT": "-1"}, "attempt=-1: expected 0 or more"),
    ],
)
def test_a_malformed_environment_is_named(changes: dict[str, str | None], message: str) -> None:
    """Every variable that is missing or does not fit is named with its value and what was
    expected.
    """
    environment = {
        key: value for key, value in (SPEC.to_env() | changes).items() if value is not None
    }
    with pytest.raises(ValueError, match=message):
        ProcessSpec.from_env(environment)


@pytest.mark.parametrize(
    ("before", "address", "after"),
    [
        ({"http_proxy": "p:1"}, "c:2", "c"),
        ({"http_proxy": "p:1", "no_proxy": "a,b"}, "c:2", "a,b,c"),
        ({"grpc_proxy": "p:1", "no_proxy": "a", "no_grpc_proxy": "b"}, "c:2", "b,c"),
        ({"https_proxy": "p:1"}, "[::1]:2", "::1"),
        ({"https_proxy": "p:1", "no_grpc_proxy": "c"}, "c:2", "c"),
        ({"http_proxy": "p:1"}, "unix:/c", None),
        ({"http_proxy": ""}, "c:2", None),
        ({"no_proxy": "a"}, "c:2", None),
    ],
)
def test_a_coordinator_is_put_past_proxies(
    before: dict[str, str], address: str, after: str | None
) -> None:
    """For gRPC alone, once, and beside what is past them already."""
    environment = dict(before)
    spec = ProcessSpec(process_id=0, num_processes=1, coordinator=address)
    for _ in range(2):
        spec.bypass_proxies(environment)
        expected = {} if after is None else {"no_grpc_proxy": after}
        assert environment == before | expected


def test_stale_slices_become_the_launchers() -> None:
    """In a job of two slices all four stale values are replaced, the port too, each with one line;
    nothing else is touched.
    """
    environment = dict(STALE)
    lines = SPEC.set_slices(environment)
    assert environment == {
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": "1",
        "MEGASCALE_COORDINATOR_ADDRESS": "10.0.0.1",
        "MEGASCALE_PORT": "8081",
        "HOME": "/root",
    }
    assert lines == [
        "MEGASCALE_NUM_SLICES: '3' -> '2'",
        "MEGASCALE_SLICE_ID: '2' -> '1'",
        "MEGASCALE_COORDINATOR_ADDRESS: '10.9.9.9' -> '10.0.0.1'",
        "MEGASCALE_PORT: '9999' -> '8081'",
    ]
    after = dict(environment)
    assert SPEC.set_slices(environment) == []
    assert environment == after


def test_a_job_with_one_slice_has_none() -> None:
    """With one slice left, all four are removed, each with one line."""
    environment = dict(STALE)
    lines = ProcessSpec(process_id=0, num_processes=2, coordinator="h:1").set_slices(environment)
    assert environment == {"HOME": "/root"}
    assert len(lines) == 4
    assert lines[0] == "MEGASCALE_NUM_SLICES: '3' -> removed, the job has one slice"


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("rank0", ("rank0", "8081")),
        ("rank0:7000", ("rank0", "7000")),
        ("[fe80::1]:7000", ("[fe80::1]", "7000")),
        ("fe80::1", ("fe80::1", "8081")),
    ],
)
def test_the_slices_meet_at_rank_0(address: str, expected: tuple[str, str]) -> None:
    """The launcher's address for the slices wins over the coordinator's host; its port over 8081. A
    first value is no replacement.
    """
    spec = ProcessSpec(
        process_id=0, num_processes=2, coordinator="c:1", num_slices=2, slice_address=address
    )
    environment: dict[str, str] = {}
    assert spec.set_slices(environment) == []
    assert (environment["MEGASCALE_COORDINATOR_ADDRESS"], environment["MEGASCALE_PORT"]) == expected
