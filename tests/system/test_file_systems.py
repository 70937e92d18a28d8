"""File systems that refuse calls, mounted for real: a root there is refused with a sentence, and
with the promise of a single writer it is a root like any other.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.checkpoint import CheckpointManager, Options, load, verify
from tests.support.paths import program

SCRIPT = """
import os, sys
import jax.numpy as jnp
from holdfast.checkpoint import CheckpointManager, KeepBest, Options, load, save

root, promises, end = sys.argv[1], bool(int(sys.argv[2])), int(sys.argv[3])
options = Options(single_writer=promises)
policy = KeepBest(2, metric="loss", mode="min")
with CheckpointManager(root, keep_policy=policy, options=options) as manager:
    state = {"w": jnp.zeros(100_000), "at": 0}
    if manager.latest_step() is not None:
        state = manager.restore(like=state)
    while state["at"] < end:
        state = {"w": state["w"] + 1, "at": state["at"] + 1}
        manager.save(state["at"], state, metrics={"loss": 1 / state["at"]})
        print(state["at"], flush=True)
        if state["at"] == end and end == 5:
            os.kill(os.getpid(), 9)
save(f"{root}-one", state, single_writer=promises, overwrite=True)
assert load(f"{root}-one")["at"] == end
if promises:  # else tensorstore, which writes it, syncs its folders
    save(f"{root}-orbax-{end}", state, layout="orbax")
    assert load(f"{root}-orbax-{end}")["at"] == end
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@contextlib.contextmanager
def mounted(folder: Path, *refused: str) -> Iterator[Path]:
    """Mounts a file system that refuses these calls, "link=EPERM"."""
    fusermount = shutil.which("fusermount3")
    if importlib.util.find_spec("mfusepy") is None or fusermount is None:
        pytest.skip("needs mfusepy, and fuse3: scripts/install_system_packages.sh")
    if not os.access("/dev/fuse", os.W_OK):
        pytest.skip("needs /dev/fuse")
    source = folder / "source"
    target = folder / "target"
    source.mkdir()
    target.mkdir()
    command = [sys.executable, "-W", "ignore", program("odd_file_system"), source, target, *refused]
    with subprocess.Popen(command) as serving:
        try:
            while not target.is_mount():
                assert serving.poll() is None, "it could not be mounted"
                time.sleep(0.01)
            yield target
        finally:
            subprocess.run([fusermount, "-u", "-z", target], check=False)
            serving.wait(60)


def trained(root: Path, *, promises: bool, end: int) -> subprocess.CompletedProcess[str]:
    """Goes on with a training until step `end`; the one that ends at 5 is killed there."""
    arguments = [str(root), str(int(promises)), str(end)]
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        (["link=EPERM"], "link() is refused: Operation not permitted"),
        (["link=EOPNOTSUPP"], "link() is refused: Operation not supported"),
        (["flock=ENOSYS"], "flock() is refused: Function not implemented"),
        (["flock=ENOLCK", "link=EPERM"], "flock() is refused: No locks available"),
    ],
)
def test_one_that_promises_nothing_wants_the_users_promise(
    tmp_path: Path, refused: list[str], said: str
) -> None:
    """Without it nothing is written, and the error says which promise would do. With it a training
    is killed and goes on.
    """
    with mounted(tmp_path, *refused) as folder:
        refusal = trained(folder / "run", promises=False, end=3)
        assert refusal.returncode == 1, refusal
        assert "CheckpointError" in refusal.stderr
        last = refusal.stderr.splitlines()[-1]
        assert said in last
        assert "Options(single_writer=True); `save` takes single_writer=True itself" in last
        assert not list((folder / "run").rglob("*.safetensors"))

        for end, code in ((3, 0), (5, -9), (8, 0)):
            done = trained(folder / "run", promises=True, end=end)
            assert done.returncode == code, done.stderr
        with CheckpointManager(folder / "run", options=Options(read_only=True)) as manager:
            assert manager.all_steps() == [7, 8]
        assert load(folder / "run" / "8")["at"] == 8 and verify(folder / "run" / "7").leaves == 2


def test_folders_that_cannot_be_synced_are_told_of_once(tmp_path: Path) -> None:
    """A training on such a file system goes on, with one sentence on what a power cut may take."""
    with mounted(tmp_path, "fsyncdir=EINVAL") as folder:
        for end, code in ((3, 0), (5, -9), (8, 0)):
            done = trained(folder / "run", promises=False, end=end)
            assert done.returncode == code, done.stderr
            assert done.stderr.count("its file system syncs no folders ([Errno 22]") == 1
        assert load(folder / "run" / "8")["at"] == 8
