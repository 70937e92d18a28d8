"""The accelerator kit: what it refuses, what a broken end leaves, and all of it in small on the
CPU.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.network import namespaces, python_in
from tests.support.paths import ROOT

KIT = ROOT / "benchmarks" / "accelerator"
RUN = ROOT / "scripts" / "accelerator_kit" / "run.sh"
BUILD = ROOT / "scripts" / "build_accelerator_kit.sh"
HERE = "{}.{}".format(*sys.version_info[:2])


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in the checkout, where a kit has to be."""
    path = ROOT / "build" / f"accelerator-kit-{uuid.uuid4().hex[:8]}"
    yield path
    shutil.rmtree(path, ignore_errors=True)


def run_in(kit: Path, out: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a kit's smoke with this Python."""
    return subprocess.run(
        [kit / "run.sh", out, "smoke"],
        env=os.environ | {"PYTHON": sys.executable} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def make_kit(folder: Path, python: str = HERE, glibc: str = "2.17", machine: str = "") -> None:
    """Makes a kit without wheels, which are looked at later."""
    folder.mkdir(parents=True)
    shutil.copy(RUN, folder)
    made_for = f"made_for_python={python}\nmade_for_glibc={glibc}\n"
    made_for += f"made_for_machine={machine or os.uname().machine}\nmade_from=test\n"
    (folder / "made-for").write_text(made_for)


def test_another_python_is_refused_in_one_sentence(folder: Path, tmp_path: Path) -> None:
    """It names the kit's Python and this one; so it is with the C library and the machine."""
    sentences = {
        f"the kit is for Python 3.99, and .* is {HERE}: ": {"python": "3.99"},
        r"the kit needs glibc 9\.1 or newer, and this machine has \w+": {"glibc": "9.1"},
        f"the kit is for riscv64, and this machine is {os.uname().machine}": {"machine": "riscv64"},
    }
    for sentence, made_for in sentences.items():
        make_kit(folder, **made_for)
        done = run_in(folder, tmp_path)
        (line,) = done.stderr.splitlines()
        assert re.match(sentence, line), line
        assert done.returncode == 1
        shutil.rmtree(folder)


def test_a_kit_outside_of_a_checkout_says_where_it_belongs(tmp_path: Path) -> None:
    """It would find no tests there, and is not built there either."""
    make_kit(tmp_path / "kit")
    done = run_in(tmp_path / "kit", tmp_path / "out")
    assert done.returncode == 2 and "expected in a checkout of holdfast" in done.stderr
    built = subprocess.run([BUILD, tmp_path / "new"], capture_output=True, text=True, check=False)
    assert built.returncode == 2 and "expected a folder in the checkout" in built.stderr


PROGRAM = """
import sys
sys.path[:0] = [{kit!r}]
import kit
from pathlib import Path
from plan import Part, Plan

letters = dict(zip("abc", ("fails.py", "hangs.py", "ends.py")))
for letter, text in {scripts!r}.items():
    Path({folder!r}, letters[letter]).write_text(text)
kit.HERE = Path({folder!r})
scratch = Path({folder!r}, "scratch")
scratch.mkdir()
kit.processes.adopt_orphans()
one = kit.Kit(Path({folder!r}), cpu=True, smoke=True, limit_s=60)
plan = Plan(str(scratch), True, True, 1 << 20, 1)
# The part that hangs has two Pythons to start before its limit, beside whatever else runs here.
for letter, script in letters.items():
    one._run_part(Part(letter, letter, script, 0, 0, 0), plan, 12)
one._run_part(Part("d", "large", "ends.py", 0, 0, 10**18), plan, 12)
"""
REPORTS = f"import sys; sys.path[:0] = [{str(KIT)!r}]; from report import figure; "
SCRIPTS = {
    "a": REPORTS + "figure('first', '1 s'); raise ValueError('no such device')",
    # What a part has started may hang too, and hold the part's output open.
    "b": REPORTS
    + "figure('second', '2 s'); import json, os, subprocess\n"
    + "os.mkdir(json.loads(sys.argv[1])['scratch'] + '/left')\n"
    + "child = 'import threading\\ndef waits_for_ever(): threading.Event().wait()\\n"
    + "waits_for_ever()'\n"
    + "subprocess.run([sys.executable, '-c', child], start_new_session=True)",
    "c": REPORTS + "figure('third', '3 s')",
}


@pytest.mark.slow
def test_a_part_that_fails_or_hangs_is_written_down_and_the_next_goes_on(tmp_path: Path) -> None:
    """The block has what each had measured, why it ended, where all its processes were, and for
    what the disk has no room.
    """
    program = PROGRAM.format(kit=str(KIT), folder=str(tmp_path), scripts=SCRIPTS)
    done = subprocess.run(
        [sys.executable, "-c", program], timeout=60, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    block = (tmp_path / "RESULTS.md").read_text()
    for row in ("| first | 1 s |  |", "| second | 2 s |  |", "| third | 3 s |  |"):
        assert row in block
    assert "failed with 1" in block and "ValueError: no such device" in block
    assert [*(tmp_path / "scratch").iterdir()] == []
    assert re.search(r"- d: large: .* left; it needs 1e\+08 GB$", block, re.MULTILINE)
    assert "stopped at its limit of 12 s" in block and "in waits_for_ever" in block


def test_who_is_killed_leaves_what_was_measured(tmp_path: Path) -> None:
    """The block of a kit that is killed has the figures up to then."""
    # Nobody ends what a part has started there.
    hangs = REPORTS + "figure('second', '2 s'); import threading; threading.Event().wait()"
    scripts = SCRIPTS | {"b": hangs}
    program = PROGRAM.format(kit=str(KIT), folder=str(tmp_path), scripts=scripts)
    kit = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL)
    block = tmp_path / "RESULTS.md"
    end_s = time.monotonic() + 60
    while not (block.exists() and "| second | 2 s |" in block.read_text()):
        assert time.monotonic() < end_s
        time.sleep(0.02)  # a file: nobody tells
    kit.send_signal(signal.SIGKILL)
    kit.wait()
    text = block.read_text()
    assert "| first | 1 s |" in text and "ValueError: no such device" in text


def test_sizes_follow_from_the_probe() -> None:
    """A slow disk, a small one, little memory: the state is what fits."""
    code = f"""
import sys; sys.path[:0] = [{str(KIT)!r}]
from dataclasses import replace
from plan import GB, Probe, deadlines, remark_on_jax, share_s, sizes_of
large = Probe(80 * GB, 120 * GB, 60 * GB, 4 * GB)
def size(**changed):
    return sizes_of(replace(large, **changed), 100, cpu=False, smoke=False)[0]
assert size() == 8 * GB
assert size(device_bytes=10 * GB) == 3 * GB
assert size(host_free_bytes=16 * GB) == 2 * GB
assert size(disk_free_bytes=4 * GB) == GB
assert size(write_bytes_s=GB / 10) == GB // 3
assert size(write_bytes_s=1000) == 8 << 20
assert sizes_of(large, 100, cpu=True, smoke=False) == (8 * GB // 10, 400)
assert sizes_of(large, 100, cpu=True, smoke=True) == (GB // 20, 40)
for smoke in (False, True):
    ends = [end for _, end in deadlines(100, smoke=smoke)]
    assert ends == sorted(ends) and abs(ends[-1] - 100) < 1e-6
    assert abs(sum(share_s(x, 100, smoke=smoke) for x in "abcdef") - 100) < 1e-6
assert remark_on_jax("0.10.0") == remark_on_jax("0.12.9") == ""
assert remark_on_jax("0.13.1") == "jax is 0.13.1; holdfast is tested with 0.10 to 0.12"
assert "0.9.2" in remark_on_jax("0.9.2")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_smoke_runs_on_the_cpu_without_network(folder: Path, tmp_path: Path) -> None:
    """Built for this Python and run from its virtual environment, each part has its figures, and
    what only an accelerator has is listed.
    """
    for _ in range(2):  # the second time it stands in the place of the first
        subprocess.run([BUILD, folder, HERE], check=True, timeout=300)
    out = tmp_path / "out"
    environment = {"ACCELERATOR_KIT": "cpu", "ACCELERATOR_KIT_LIMIT_S": "240"}
    with namespaces() as network:
        python = python_in(network.names[0], tmp_path)
        done = run_in(folder, out, PYTHON=python, **environment)
    log = (out / "log.txt").read_text()
    assert done.returncode == 0, done.stdout + done.stderr + log[-4000:]
    block = (out / "RESULTS.md").read_text()
    assert {path.name for path in out.iterdir()} == {"RESULTS.md", "log.txt"}
    for letter in "abcdef":
        section = re.search(rf"^## {letter}\. (.*?)(?=^## |\Z)", block, re.MULTILINE | re.DOTALL)
        assert section is not None and len(re.findall(r"^\| ", section[1], re.MULTILINE)) > 1, (
            letter,
            block,
        )
    assert "the other stayed; the end is bit-exact, code 0" in block
    assert "FAILED" not in block and "## Not run" in block
