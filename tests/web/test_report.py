"""The page standing still: one file, with everything in it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.web import write_report
from tests.support.pages import HOLDFAST
from tests.support.paths import program


def test_holdfast_run_leaves_a_report(tmp_path: Path) -> None:
    """It holds all attempts with their steps, how the job ended and its processes; it needs no
    other file, and its path is printed.
    """
    script = program("report_holdfast_run_leaves_report")
    command = [
        *HOLDFAST,
        "run",
        "-n",
        "2",
        "--max-restarts",
        "1",
        "--log-dir",
        str(tmp_path),
        "--",
        sys.executable,
        str(script),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert ended.returncode == 0, ended.stderr
    assert f"holdfast: report at {tmp_path / 'report.html'}" in ended.stderr.splitlines()[-2:], (
        ended.stderr
    )
    html = (tmp_path / "report.html").read_text()
    data = json.loads(
        re.findall(r'<script type="application/json" id="data">(.*?)</script>', html)[0]
    )
    assert (
        data["gone"].startswith("done: ") and data["attempt"] == 2 and len(data["processes"]) == 2
    )
    assert {7, 14} <= {step for _, step, _, _ in data["samples"]}
    assert (
        set(data["goodput_s"]) >= {"starting_s", "stepping_s", "ending_s"}
        and sum(data["goodput_s"].values()) > 0
    )
    texts = [event["text"] for event in data["events"]]
    assert any(text.startswith("attempt 1 is restarting: ") for text in texts), texts
    assert sum("joined" in text for text in texts) >= 2 and any(
        "SystemExit: 3" in text for text in texts
    ), texts  # of both attempts
    assert "src=" not in html and "href=" not in html and html.count("<script") == 2


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    """A host that is called like the end of a script does not end it."""
    status = {"tasks": [{"task_id": 0, "host": "</script><script>alert(1)</script>"}]}
    (tmp_path / "status.json").write_text(
        json.dumps({"unix_s": 1.0, "outcome": "done: <b>", "status": status})
    )
    write_report(tmp_path / "status.json", tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text()
    assert "alert(1)</script>" not in html and "\\u003c/script\\u003e" in html


@pytest.mark.parametrize(
    "text", ["", "[]", '{"unix_s": 1}', '{"unix_s": 1, "outcome": "", "status": {"tasks": 3}}']
)
def test_what_is_no_status_is_refused(text: str, tmp_path: Path) -> None:
    """With the file, what was expected and what was found; nothing is written."""
    (tmp_path / "status.json").write_text(text)
    with pytest.raises(
        ValueError, match=r"status\.json: expected the status that `holdfast run` leaves, found "
    ):
        write_report(tmp_path / "status.json", tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()
