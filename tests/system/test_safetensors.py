"""A job of several processes that reads a safetensors file."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from tests.support.checkpointing import free_port
from tests.support.cluster import run_processes

DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2")


def test_each_process_reads_only_its_bytes(tmp_path: Path) -> None:
    """Sharded over the devices of four processes, along either axis, each process asks the store
    for its own bytes and no more.
    """
    tensors = {
        f"layers.{i}": np.random.default_rng(i).integers(0, 100, (16, 32)).astype(jnp.dtype(dtype))
        for i, dtype in enumerate(DTYPES)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    script = """
        import sys, jax, numpy as np
        from holdfast.checkpoint.layouts.detect import open_checkpoint, restore_checkpoint
        index, count, path, port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
        jax.distributed.initialize(f"127.0.0.1:{port}", count, index)
        mesh = jax.make_mesh((4,), ("d",))
        checkpoint = open_checkpoint(path)
        item = checkpoint.item("state")
        specs = [jax.P("d"), jax.P(None, "d")]
        like = {leaf.path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.NamedSharding(mesh, specs[i % 2]))
                for i, leaf in enumerate(item.leaves)}
        back = restore_checkpoint(checkpoint, "state", like)
        own = sum(leaf.nbytes for leaf in item.leaves) // count
        assert checkpoint.counter.bytes == own, (checkpoint.counter, own)
        plain = restore_checkpoint(open_checkpoint(path), "state")
        for name, array in back.items():
            (shard,) = array.addressable_shards
            assert np.asarray(shard.data).tobytes() == plain[name][shard.index].tobytes(), name
        print("own bytes", own)
    """
    outputs = run_processes(script, 4, arguments=[tmp_path, free_port()])
    assert all("own bytes" in output for output in outputs)
