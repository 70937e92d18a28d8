"""The folder of compiled programs, with programs of jax in processes of their own."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.coordination import mounts
from holdfast.coordination.process.job_folder import user_folder
from holdfast.multihost.compiled.folder import (
    COMPILE_CACHE,
    JAX_FOLDER,
    LEAST_FREE_BYTES,
    TORN_AFTER_S,
    UNUSED_S,
    Entry,
    folder_of,
    keeping_variables,
    make_private,
    seal,
    sealed,
    tend,
    why_off,
)
from tests.support.paths import program

ENVIRONMENT = {
    key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "HOLDFAST_"))
} | {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}  # XLA 0.10 has a word on each load


def _run(cache: Path, **more: str) -> tuple[str, list[str], str]:
    """Returns the folder, the other things that the program says, and its stderr."""
    done = subprocess.run(
        [sys.executable, str(program("compile_alone"))],
        env=ENVIRONMENT | {"XDG_CACHE_HOME": str(cache)} | more,
        capture_output=True,
        text=True,
        check=True,
    )
    folder, said = done.stdout.splitlines()
    return folder, said.split(), done.stderr


def test_the_second_run_of_a_program_compiles_nothing(tmp_path: Path) -> None:
    """With `keep_compiled()` and no other word, and the digits are the same. The folder is in
    the user's cache, for the user alone; what a killed run left of an entry is not in the way.
    """
    folder, (digits, requested, *first), _ = _run(tmp_path)
    assert int(requested) > 1 and first == ["0", requested]
    path = Path(folder)
    assert path.parent == tmp_path / "holdfast" / "compiled"
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert _run(tmp_path) == (folder, [digits, requested, requested, "0"], "")


@pytest.mark.slow
def test_what_is_set_stays(tmp_path: Path) -> None:
    """A folder by jax's own variable, or none (""); "off" is for one run."""
    own = tmp_path / "own"
    for variable in ({JAX_FOLDER: str(own)}, {JAX_FOLDER: ""}, {COMPILE_CACHE: "off"}):
        folder, _, warned = _run(tmp_path / "cache", **variable)
        assert folder == "None" and not warned
    assert own.is_dir() and not (tmp_path / "cache").exists()


def test_a_folder_that_cannot_be_had_is_off(tmp_path: Path) -> None:
    """The program runs, and one sentence says what is in the way."""
    folder, said, _ = _run(tmp_path)
    path = Path(folder)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    is_off, without, warned = _run(tmp_path)
    assert is_off == "None" and without[0] == said[0]
    assert warned.count("\n") == 1 and f"not kept, and each start compiles anew: {path}: " in warned


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Path.touch, "Not a directory"),
        (lambda path: path.symlink_to("/tmp"), "Not a directory|symbolic links"),
        (lambda path: (path.mkdir(), os.chown(path, 65534, -1)), "a folder of user 65534"),
    ],
    ids=["file", "link", "another's"],
)
def test_only_a_folder_of_this_user_is_taken(
    make: Callable[[Path], object], why: str, tmp_path: Path
) -> None:
    """Anything else is refused with its name, and stays as it is."""
    if os.geteuid():
        pytest.skip("to give a folder away is for root")
    path = tmp_path / "folder"
    make(path)
    before = path.lstat()
    with pytest.raises(OSError, match=why) as caught:
        make_private(path)
    assert str(path) in why_off(caught.value) and COMPILE_CACHE in why_off(caught.value)
    assert path.lstat() == before


