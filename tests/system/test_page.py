"""The page in a real browser: Debian's Chromium, without a window."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from holdfast.coordination import CoordinationService, Endpoint, JobIdentity
from holdfast.web import write_report
from holdfast.web.report import standing_still
from holdfast.web.snapshot import encode
from holdfast.web.tree_page import checkpoint_page
from tests.support.checkpoint_leaves import transformer
from tests.support.page_states import STATES, event, finished, job, large
from tests.support.page_states import shown as job_shown
from tests.support.pages import page, processes, serious_faults

D = "\u2013"  # what is not known
pytestmark = pytest.mark.slow  # playwright is among the slow libraries
HOSTILE = "<img src=x onerror=document.title='hit'>"


def test_a_job_in_words_and_by_keyboard(tab: Any) -> None:
    """What is wrong stands on top; Tab and Enter open a process; its stacks come at a click;
    a hostile host is text.
    """
    with (
        CoordinationService.spawn(3, job=JobIdentity(name="digits"), recoverable=True) as service,
        page(service.address) as url,
    ):
        with processes(service, 3, HOSTILE) as clients:
            clients[2].report(step=7, trouble="step 7 was not saved: disk full")
            steps = [
                {"step": 5, "bytes": 3_200_000, "incremental": True},
                {"step": 6, "damaged": True},
                {"step": 7, "local": True, "survives": 2},
            ]
            clients[0].report(root={"path": HOSTILE, "num_steps": 2, "steps": steps})
            tab.goto(url)
            tab.get_by_text("step 7 was not saved: disk full").first.wait_for()
            assert tab.title() == "In trouble · digits"
            assert (
                tab.locator("img").count() == 0
                and tab.locator("#row-list .key.culprit").count() == 1
                and tab.locator("#row-list tr").count() == 3
            )
            rows = [
                f"7\t{D}\t{D}\t{D}\t{D}\thosts only: survives the loss of 2 hosts\twhole",
                f"6\tbefore this run\t{D}\t{D}\t{D}\troot\tdamaged: a restore has passed it over",
                f"5\tbefore this run\t{D}\t3.2 MB\t{D}\troot\twhole, incremental",
            ]
            assert [row.strip() for row in tab.locator("#steps tr").all_inner_texts()] == rows
            assert tab.locator("#root-summary").inner_text() == f"{HOSTILE}: 2 steps"
            tab.locator(".open-one").first.focus()
            for key in ("Tab", "Tab", "Enter"):
                tab.keyboard.press(key)
            assert (
                tab.locator("#process-title").inner_text() == "Process 2"
                and HOSTILE in tab.locator("#facts").inner_text()
            )
            tab.locator("#ask").click()
            tab.get_by_text("Thread MainThread").wait_for()


@pytest.mark.slow
def test_a_restarted_coordinator_is_shown_and_forgotten(tab: Any, tmp_path: Path) -> None:
    """The page says that the coordinator is gone while it is, and comes back without a reload."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options: dict[str, Any] = {
        "journal": str(tmp_path / "journal"),
        "endpoint": Endpoint(port=port),
    }
    with (
        CoordinationService.spawn(1, job=JobIdentity(name="j"), **options) as service,
        page(service.address) as url,
    ):
        tab.goto(url)
        tab.get_by_text("j · 1 process").wait_for()
        os.kill(service.pid, signal.SIGKILL)
        service.wait(30)
        tab.locator("#gone").get_by_text("does not answer").wait_for()
        with CoordinationService.spawn(1, job=JobIdentity(name="j"), **options):
            tab.locator("#events").get_by_text("the coordinator was started again").wait_for()


COLOUR = "(cell) => getComputedStyle(cell).backgroundColor"
DRAW = """(shown) => {
  const began = performance.now();
  draw(shown);
  document.body.offsetHeight;
  return performance.now() - began;
}"""


