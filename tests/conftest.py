"""Options of the whole suite: `make slow` runs every slow test, `.ci/run` a seeded share of
them.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import signal
import sys
from collections.abc import Generator, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import pytest_timeout
from hypothesis import HealthCheck, settings

from tests.support.garbage import freeze
from tests.support.load import load

# A test that hangs in a C call, or in its own clean-up, never sees its limit's signal.
UNHEEDED_S = 60
TESTS = Path(__file__).parent

# How fast examples are made is said of a machine that has nothing else to do.
settings.register_profile("holdfast", suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("holdfast")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow-share", type=float, default=1.0, help="share of the slow tests to run, 0 to 1"
    )
    today = datetime.now(UTC).date()
    parser.addoption("--slow-seed", default=f"{today}", help="chooses which share")
    parser.addoption("--load", type=int, default=0, help="how many processes keep the machine busy")


@pytest.fixture
def drawn(request: pytest.FixtureRequest) -> random.Random:
    """Draws the share of a long campaign that this run of a slow test is to do."""
    return random.Random(f"{request.config.getoption('--slow-seed')} {request.node.nodeid}")


@pytest.fixture(scope="session", autouse=True)
def _load(request: pytest.FixtureRequest) -> Iterator[None]:
    with load(request.config.getoption("--load")):
        yield


@pytest.fixture(scope="session", autouse=True)
def _compiled(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Jobs keep what they compile here, and nothing in the home of whoever runs the suite."""
    os.environ["HOLDFAST_COMPILE_CACHE"] = str(tmp_path_factory.mktemp("compiled"))


def pytest_configure(config: pytest.Config) -> None:
    # A suite that a script runs in its background, or under nohup, inherits ignored signals, and so
    # would all that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    # Numpy's threads spin at first, in each process of a job: a fourteenth of what its start costs.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def _limit_of_slow(item: pytest.Item) -> float:
    limit = item.get_closest_marker("timeout")
    if limit is None or item.get_closest_marker("slow") is None:
        return 0
    return float(limit.args[0])


def _starts_processes(item: pytest.Item) -> bool:
    """Returns whether it is of a folder, or a file, that takes long."""
    first = item.path.relative_to(TESTS).parts[0]
    return first in ("launch", "model", "system", "test_docs.py", "web")


def _spread(items: Iterable[pytest.Item], share: float, seed: str) -> set[pytest.Item]:
    """Draws a share of tests, one of as many that follow each other by name: those of one function
    take about the same time, and no draw is to last much longer than another.
    """
    drawn = random.Random(seed)
    by_name = sorted(items, key=lambda item: item.nodeid)
    each = round(1 / share)
    return {drawn.choice(by_name[at : at + each]) for at in range(0, len(by_name), each)}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # The longest first: else one worker has it left when the others are done.
    items.sort(key=lambda item: (_limit_of_slow(item), _starts_processes(item)), reverse=True)
    share = config.getoption("--slow-share")
    seed = config.getoption("--slow-seed")
    if share >= 1:
        return
    slow = {item for item in items if item.get_closest_marker("slow")}
    dropped = slow - _spread(slow, share, seed)
    items[:] = [item for item in items if item not in dropped]
    config.hook.pytest_deselected(items=list(dropped))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    # All tests and what they import stay to the end: nobody looks for garbage among them.
    gc.disable()
    try:
        return (yield)
    finally:
        freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def _no_defect_of_a_coordinator(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test whose coordinator has met a defect: it answers its caller, and goes on."""
    folder = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    yield
    # `walk` passes over a folder that a background deletion takes meanwhile; `rglob` may not.
    for parent, _, names in () if folder is None else os.walk(folder):
        for name in names:
            if name.startswith("coordinator.log"):
                text = Path(parent, name).read_text(errors="replace")
                assert "Traceback" not in text, f"{parent}/{name}:\n{text}"


@pytest.fixture(autouse=True)
def _gives_descriptors_back() -> Iterator[None]:
    """Fails a test that leaves many open: the next ones would not have enough."""
    before = len(os.listdir("/proc/self/fd"))
    yield
    left = len(os.listdir("/proc/self/fd")) - before
    assert left < 200, f"{left} descriptors more are open than before"


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: pytest_timeout.Settings) -> object:
    faulthandler.dump_traceback_later(settings.timeout + UNHEEDED_S, exit=True, file=sys.__stderr__)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> object:
    faulthandler.cancel_dump_traceback_later()
    return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    # A test that failed once and then passed is a defect of the test or of the product, and what
    # failed is not seen again.
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.write_sep("_", f"failed once: {report.nodeid}")
        terminalreporter.write_line(report.longreprtext)
