"""Pathways: what plain jax on a CPU says, and the mark of a colocated runtime."""

from __future__ import annotations

from holdfast import multihost
from tests.support.cluster import run_processes


def test_plain_jax_is_no_pathways_job() -> None:
    """A CPU backend is neither reached through Pathways nor its controller."""
    assert not multihost.is_pathways_backend()
    assert not multihost.is_pathways_controller()


def test_a_process_is_marked_once_and_for_all() -> None:
    """The mark holds for the process that set it, from then on."""
    run_processes(
        """
        from holdfast import multihost
        assert not multihost.is_pathways_colocated_runtime_active()
        multihost.mark_pathways_colocated_runtime_active()
        multihost.mark_pathways_colocated_runtime_active()
        assert multihost.is_pathways_colocated_runtime_active()
        """,
        1,
    )