def test_a_full_disk_is_off(tmp_path: Path) -> None:
    """On a file system of a few MiB there is no room for what is compiled."""
    disk = tmp_path / "disk"
    disk.mkdir()
    size = LEAST_FREE_BYTES // 2
    mounting = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(disk)]
    if subprocess.run(mounting, capture_output=True, check=False).returncode:
        pytest.skip("to mount a file system is for root")
    try:
        with pytest.raises(OSError, match="the disk is full"):
            make_private(disk / "folder")
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_home_on_the_network_is_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it is the temporary folder of the host. Hosts of other processors have other folders."""
    table = tmp_path / "mounts"
    monkeypatch.setattr(mounts, "MOUNTINFO", table)
    here = {"XDG_CACHE_HOME": str(tmp_path)}
    before = folder_of(here)
    assert before is not None and before.is_relative_to(tmp_path)
    table.write_text(f"31 22 0:44 / {tmp_path} rw - nfs4 server:/home rw,vers=4.2\n")
    there = user_folder().parent / "compiled" / before.name
    assert folder_of(here) == folder_of({"XDG_CACHE_HOME": "relative"}) == there
    assert folder_of(here | {COMPILE_CACHE: "/elsewhere"}) == Path("/elsewhere") / before.name
    assert folder_of(here | {COMPILE_CACHE: "~/kept"}) == Path.home() / "kept" / before.name


def test_what_is_old_or_too_much_goes(tmp_path: Path) -> None:
    """What was used longest ago first, in the folders of other versions too; nothing else goes."""
    now = time.time()
    folder = tmp_path / "jaxlib-2-a"
    other = tmp_path / "jaxlib-1-a"
    ages_s = {
        folder / "new-cache": 10.0,
        folder / "xla_gpu_per_fusion_autotune_cache_dir" / "tuned": 20.0,
        other / "used-cache": 30.0,
        folder / "beyond-cache": 40.0,
        other / "unused-cache": UNUSED_S + 60,
        folder / "notes": UNUSED_S + 60,
        tmp_path / "a-cache": UNUSED_S + 60,
    }
    for path, age_s in ages_s.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(zlib.compress(os.urandom(1000)))
        os.utime(path, (now - age_s, now - 2 * UNUSED_S))
    size = (folder / "new-cache").stat().st_size
    tend(folder, max_bytes=3 * size)
    left = {path.name for path in ages_s if path.exists()}
    assert left == {"new-cache", "tuned", "used-cache", "notes", "a-cache"}


def test_a_torn_entry_goes(tmp_path: Path) -> None:
    """jax would try to load it in each run, and never write it again. One that may be being written
    stays. One that is whole is in the index, until it is another file.
    """
    whole = zlib.compress(os.urandom(10_000))
    texts = {"whole": whole, "old": whole[:-1], "other": b"\x28\xb5\x2f\xfd", "young": whole[:-1]}
    for name, text in texts.items():
        path = tmp_path / f"{name}-cache"
        path.write_bytes(text)
        if name != "young":
            os.utime(path, (0, time.time() - TORN_AFTER_S - 1))
    tend(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"whole-cache", "young-cache", "index"}
    digest = hashlib.sha256(whole).hexdigest()
    with (tmp_path / "index").open("a") as index:
        index.write("0123 4")  # a killed process leaves a part of a line
    assert sealed(tmp_path) == {"whole-cache": Entry("whole-cache", len(whole), digest)}
    assert seal(tmp_path) == []
    (tmp_path / "whole-cache").write_bytes(b"torn")
    (tmp_path / "young-cache").write_bytes(whole)
    assert sealed(tmp_path) == {}
    assert seal(tmp_path) == [Entry("young-cache", len(whole), digest)]


def test_the_variables_of_a_launcher(tmp_path: Path) -> None:
    """They name the same folder, for programs that do not call `keep_compiled`; thresholds that are
    set stay.
    """
    here = {COMPILE_CACHE: str(tmp_path)}
    short = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
    variables = keeping_variables(here)
    assert variables[JAX_FOLDER] == str(folder_of(here)) and variables[short] == "0"
    assert short not in keeping_variables(here | {short: "5"})
    assert keeping_variables(here | {JAX_FOLDER: ""}) == {}
    assert keeping_variables({COMPILE_CACHE: "off"}) == {}
