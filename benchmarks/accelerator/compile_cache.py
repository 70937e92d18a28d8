"""Part f: what the compile cache of `holdfast run` saves the second run of a job."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from plan import Plan
from report import figure, not_run, seconds, size

LAYERS = {True: 4, False: 16}  # by smoke


def train_once(layers: int, answer: Path) -> None:
    """Compiles a step of a network and runs it; writes how long that took."""
    from holdfast import multihost

    multihost.initialize()
    import jax
    import jax.numpy as jnp

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for number, weight in enumerate(weights):  # unrolled: each layer is compiled
            x = jax.nn.gelu(x @ weight) + jnp.roll(x, number, axis=1)
            x = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
        return x.mean()

    weights = [jnp.full((256, 256), 1e-3, jnp.float32) for _ in range(layers)]
    x = jnp.ones((64, 256))
    jax.block_until_ready((weights, x))
    began = time.perf_counter()
    jax.block_until_ready(jax.jit(jax.value_and_grad(loss))(weights, x))
    answer.write_text(json.dumps(time.perf_counter() - began))
    multihost.shutdown()


def main() -> None:
    if sys.argv[1] == "--train":
        train_once(int(sys.argv[2]), Path(sys.argv[3]))
        return
    plan = Plan.of_json(sys.argv[1])
    folder = plan.folder("compile")
    folder.mkdir()
    holdfast = shutil.which("holdfast")
    assert holdfast is not None, "no holdfast on PATH"
    runs = ["first"] if plan.smoke else ["first", "second"]
    steps = []
    for run in runs:
        answer = folder / run
        command = [sys.executable, holdfast, "run", "-n", "1"]
        command += ["--compile-cache", str(folder / "compiled")]
        command += ["--", sys.executable, __file__, "--train", str(LAYERS[plan.smoke])]
        environment = {
            key: value for key, value in os.environ.items() if key != "JAX_COMPILATION_CACHE_DIR"
        }
        began = time.perf_counter()
        subprocess.run([*command, str(answer)], env=environment, check=True)
        whole = time.perf_counter() - began
        steps.append(json.loads(answer.read_text()))
        kept = list((folder / "compiled").rglob("*-cache"))
        figure(
            f"the first step of the {run} run",
            seconds(steps[-1]),
            f"{seconds(whole)} from start to end; {len(kept)} files of"
            f" {size(sum(path.stat().st_size for path in kept))} in the cache",
        )
    if plan.smoke:
        not_run("a second run", "not in smoke")
    else:
        figure("the second run's first step takes, of the first's", f"{steps[1] / steps[0]:.2f}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
