"""The page's server: who gets in, what it shows, and that it comes back."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from holdfast.coordination import CoordinationService, Endpoint, JobIdentity
from tests.support.libraries import need
from tests.support.pages import HOLDFAST, fetch, not_reading, page, processes, snapshots

need("uvicorn", "make setup")


def test_only_the_token_gets_in() -> None:
    """A wrong token, a page whose name was pointed here, and a path that is none are refused;
    answers may not be kept or framed.
    """
    with CoordinationService.spawn(1) as service, page(service.address) as url:
        status, html, headers = fetch(url)
        assert (
            status == 200
            and "<main>" in html
            and "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        )
        assert headers["Cache-Control"] == "no-store" and "http" not in html.replace(
            "http-equiv", ""
        )
        port = urlsplit(url).port
        assert fetch(f"http://127.0.0.1:{port}/guess/")[:2] == (
            403, "wrong token; use the URL that `holdfast web` or `holdfast run --web` printed\n",
        )  # fmt: skip
        for path in ("", "events", "stacks/0", "page.js"):
            code, text, _ = fetch(url + path, Host="evil.example")
            assert code == 421 and text.startswith(
                "asked for as 'evil.example'; expected one of 127.0.0.1:"
            ), path
            assert fetch(f"http://127.0.0.1:{port}/guess/{path}")[0] == 403, path
        for address in ("192.0.2.1", "192.0.2.1:9", "[2001:db8::1]:9"):  # nobody points these here
            assert fetch(url, Host=address)[0] == 200, address
        assert (
            fetch(f"{url}../../etc/passwd")[0] in (403, 404) and fetch(f"{url}server.py")[0] == 404
        )


def test_a_viewer_sees_the_job_as_it_is() -> None:
    """Processes, what is wrong, barriers, history; hostile names as they are; stacks at a
    question.
    """
    with (
        CoordinationService.spawn(2, job=JobIdentity(name="digits"), recoverable=True) as service,
        page(service.address) as url,
    ):
        with (
            processes(service, 2, "<img src=x onerror=alert(1)>{}") as clients,
            snapshots(url) as seen,
        ):
            clients[0].report(
                step=7,
                saved_step=5,
                trouble="step 7 was not saved: </script><script>alert(1)</script>",
            )
            shown = next(each for each in seen if each["findings"])
            assert (shown["job"], shown["num_processes"], shown["gone"]) == ("digits", 2, "")
            assert (
                shown["processes"][0]["host"] == "<img src=x onerror=alert(1)>0"
                and shown["processes"][0]["step"] == 7
            )
            assert shown["findings"][0]["text"].endswith(
                "step 7 was not saved: </script><script>alert(1)</script>"
            )
            assert {"joined", "saved", "trouble"} <= {event["kind"] for event in shown["events"]}
            assert shown["samples"][-1][1] == 7
            code, stacks, headers = fetch(f"{url}stacks/0")
            assert (
                code == 200
                and "Thread MainThread" in stacks
                and headers["Content-Type"].startswith("text/plain")
            )
            for nobody in ("99999999999999999999", "9" * 5_000, "-1", "x"):
                assert fetch(f"{url}stacks/{nobody}")[:2] == (404, "there is no such process\n")


def test_a_coordinator_that_dies_comes_back(tmp_path: Path) -> None:
    """The page keeps what it last knew, says what is wrong, and goes on with the coordinator that
    takes the place.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options: dict[str, Any] = {
        "journal": str(tmp_path / "journal"),
        "endpoint": Endpoint(port=port),
    }
    with (
        CoordinationService.spawn(1, job=JobIdentity(name="j"), **options) as service,
        page(service.address) as url,
        snapshots(url) as seen,
    ):
        assert next(each for each in seen if each["job"] == "j")["gone"] == ""
        os.kill(service.pid, signal.SIGKILL)
        service.wait(30)
        gone = next(each for each in seen if each["gone"])
        assert (
            f"the coordinator at 127.0.0.1:{port} does not answer" in gone["gone"]
            and gone["job"] == "j"
        )
        with CoordinationService.spawn(1, job=JobIdentity(name="j"), **options):
            back = next(each for each in seen if not each["gone"])
            assert "the coordinator was started again, with its journal" in [
                event["text"] for event in back["events"]
            ]


def test_a_viewer_that_stops_reading_delays_nobody() -> None:
    """Others go on to get snapshots, though one has read nothing since its request, and one is more
    than a socket holds.
    """
    with (
        CoordinationService.spawn(1024) as service,
        page(service.address) as url,
        snapshots(url) as seen,
    ):
        with not_reading(url):
            first = next(seen)["unix_s"]
            assert all(later["unix_s"] > first for _, later in zip(range(2), seen, strict=False))


def test_an_end_with_viewers_is_quiet() -> None:
    """One that reads sees the end of its stream, one that does not is cut off; nothing of either is
    printed.
    """
    with CoordinationService.spawn(
        1024
    ) as service:  # its snapshots are larger than what a socket holds
        command = [*HOLDFAST, "web", service.address, "--end-with-input"]
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as server:
            assert server.stdin and server.stdout and server.stderr
            url = server.stdout.readline().removeprefix("page at ").strip()
            with snapshots(url) as seen, not_reading(url):
                assert len(next(seen)["processes"]) == 1024
                server.stdin.close()
                assert all(each["processes"] for each in seen)
                assert server.wait(30) == 0 and server.stderr.read() == ""


def test_a_port_that_is_taken_is_a_sentence() -> None:
    """With the option that was typed: `run --web` has another than `web`."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        alone, launched = (
            subprocess.run(
                [*HOLDFAST, "web", "127.0.0.1:1", "--port", str(port), *options],
                capture_output=True,
                text=True,
                check=False,
            )
            for options in ([], ["--end-with-input"])
        )
    assert alone.returncode == 5
    sentence = f"Error: cannot listen at 127.0.0.1:{port}: Address already in use; choose another"
    assert alone.stderr == f"{sentence} --port, or 0 for a free one\n"
    assert launched.stderr == f"{sentence} --web-port, or 0 for a free one\n"


def test_a_host_that_nobody_knows_is_a_sentence() -> None:
    """Another port would not help."""
    ended = subprocess.run(
        [*HOLDFAST, "web", "127.0.0.1:1", "--host", "none.invalid"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 5
    assert (
        ended.stderr
        == "Error: cannot listen at none.invalid: no such host; choose another --host\n"
    )


def test_without_the_extra_it_says_what_to_install(tmp_path: Path) -> None:
    """Before anything listens."""
    (tmp_path / "uvicorn.py").write_text("raise ImportError")
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    ended = subprocess.run(
        [*HOLDFAST, "web", "127.0.0.1:1"],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        ended.stderr
        == "Error: the page needs starlette and uvicorn: pip install 'holdfast-jax[web]'\n"
        and ended.returncode == 5
    )
