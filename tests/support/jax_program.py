"""An ordinary jax program of several processes, on every path of jax.distributed; it knows nothing
of holdfast.
"""

from tests.support.paths import program

BIND = {"JAX_COORDINATOR_BIND_ADDRESS": "127.0.0.1:0"}
"""Lets process 0's own service idle on a spare port: the coordinator is ours."""

JAX_PROGRAM = program("jax_program")


def preempted_at(outputs: list[str]) -> set[str]:
    """Returns the steps at which the processes were told to stop: one, where they agreed."""
    return {
        line
        for output in outputs
        for line in output.splitlines()
        if line.startswith("preempted at")
    }
