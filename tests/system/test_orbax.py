"""A job of several processes that writes and reads Orbax's layout."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp1
import pytest

from tests.support.checkpointing import free_port
from tests.support.cluster import run_processes
from tests.support.paths import program

pytestmark = pytest.mark.filterwarnings("ignore")  # Orbax's own


@pytest.mark.slow
def test_four_processes_write_and_read_orbax(tmp_path: Path) -> None:
    """Arrays sharded over four processes are saved in Orbax's layout by all of them, restored by
    the real Orbax in one, by us in four.
    """
    script = program("orbax_four_processes_write_read")
    outputs = run_processes(script, 4, arguments=[tmp_path / "c", free_port()], devices=2)
    assert all("exact 5" in output for output in outputs)
    whole = np.arange(8 * 16, dtype=np.float32).reshape(8, 16)
    like = jax.ShapeDtypeStruct(
        whole.shape, np.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])
    )
    restored = ocp1.load(tmp_path / "c", {"sharded": like, "replicated": like, "step": 0})
    assert (np.asarray(restored["sharded"]) == whole).all() and (
        np.asarray(restored["replicated"]) == whole + 1
    ).all()
