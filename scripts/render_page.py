"""Renders the page of a made-up job into docs/screens/page-light.png and page-dark.png.

Needs playwright and Chromium. python scripts/render_page.py
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from holdfast.coordination.diagnosis.findings import Evidence, diagnose
from holdfast.coordination.diagnosis.step_curve import Sample
from holdfast.proto import coordination_pb2, session_pb2
from holdfast.web.report import write_report
from holdfast.web.snapshot import snapshot

SCREENS = Path(__file__).resolve().parent.parent / "docs" / "screens"
COUNT = 256
ODD = 77
NOW = 1_700_000_900.0
SILENT_S = 41
WAITING = (
    'Thread MainThread:\n  File "/home/me/train.py", line 50, in step\n  File'
    ' "/x/site-packages/jax/a.py", line 1, in block_until_ready'
)
LOADING = 'Thread MainThread:\n  File "/home/me/train.py", line 26, in load_batch'
STEPS: list[tuple[int, int, dict[str, bool]]] = [
    (500, 0, {}),
    (1000, 61_300_000_000, {}),
    (2000, 61_300_000_000, {"incremental": True}),
    (2100, 0, {"local": True}),
]
HISTORY = [
    (0, "launcher", "attempt 1 is running: attempt 1 starts with 256 processes"),
    (20, "joined", "256 processes joined"),
    (320, "saved", "step 1000 is saved"),
    (520, "lost", "process 12 (host b12, ended by signal 9) is lost"),
    (522, "launcher", "attempt 1 is restarting: process 12 of 256 was ended by signal 9"),
    (540, "joined", "256 processes joined"),
    (800, "saved", "step 2000 is saved"),
]


def made_up_job() -> session_pb2.StatusResponse:
    """Returns a job of 256 processes in which one sleeps in its loader."""
    status = session_pb2.StatusResponse(
        job="run7", attempt=2, num_processes=COUNT, up_s=370, phase="running", barriers_passed=2410
    )
    for number in range(COUNT):
        task = status.tasks.add(
            task_id=number,
            state=coordination_pb2.CONNECTED,
            host=f"b{number}",
            pid=4000 + number,
            heartbeat_age_s=1.2,
        )
        task.progress.step = 2104
        task.progress.saved_step = 2000
        task.progress.values.update(
            {
                "report_interval_s": 2.0,
                "waiting_share": 0.4,
                "memory_bytes": 41e9,
                "save_blocked_s": 3.2,
            }
        )
        task.step_age_s = SILENT_S
        task.usual_steps_per_second = 4.1
    root = status.tasks[0].progress.root
    root.path = "gs://models/run7"
    root.num_steps = 3
    for step, nbytes, flags in STEPS:
        root.steps.add(step=step, bytes=nbytes, **flags)
    status.goodput_s.update(
        stepping_s=703.2,
        starting_s=41.0,
        restoring_s=9.4,
        saving_s=6.1,
        redoing_s=130.1,
        ending_s=10.2,
    )
    for after, kind, text in HISTORY:
        status.events.add(unix_s=NOW - 900 + after, kind=kind, text=text)
    return status


def main() -> None:
    """Writes both pictures."""
    status = made_up_job()
    findings = diagnose(
        Evidence(
            status, {number: [LOADING if number == ODD else WAITING] for number in range(COUNT)}
        )
    )
    steps = [(30, 520, 0), (545, 859, 1000)]
    samples = [
        Sample(NOW - 900 + t, int(first + 4.1 * (t - begin)), 4.1, 0)
        for begin, end, first in steps
        for t in range(begin, end, 5)
    ]
    shown = snapshot(status, findings, samples, unix_s=NOW)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        kept = Path(folder) / "status.json"
        report = Path(folder) / "report.html"
        kept.write_text(json.dumps({"unix_s": NOW, "outcome": "", "status": {}}))
        write_report(kept, report)
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for scheme in ("light", "dark"):
            page = browser.new_page(
                viewport={"width": 1000, "height": 1250}, color_scheme=scheme, timezone_id="UTC"
            )
            page.goto(f"file://{report}")
            page.evaluate("(shown) => draw(shown)", shown)
            page.locator(".cell").nth(ODD).click()
            page.screenshot(path=SCREENS / f"page-{scheme}.png")
        browser.close()


if __name__ == "__main__":
    main()