@pytest.mark.parametrize("count", [1024, 4096, 16_384])
def test_thousands_of_processes_fit_a_screen(
    tab: Any, count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page is bounded in bytes, elements and height, and the process that is named stands out:
    as a cell among others, or by itself above ranges of processes.
    """
    tab.goto(opened(finished(), tmp_path))
    shown = large(count)
    took = tab.evaluate(DRAW, shown)
    elements = tab.evaluate("document.querySelectorAll('*').length")
    with capsys.disabled():
        print(f"\n{count} processes: {len(encode(shown))} B, {elements} elements, {took:.0f} ms")
    assert len(encode(shown)) < 400_000
    assert elements < 2000
    assert tab.locator("#legend").inner_text().startswith(f"waits ({count - 1})")
    if count <= 1024:
        place = tab.locator("#grid")
        culprit = tab.locator("#grid .culprit")
        assert tab.locator(".cell").count() == count
        assert culprit.get_attribute("aria-label").startswith("process 77, named in the diagnosis")
        tab.locator(".cell").first.focus()
        for key in ("ArrowRight", "End", "Enter"):
            tab.keyboard.press(key)
        assert tab.locator("#process-title").inner_text() == f"Process {count - 1}"
    else:
        place = tab.locator("#ranges")
        assert tab.locator(".tile.culprit").count() == 1
        assert tab.locator("#ranges h3").count() == 4
        tab.locator("#row-list button").click()
        assert tab.locator("#process-title").inner_text() == "Process 77"
        tab.locator(".tile.culprit").click()
        assert "status.json" in tab.locator("#range-title").inner_text()
    assert place.bounding_box()["height"] < 1600


def test_a_range_of_a_live_job_opens_at_a_click(tab: Any) -> None:
    """Its processes come then, as a grid by host; one opens as everywhere."""
    with CoordinationService.spawn(1100) as service, page(service.address) as url:
        tab.goto(url)
        tab.locator(".tile").nth(1).click()
        cells = tab.locator("#grid .cell")
        cells.first.wait_for()
        title = "processes 18 to 35, no host yet"
        assert tab.locator("#range-title").inner_text() == title
        assert cells.count() == 18
        cells.nth(1).click()
        assert tab.locator("#process-title").inner_text() == "Process 19"
        assert tab.locator("#grid [aria-pressed=true]").count() == 1
        tab.locator(".tile").nth(1).click()
        assert cells.count() == 0


def opened(shown: dict[str, Any], folder: Path) -> str:
    """Writes the page standing still; returns its URL."""
    (folder / "page.html").write_text(standing_still(shown), encoding="utf-8")
    return f"file://{folder / 'page.html'}"


@pytest.mark.parametrize("name", STATES)
def test_the_state_comes_first(tab: Any, name: str, tmp_path: Path) -> None:
    """The first line of text is the job's state; what a report says below never contradicts it, and
    nothing is wider than a phone.
    """
    expected, made = STATES[name]
    shown = made()
    tab.set_viewport_size({"width": 390, "height": 844})
    tab.goto(opened(shown, tmp_path))
    lines = tab.locator("body").inner_text().splitlines()
    assert next(line for line in lines if line.strip()) == expected
    assert tab.title() == f"{expected} · run7"
    first = tab.locator("#findings li").first
    assert first.inner_text() == shown["verdict"]["text"]
    if expected in ("Failed", "Hung"):
        assert tab.locator("#findings .good").count() == 0
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", STATES)
def test_axe_finds_nothing_in_any_state(tab: Any, name: str, scheme: str, tmp_path: Path) -> None:
    """Neither on a screen nor on a phone, with a process open."""
    _, made = STATES[name]
    tab.emulate_media(color_scheme=scheme)
    tab.goto(opened(made(), tmp_path))
    for width in (1400, 390):
        tab.set_viewport_size({"width": width, "height": 844})
        assert serious_faults(tab) == []
    if tab.locator("#row-list button").count():
        tab.locator("#row-list button").first.click()
        assert serious_faults(tab) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_of_a_checkpoint_is_read_on_a_phone(tab: Any, scheme: str, tmp_path: Path) -> None:
    """Nothing is wider than the screen, one map is shown, the buttons change its colours, and axe
    finds no serious fault with either.
    """
    page = tmp_path / "tree.html"
    page.write_text(checkpoint_page(transformer(layers=4)), encoding="utf-8")
    tab.emulate_media(color_scheme=scheme)
    for width in (390, 1400):
        tab.set_viewport_size({"width": width, "height": 844})
        tab.goto(f"file://{page}")
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.locator(".map:visible").count() == 1
        assert tab.locator(".map:visible .branch").first.inner_text() == "state 1.2 GB"
        cell = tab.locator(".map:visible .c1").first
        by_dtype = cell.evaluate(COLOUR)
        assert serious_faults(tab) == []
        tab.get_by_label("share that has changed since step 2000").check()
        assert cell.evaluate(COLOUR) != by_dtype
        assert serious_faults(tab) == []


def test_a_report_opens_from_disk(tab: Any, tmp_path: Path) -> None:
    """Without a server, a network or another file; nothing in it asks for stacks."""
    status = {
        "job": "digits",
        "num_processes": 1,
        "tasks": [{"task_id": 0, "host": HOSTILE, "state": "CONNECTED"}],
    }
    (tmp_path / "status.json").write_text(
        json.dumps({"unix_s": 1.0, "outcome": "failed: exit code 3", "status": status})
    )
    write_report(tmp_path / "status.json", tmp_path / "report.html")
    tab.goto(f"file://{tmp_path / 'report.html'}")
    assert tab.locator("h1").inner_text() == "Failed"
    assert tab.locator("#findings").inner_text() == "exit code 3"
    tab.locator(".open-one").click()
    assert HOSTILE in tab.locator("#facts").inner_text() and not tab.locator("#ask").is_visible()


def test_what_happened_last_stands_first(tab: Any, tmp_path: Path) -> None:
    """Also of what happened within a tenth of a second; and a save of 42 ms did not take 0 s."""
    status = job(saved=((1000, 274.0),))
    status.tasks[0].progress.root.steps[0].took_s = 0.042
    for text in ("attempt 2 is scheduling: it asks", "attempt 2 is running: it starts"):
        event(status, 800.0, "launcher", text)
    file = tmp_path / "page.html"
    file.write_text(standing_still(job_shown(status)))
    tab.goto(file.as_uri())
    happened = tab.locator("#events li").all_inner_texts()
    assert happened[0].endswith("running: it starts") and happened[1].endswith("it asks")
    assert "took 42 ms" in tab.locator("#figures").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault(tab: Any, scheme: str, tmp_path: Path) -> None:
    """Contrast, names, roles and order, in both colour schemes."""
    tab.emulate_media(color_scheme=scheme)
    events = [{"number": 1, "unix_s": 1.0, "kind": "lost", "text": "process 1 is lost"}]
    root = {
        "path": "/data/run7",
        "num_steps": 1,
        "steps": [{"step": 5, "bytes": 640, "damaged": True}],
    }
    status = {
        "job": "j",
        "num_processes": 2,
        "tasks": [
            {"task_id": 0, "state": "CONNECTED", "progress": {"root": root}},
            {"task_id": 1, "state": "ERROR"},
        ],
        "events": events,
        "goodput_s": {"stepping_s": 7.5, "saving_s": 2.5},
    }
    (tmp_path / "status.json").write_text(
        json.dumps({"unix_s": 9.0, "outcome": "failed: exit code 3", "status": status})
    )
    write_report(tmp_path / "status.json", tmp_path / "report.html")
    tab.goto(f"file://{tmp_path / 'report.html'}")
    tab.locator(".open-one").first.click()
    assert serious_faults(tab) == []
