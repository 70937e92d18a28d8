"""The commands on object stores: real servers over HTTP, on loopback. gs:// has an emulator that
ignores conditions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holdfast.checkpoint import CheckpointManager, Json, load, save
from holdfast.checkpoint.layouts.detect import find_steps, open_checkpoint
from holdfast.checkpoint.steps.object_claims import open_claims
from holdfast.checkpoint.storage.bucket import PART_BYTES, PARTS_AT_ONCE
from holdfast.checkpoint.storage.hedged_reads import READ_BYTES
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.checkpoint.storage.path import StorePath, open_storage
from holdfast.checkpoint.tools.convert import convert
from holdfast.checkpoint.tools.copy import copy_checkpoint, file_sizes
from tests.support.object_servers import (
    BUCKET,
    azure_server,
    gcs_server,
    s3_server,
    small_s3_server,
)
from tests.support.paths import program

HOLDFAST = str(Path(sys.executable).parent / "holdfast")


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, str]]:
    with s3_server() as query, gcs_server():
        yield {"s3": query, "gs": ""}


@pytest.fixture
def run7(tmp_path: Path) -> Path:
    with CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 2, 3):
            state = {
                "params": {"w": jnp.full((8, 8), step), "b": jnp.zeros(3, jnp.bfloat16)},
                "step": step,
                "key": jax.random.key(step),
            }
            manager.save(
                step,
                items={"state": state, "config": Json({"lr": step})},
                metrics={"loss": 1 / step},
            )
            manager.wait_until_finished()
    return tmp_path


def run_every_command(kind: str, query: str, folder: Path, *promise: str) -> None:
    arguments = [str(folder), f"{kind}://{BUCKET}/cli/", query, *promise]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, str(program("store_commands")), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0 and "all done" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_every_command_on_azure(run7: Path) -> None:
    """Each command on a container, from it and to it. Orbax's arrays are refused there."""
    with azure_server() as query:
        run_every_command("az", query, run7)


@pytest.mark.parametrize("kind", [pytest.param("s3", marks=pytest.mark.slow), "gs"])
def test_every_command_there(kind: str, servers: dict[str, str], run7: Path) -> None:
    """Each command on the store, from it and to it; the real Orbax restores what was converted or
    saved there, once copied to a disk.
    """
    promise = ["--single-writer"] if kind == "gs" else []
    run_every_command(kind, servers[kind], run7, *promise)
    if kind == "gs":
        return
    import orbax.checkpoint.experimental.v1 as ocp1

    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for folder in (run7 / "orbax/3", run7 / "direct"):
        like = jax.tree.map(
            lambda x: (
                jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one) if hasattr(x, "dtype") else x
            ),
            load(folder),
        )
        assert ocp1.load(folder, like)["params"]["w"].tolist() == np.full((8, 8), 3).tolist()


def test_a_command_by_itself(servers: dict[str, str], run7: Path) -> None:
    """The installed command, given nothing but a URL."""
    url = f"s3://{BUCKET}/alone{servers['s3']}"
    subprocess.run(
        [HOLDFAST, "cp", str(run7 / "run"), url], check=True, timeout=60, capture_output=True
    )
    done = subprocess.run(
        [HOLDFAST, "ls", url, "--json"], check=True, timeout=60, capture_output=True, text=True
    )
    assert [row["step"] for row in json.loads(done.stdout)["steps"]] == [
        1,
        2,
        3,
    ] and done.stderr == ""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_packs_of_more_than_256_mib_to_s3(servers: dict[str, str], tmp_path: Path) -> None:
    """A checkpoint of 1.2 GiB, whose packs are longer than an object may be, is copied to s3:// and
    back, and is the same.
    """
    rng = np.random.default_rng(0)
    save(tmp_path / "a", {f"w{i}": rng.integers(0, 1 << 62, 6 << 20) for i in range(26)})
    assert max(file_sizes(StorePath(LocalStorage(tmp_path / "a"))).values()) > 256 << 20
    url = f"s3://{BUCKET}/long{servers['s3']}"
    subprocess.run([HOLDFAST, "cp", str(tmp_path / "a"), url], check=True, timeout=170)
    subprocess.run([HOLDFAST, "diff", str(tmp_path / "a"), url], check=True, timeout=170)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_copy_between_stores_holds_no_more_than_its_bound(tmp_path: Path) -> None:
    """A copy of a checkpoint that is larger than the bound takes less memory than that: what the
    reads and writes of the two stores may hold.
    """
    bound = READ_BYTES + 2 * PARTS_AT_ONCE * PART_BYTES
    state = {f"w{index}": np.full(2 << 20, index, np.int64) for index in range(60)}
    assert sum(array.nbytes for array in state.values()) > bound
    with small_s3_server(tmp_path) as query:
        source = f"s3://{BUCKET}/from{query}"
        save(source, state)
        target = f"s3://{BUCKET}/to{query}"
        done = subprocess.run(
            [sys.executable, str(program("measured_copy")), source, target],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=120,
        )
        taken_bytes = int(done.stdout)
        assert open_storage(target).size("checkpoint.json") > 0
    assert taken_bytes < bound


@pytest.mark.parametrize(
    "what",
    ["cp", *(pytest.param(layout, marks=pytest.mark.slow) for layout in ("holdfast", "orbax"))],
)
def test_killed_in_the_middle_and_begun_again(what: str, tmp_path: Path) -> None:
    """A copy or conversion whose process dies, twice, is finished by the third try; until then
    there is no step.
    """
    save(tmp_path / "a", {f"w{i}": np.full(1 << 20, i, np.int64) for i in range(8)})
    for after in (1, 3):
        command = [
            sys.executable,
            str(program("killed_copy")),
            str(tmp_path / "a"),
            str(tmp_path / "b"),
            what,
            str(after),
        ]
        assert (
            subprocess.run(
                command, timeout=60, env=os.environ | {"JAX_PLATFORMS": "cpu"}
            ).returncode
            == 9
        )
        assert os.listdir(tmp_path / "b") and not find_steps(LocalStorage(tmp_path / "b"))
    store = open_storage(tmp_path / "b")
    claims = open_claims(store)
    if what == "cp":
        done = copy_checkpoint(
            StorePath(LocalStorage(tmp_path / "a")), StorePath(store, "0"), claims
        )
        assert done.skipped
    else:
        convert(open_checkpoint(tmp_path / "a"), StorePath(store), what, claims=claims)
    assert [int(value[0]) for value in load(tmp_path / "b").values()] == list(range(8))
    CheckpointManager(tmp_path / "b").close()
    assert sorted(os.listdir(tmp_path / "b")) in (["0"], [".holdfast", "0"])
