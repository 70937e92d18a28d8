"""`holdfast status`: the job as a table and as JSON, stacks, and errors in one sentence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from holdfast.coordination import CoordinationClient, CoordinationService


def holdfast(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from holdfast.cli import main; main()", *arguments]


def test_status_shows_who_waits_and_who_is_missing() -> None:
    """`holdfast status --json` names a barrier's waiters and the missing, progress, hosts and keys; the table holds the same."""
    with CoordinationService.spawn(2, job="digits", attempt=3) as service:
        clients = [CoordinationClient(service.address, process_id) for process_id in range(2)]
        threads = [threading.Thread(target=client.connect) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        clients[0].key_value_set("dir/key", "value")
        waiting = threading.Thread(target=clients[0].wait_at_barrier, args=("save/100", 60_000))
        waiting.start()
        shown: dict[str, object] = {}
        while not shown.get("barriers"):
            output = subprocess.run(holdfast("status", service.address, "--json"), capture_output=True, check=True, text=True).stdout
            shown = json.loads(output)
        (barrier,) = shown["barriers"]  # type: ignore[misc]
        assert barrier["barrier_id"] == "save/100" and barrier["missing"] == [1] and [each["task_id"] for each in barrier["waiting"]] == [0]
        assert [task["state"] for task in shown["tasks"]] == ["CONNECTED"] * 2 and shown["job"] == "digits"  # type: ignore[union-attr]
        assert shown["prefixes"][0]["prefix"] == "dir"  # type: ignore[index]
        table = subprocess.run(holdfast("status", service.address), capture_output=True, check=True, text=True).stdout
        assert "job digits attempt 3, 2 processes, running" in table and "save/100" in table
        clients[1].wait_at_barrier("save/100", 60_000)
        waiting.join(30)
        for thread in [threading.Thread(target=client.shutdown) for client in clients]:
            thread.start()
        assert service.wait(30) == 0


@pytest.mark.parametrize(
    ("address", "why"),
    [("127.0.0.1:1", "Connection refused"), ("unix:/nonexistent/socket", "No such file or directory"), ("here", "this is no address")],
)
def test_status_of_nobody_says_what_was_tried_and_for_how_long(address: str, why: str) -> None:
    """An address where nothing answers is one sentence and exit code 1."""
    ended = subprocess.run(holdfast("status", address, "--timeout-s", "0.5"), capture_output=True, check=False, text=True)
    assert ended.returncode == 1 and ended.stderr.startswith(f"Error: {address}: no coordinator answered a status request within ")
    assert why in ended.stderr and len(ended.stderr.splitlines()) == 1


def test_status_without_an_address_finds_this_users_jobs() -> None:
    """None: a sentence. One: its table. Two: a list of both. One that is dead counts no more."""
    with tempfile.TemporaryDirectory(dir="/tmp") as base, ExitStack() as stack:
        env = os.environ | {"TMPDIR": base}

        def status() -> subprocess.CompletedProcess[str]:
            return subprocess.run(holdfast("status"), env=env, capture_output=True, text=True, check=False)

        def start(job: str) -> subprocess.Popen[str]:
            command = holdfast("run", "-n", "1", "--job-id", job, "--", sys.executable, "-S", "-c", "import time; time.sleep(600)")
            popen = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            stack.callback(popen.communicate)
            stack.callback(popen.kill)
            assert popen.stderr is not None
            line = popen.stderr.readline()
            assert line.startswith(f"holdfast: attempt 1, coordinator at unix:{base}/"), line
            return popen

        assert "no job of this user runs on this machine" in status().stderr
        folder = Path(base) / f"holdfast-{os.getuid()}" / "job-half"
        folder.mkdir(parents=True, mode=0o700)
        (folder / "client.crt").write_text("of one that is being made")
        first = start("one")
        assert "job one attempt 1, 1 processes, gathering" in status().stdout
        start("two")
        several = status()
        assert several.returncode == 1 and several.stderr.startswith("Error: 2 jobs of this user run on this machine: choose one\n")
        assert "# one, attempt 1\n" in several.stderr and "# two, attempt 1\n" in several.stderr
        first.kill()
        first.wait(30)
        while (shown := status()).returncode:
            assert "2 jobs" in shown.stderr
        assert "job two attempt 1" in shown.stdout


def test_the_history_of_a_job_survives_its_coordinator(tmp_path: Path) -> None:
    """`--events` prints what happened, before and after a restart of the coordinator; `--since` leaves out what is older."""
    journal = str(tmp_path / "journal")
    with CoordinationService.spawn(1, job="j", journal=journal) as service:
        client = CoordinationClient(service.address, 0)
        client.connect()
        client.report(saved_step=30)
        client.close()
        os.kill(service.pid, signal.SIGKILL)
        service.wait(30)
    with CoordinationService.spawn(1, job="j", journal=journal) as service:
        shown = subprocess.run(holdfast("status", service.address, "--events"), capture_output=True, check=True, text=True).stdout
        texts = [line.split(maxsplit=3)[2:] for line in shown.splitlines()]
        assert texts[0][0] == "joined" and texts[1] == ["saved", "step 30 is saved"], shown
        assert texts[2] == ["coordinator", "the coordinator was started again, with its journal"], shown
        as_json = subprocess.run(holdfast("status", service.address, "--events", "--json"), capture_output=True, check=True, text=True)
        assert [event["kind"] for event in json.loads(as_json.stdout)] == ["joined", "saved", "coordinator"]
        late = subprocess.run(holdfast("status", service.address, "--since", "0s"), capture_output=True, check=True, text=True)
        assert late.stdout == ""
        wrong = subprocess.run(holdfast("status", service.address, "--since", "soon"), capture_output=True, check=False, text=True)
        assert wrong.returncode == 2 and "expected a time such as 90s, 10m or 2h, found 'soon'" in wrong.stderr


def test_the_history_holds_the_attempts_before() -> None:
    """A new attempt has a new coordinator: its launcher tells it what came before."""
    command = f"{sys.executable} -c 'from holdfast.cli import main; main()' status --events"
    script = f'[ "$HOLDFAST_ATTEMPT" = 1 ] && exit 3; until {command} | grep "exit code 3"; do :; done'
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        ended = subprocess.run(
            holdfast("run", "-n", "1", "--max-restarts", "1", "--", "sh", "-c", script),
            env=os.environ | {"TMPDIR": base}, capture_output=True, text=True, check=False, timeout=100,
        )  # fmt: skip
    assert ended.returncode == 0 and "launcher    attempt 1 is restarting: process 0 of 1 ended with exit code 3" in ended.stdout, ended
