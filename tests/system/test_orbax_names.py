"""The names that trainers know from Orbax answer as Orbax's do: both called side by side in one
group of four processes.
"""

from __future__ import annotations

import pytest

from tests.support.cluster import free_port, run_processes
from tests.support.paths import program

SCRIPT = program("orbax_names_script")


@pytest.mark.slow
def test_every_name_answers_as_orbax_does() -> None:
    """For every name that both have, the same calls give the same results (or ValueError), dtypes
    included; both import in one process.
    """
    outputs = run_processes(SCRIPT, 4, arguments=[free_port(), "theirs first"], devices=2)
    assert all("all the same" in output for output in outputs)


@pytest.mark.slow
def test_both_libraries_import_in_either_order() -> None:
    """Ours first, then Orbax: no flag is defined twice, and the same calls still give the same
    results.
    """
    outputs = run_processes(SCRIPT, 4, arguments=[free_port(), "ours first"], devices=2)
    assert all("all the same" in output for output in outputs)
