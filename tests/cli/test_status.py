"""`holdfast status`: the job as a table and as JSON, stacks, and errors in one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

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


def test_status_of_nobody_is_an_error() -> None:
    """An address where nothing answers is one sentence and exit code 1."""
    ended = subprocess.run(holdfast("status", "127.0.0.1:1", "--timeout-s", "0.5"), capture_output=True, check=False, text=True)
    assert ended.returncode == 1 and ended.stderr.startswith("Error: 127.0.0.1:1: DEADLINE_EXCEEDED")
