"""`holdfast web` and `holdfast run --web`: whose job is shown, and that no server is left."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.libraries import need
from tests.support.pages import HOLDFAST, fetch, snapshots

need("uvicorn", "make setup")


def _web(environment: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a `holdfast web` that ends by itself."""
    return subprocess.run(
        [*HOLDFAST, "web", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_a_machine_without_a_job_has_no_page() -> None:
    """Without an address there is nothing to show: one sentence, as `holdfast status` has it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as base:  # a longer path would not hold a socket
        environment = os.environ | {"TMPDIR": base}
        ended = _web(environment)
    assert ended.returncode == 3
    assert ended.stderr.startswith("Error: no job of this user runs on this machine (")


def test_files_that_are_no_certificate_have_no_page(tmp_path: Path) -> None:
    """Nor has half of one: refused at once, and not at each question."""
    ca = tmp_path / "ca.crt"
    ca.touch()
    ended = _web(os.environ, "127.0.0.1:1", "--tls-ca", str(ca))
    assert ended.returncode == 5
    assert ended.stderr.startswith("Error: tls_cert, tls_key, tls_ca belong together"), ended
    ca.write_text("no PEM")
    files = ("--tls-cert", str(ca), "--tls-key", str(ca), "--tls-ca", str(ca))
    ended = _web(os.environ, "127.0.0.1:1", *files)
    assert ended.returncode == 5
    assert "are no certificate, its key" in ended.stderr, ended


def test_an_id_beside_an_address_is_refused() -> None:
    """The address says which job it is; that of the id might be another one."""
    ended = _web(os.environ, "127.0.0.1:1", "--job-id", "j")
    assert ended.returncode == 2
    assert "--job-id is for a job of this machine" in ended.stderr


def test_a_run_has_a_page_while_it_lasts() -> None:
    """Its URL is printed; it finds the job by itself, and goes with it."""
    script = "until [ -e $TMPDIR/go ]; do sleep 0.1; done"
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        command = [
            *HOLDFAST,
            "run",
            "-n",
            "1",
            "--web",
            "--job-id",
            "digits",
            "--",
            "sh",
            "-c",
            script,
        ]
        with subprocess.Popen(
            command, env=os.environ | {"TMPDIR": base}, stderr=subprocess.PIPE, text=True
        ) as run:
            assert run.stderr is not None
            url = (
                next(line for line in run.stderr if line.startswith("page at "))
                .removeprefix("page at ")
                .strip()
            )
            with snapshots(url) as seen:
                assert next(each for each in seen if each["job"])["job"] == "digits"
            assert fetch(url)[0] == 200
            (Path(base) / "go").touch()
            assert run.wait(60) == 0
        with pytest.raises(OSError, match="refused"):
            fetch(url)


def test_of_several_jobs_none_is_taken() -> None:
    """They are listed, and an address or an id is asked for."""
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        environment = os.environ | {"TMPDIR": base}
        sleeping = ["run", "-n", "1", "--job-id"]
        with contextlib.ExitStack() as stack:
            for name in ("one", "two"):
                command = [*HOLDFAST, *sleeping, name, "--", "sleep", "600"]
                job = stack.enter_context(
                    subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
                )
                stack.callback(job.terminate)
                assert job.stderr is not None
                assert "coordinator at" in job.stderr.readline()
            ended = _web(environment)
    assert ended.returncode == 2
    assert "2 jobs of this user run on this machine: give the address of one" in ended.stderr
    assert "one" in ended.stdout and "two" in ended.stdout
