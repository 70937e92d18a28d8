"""A job of several processes that writes and reads Orbax's layout."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp1
import pytest

from tests.support.checkpointing import free_port
from tests.support.cluster import run_processes

pytestmark = pytest.mark.filterwarnings("ignore")  # Orbax's own


def test_four_processes_write_and_read_orbax(tmp_path: Path) -> None:
    """Arrays sharded over four processes are saved in Orbax's layout by all of them, restored by
    the real Orbax in one, by us in four.
    """
    script = """
        import sys, jax, jax.numpy as jnp, numpy as np
        from holdfast.checkpoint import load, save
        index, count, path, port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
        jax.distributed.initialize(f"127.0.0.1:{port}", count, index)
        mesh = jax.make_mesh((8,), ("d",))
        sharding = jax.NamedSharding(mesh, jax.P("d"))
        whole = np.arange(8 * 16, dtype=np.float32).reshape(8, 16)
        array = jax.make_array_from_callback(whole.shape, sharding, lambda i: whole[i])
        other = jax.make_array_from_callback(whole.shape, jax.NamedSharding(mesh, jax.P()), lambda i: whole[i] + 1)
        save(path, {"sharded": array, "replicated": other, "step": 5}, layout="orbax")
        like = jax.ShapeDtypeStruct(whole.shape, np.float32, sharding=jax.NamedSharding(mesh, jax.P(None, "d")))
        back = load(path, {"sharded": like, "replicated": like, "step": 0})
        for shard in back["sharded"].addressable_shards:
            assert (np.asarray(shard.data) == whole[shard.index]).all()
        print("exact", back["step"])
    """
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
