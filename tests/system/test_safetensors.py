"""A job of several processes that reads a safetensors file."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.checkpointing import free_port
from tests.support.cluster import run_processes
from tests.support.paths import program

DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2")


@pytest.mark.slow
def test_each_process_reads_only_its_bytes(tmp_path: Path) -> None:
    """Sharded over the devices of four processes, along either axis, each process asks the store
    for its own bytes and no more.
    """
    tensors = {
        f"layers.{i}": np.random.default_rng(i).integers(0, 100, (16, 32)).astype(jnp.dtype(dtype))
        for i, dtype in enumerate(DTYPES)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    script = program("safetensors_each_process_reads_only")
    outputs = run_processes(script, 4, arguments=[tmp_path, free_port()])
    assert all("own bytes" in output for output in outputs)
