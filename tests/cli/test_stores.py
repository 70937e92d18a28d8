"""The commands on object stores: real servers over HTTP, on loopback. gs:// has an emulator that
ignores conditions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from holdfast.checkpoint import CheckpointManager, Json, load, save
from holdfast.checkpoint.layouts.detect import find_steps, open_checkpoint
from holdfast.checkpoint.steps.object_claims import open_claims
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.checkpoint.storage.path import StorePath, open_storage
from holdfast.checkpoint.tools.convert import convert
from holdfast.checkpoint.tools.copy import copy_checkpoint, file_sizes
from tests.support.object_servers import BUCKET, gcs_server, s3_server

HOLDFAST = str(Path(sys.executable).parent / "holdfast")
BODY = """
    import json, sys
    from click.testing import CliRunner
    from holdfast.checkpoint import load, save
    from holdfast.cli import main

    local, promise = sys.argv[1], sys.argv[4:]

    def url(name):
        return sys.argv[2] + name + sys.argv[3]

    def run(*arguments, code=0):
        result = CliRunner().invoke(main, list(arguments))
        assert result.exit_code == code, (arguments, result.exit_code, result.output, result.exception)
        assert "Traceback" not in result.output, arguments
        return json.loads(result.stdout) if "--json" in arguments else result.output

    if promise:
        assert "--single-writer" in run("cp", f"{local}/run", url("run"), code=5)
        assert "--single-writer" in run("convert", f"{local}/run", url("run"), "--to", "holdfast", code=5)
    assert len(run("cp", f"{local}/run", url("run"), "--json", *promise)["written"]) == 9
    assert run("cp", f"{local}/run", url("run"), "--json", *promise)["written"] == []
    rows = run("ls", url("run"), "--json")
    assert [(row["step"], row["state"], row["files"]) for row in rows] == [(1, "whole", 3), (2, "whole", 3), (3, "whole", 3)], rows
    assert "params.w" in run("show", url("run")), run("show", url("run"))
    assert "lr" in run("show", url("run"), "--item", "config")
    assert run("show", url("run"), "--stats", "--path", "params.w", "--json")["leaves"][0]["stats"]["max"] == 3.0
    assert len(run("verify", url("run"), "--all", "--json")) == 3
    assert "equal, bit by bit" in run("diff", f"{local}/run", url("run"))
    run("diff", url("run"), url("run"), "--step-a", "1", "--step-b", "2", code=1)

    keeps_generations = not promise  # the emulator of gs:// does not tell them, which an OCDBT database needs
    for layout in ("orbax", "safetensors", "holdfast") if keeps_generations else ("safetensors", "holdfast"):
        run("convert", url("run"), url(layout), "--to", layout, *promise)
        (row,) = run("ls", url(layout), "--json")
        assert (row["layout"], row["state"], row["bytes"] > 0) == (layout, "whole", True), row
        run("show", url(layout))
        assert run("verify", url(layout), "--json")["layout"] == layout
        run("convert", url(layout), f"{local}/back-{layout}", "--to", "holdfast")
        assert "already" in run("convert", url("run"), url(layout), "--to", layout, *promise, code=5)
        run("cp", url(layout), f"{local}/{layout}")
        run("diff", url(layout), f"{local}/{layout}")
        run("cp", f"{local}/{layout}", url(f"{layout}-again"), *promise)
        run("diff", url(f"{layout}-again"), f"{local}/{layout}")
    run("diff", f"{local}/run", f"{local}/back-holdfast")
    if keeps_generations:
        run("diff", f"{local}/run", f"{local}/back-orbax")
        save(url("direct"), load(f"{local}/run"), layout="orbax")
        run("cp", url("direct"), f"{local}/direct", *promise)

    assert run("prune", url("run"), "--keep", "last:1", "--dry-run", "--json", *promise)["deleted"] == [1, 2]
    assert run("prune", url("run"), "--keep", "last:1", "--json", *promise)["kept"] == [3]
    assert run("sweep", url("run"), "--json")["standing"] == []
    assert [row["step"] for row in run("ls", url("run"), "--json") if row["state"] == "whole"] == [3]
    for arguments in (["ls"], ["show"], ["verify"], ["diff", url("run")], ["prune", "--keep", "last:1"], ["sweep"], ["cp", f"{local}/no"]):
        found = run(arguments[0], *arguments[1:], url("nothing"), "--json", code=3) if arguments[0] != "cp" else run(
            "cp", url("nothing"), f"{local}/no", "--json", code=3)
        assert "there is nothing at" in found["error"] and found["exit_code"] == 3, found
    print("all done")
"""


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


@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_every_command_there(kind: str, servers: dict[str, str], run7: Path) -> None:
    """Each command on the store, from it and to it; the real Orbax restores what was converted or
    saved there, once copied to a disk.
    """
    import orbax.checkpoint.experimental.v1 as ocp1

    promise = ["--single-writer"] if kind == "gs" else []
    arguments = [str(run7), f"{kind}://{BUCKET}/cli/", servers[kind], *promise]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(BODY), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0 and "all done" in done.stdout, done.stdout + done.stderr
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for folder in (run7 / "orbax/3", run7 / "direct") if kind == "s3" else ():
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
    assert [row["step"] for row in json.loads(done.stdout)] == [1, 2, 3] and done.stderr == ""


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


DIES = """
import os, sys
from holdfast.checkpoint.tools.convert import convert
from holdfast.checkpoint.tools.copy import copy_checkpoint
from holdfast.checkpoint.storage.path import StorePath
from holdfast.checkpoint.layouts.detect import find_steps, open_checkpoint
from holdfast.checkpoint.steps.object_claims import open_claims
from holdfast.checkpoint.storage.path import open_storage

source, target, what, after = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
calls = 0

def die(done):
    global calls
    calls += 1
    if calls == after:
        os._exit(9)

store = open_storage(target)
claims = open_claims(store)
if what == "cp":
    copy_checkpoint(StorePath(open_storage(source)), StorePath(store, "0"), claims, die)
else:
    convert(open_checkpoint(source), StorePath(store), what, claims=claims, progress=die)
"""


@pytest.mark.parametrize("what", ["cp", "holdfast", "orbax"])
def test_killed_in_the_middle_and_begun_again(what: str, tmp_path: Path) -> None:
    """A copy or conversion whose process dies, twice, is finished by the third try; until then
    there is no step.
    """
    save(tmp_path / "a", {f"w{i}": np.full(1 << 20, i, np.int64) for i in range(8)})
    for after in (1, 3):
        command = [
            sys.executable,
            "-c",
            DIES,
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
