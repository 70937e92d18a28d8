"""Starting alone, and how far a start is."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

from holdfast.coordination import ProcessInfo
from holdfast.multihost.start.start import Arrivals, arrival_line
from tests.support.cluster import run_processes
from tests.support.paths import program


def test_how_far_a_start_is() -> None:
    """The progress line names whom it waits for."""
    assert arrival_line([2], 4) == "3 of 4 processes, waiting for 2"
    assert arrival_line([0, 2, 3], 4) == "1 of 4 processes, waiting for 0, 2, 3"
    assert arrival_line([], 4) == "4 of 4 processes"


def test_thousands_make_few_short_lines(caplog: pytest.LogCaptureFixture) -> None:
    """Of a job of thousands a line names the first that lack, and there are a dozen lines until all
    have come. The last ones are named.
    """
    assert arrival_line(range(1, 16_384), 16_384).endswith(", 39, 40, and 16343 more")
    arrivals = Arrivals(4_096, "initialize()")
    infos = [ProcessInfo(process, "CONNECTED", 1) for process in range(4_096)]
    with caplog.at_level(logging.INFO):
        for count in range(1, 4_096, 2):
            arrivals.update(infos[:count])
        arrivals.all_arrived()
    assert len(caplog.messages) == 13 and max(map(len, caplog.messages)) < 300
    assert caplog.messages[-2:] == [
        "4,095 of 4,096 processes, waiting for 4095",
        "4,096 of 4,096 processes",
    ]


def test_alone_it_only_listens() -> None:
    """Without a cluster initialize() and shutdown() leave a single process a single process;
    arguments of half a cluster are refused.
    """
    (output,) = run_processes(program("start_alone"), 1)
    assert (
        "initialize() knows {'num_processes': 4} but not coordinator_address, process_id: give"
        " them, or start with `holdfast run`" in output
    )
    assert "initialize() comes before any computation" in output


def test_importing_brings_no_backend_up() -> None:
    """Importing the room neither starts a backend nor touches the environment."""
    code = (
        "import os; before = dict(os.environ); import holdfast.multihost; from jax._src import"
        " xla_bridge as x;"
    )
    code += "assert not x.backends_are_initialized() and before == dict(os.environ)"
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        timeout=60,
    )
