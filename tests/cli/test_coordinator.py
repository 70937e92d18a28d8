"""`holdfast coordinator`: one line of output, and an end."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest


def coordinator(*options: str) -> list[str]:
    return [sys.executable, "-c", "from holdfast.cli import main; main()", "coordinator", *options]


def test_the_command_prints_one_line() -> None:
    """`coordinator at HOST:PORT` is all of its output; whoever waits for it can tell that it was
    stopped.
    """
    with subprocess.Popen(
        coordinator("--num-processes", "2"), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.terminate()
        assert (
            process.wait(20) == -signal.SIGTERM
            and line.startswith("coordinator at 127.0.0.1:")
            and process.stdout.read() == ""
        )


@pytest.mark.parametrize(
    ("count", "sentence"),
    [
        (1000, "a coordinator of 1000 processes opens 1064 files, one for each process"),
        (500, "500 processes with jax's agents need 2752 open files, 4 for each process"),
    ],
)
def test_too_few_open_files_are_said(count: int, sentence: str) -> None:
    """At the start: too few for one connection of each is an error, and for an agent of each is
    said.
    """
    limited = ["sh", "-c", 'ulimit -n 1024; exec "$@"', "sh"]
    command = [*limited, *coordinator("-n", str(count), "--startup-timeout-s", "0.1")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert sentence in ended.stderr and "may open 1024: raise the hard limit" in ended.stderr
    assert ended.returncode == (1 if count == 1000 else 0)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ((), "Missing option '--num-processes'"),
        (
            ("-n", "1", "--tls-cert", __file__),
            (
                "--tls-cert, --tls-key, --tls-ca belong together: each side shows a certificate,"
                " and checks the other's; expected all three, found --tls-cert"
            ),
        ),
        (
            ("-n", "1", "--tls-ca", __file__),
            "checks the other's; expected all three, found --tls-ca",
        ),
        (("-n", "1", "--heartbeat-timeout-s", "inf"), "inf is not in the range 0.1<=x<inf"),
        (("-n", "1", "--token-file", "{short}"), "expected at least 16 characters, found 5"),
        (
            ("-n", "1", "--token-file", "{bytes}"),
            "bytes holds no token: expected one line of ASCII",
        ),
        (("-n", "1", "--log-file", "/nonexistent/log"), "No such file or directory"),
        (
            ("-n", "1", "--journal", "/nonexistent/journal"),
            "cannot be opened: No such file or directory",
        ),
    ],
)
def test_a_wrong_option_is_one_sentence(
    options: tuple[str, ...], sentence: str, tmp_path: Path
) -> None:
    """Exit code 1 or 2, and what was expected."""
    files = {"short": b"short\n", "bytes": bytes(range(128, 160))}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    paths = {name: tmp_path / name for name in files}
    command = coordinator(*(option.format(**paths) for option in options))
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode in (1, 2) and sentence in " ".join(ended.stderr.split())
    assert not ended.stdout, "whoever reads an address there would take it for one that serves"


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        ((), "whoever reaches this port can disturb the job"),
        (("--token-file",), "whoever reads this network can take the token"),
    ],
    ids=["open", "token"],
)
def test_an_open_address_is_warned_of(
    tmp_path: Path, options: tuple[str, ...], warning: str
) -> None:
    """Bound to more than loopback without TLS, it says so once, on stderr, whether it asks for a
    token or not.
    """
    token = tmp_path / "token"
    token.write_text("a secret of more than sixteen characters")
    command = coordinator(
        "-n", "1", "--host", "0.0.0.0", *(f"{option}={token}" for option in options)
    )
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert "0.0.0.0" not in process.stdout.readline()
        process.terminate()
        assert process.stderr.read().count(warning) == 1
