"""Fixtures of several of these tests: a real browser, Debian's Chromium without a window."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.libraries import miss

_CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One browser for all tests of a module, None where there is none."""
    if _CHROMIUM is None or importlib.util.find_spec("playwright") is None:
        yield None
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=_CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def tab_if_any(browser: Any) -> Iterator[Any]:
    """A tab in which no script may fail, and that asks nobody else for anything; None where there
    is no browser.
    """
    if browser is None:
        yield None
        return
    opened = browser.new_page()
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on(
        "request",
        lambda request: (
            problems.append(request.url)
            if "127.0.0.1" not in request.url and "file:" not in request.url
            else None
        ),
    )
    yield opened
    opened.close()
    assert problems == []


@pytest.fixture
def tab(tab_if_any: Any) -> Any:
    """The same, for tests that are about nothing else."""
    if tab_if_any is None:
        miss(
            "needs playwright (make slow-libraries) and Chromium"
            " (scripts/install_system_packages.sh)"
        )
    return tab_if_any
