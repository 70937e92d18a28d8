"""Fine-tunes a model from a Hugging Face folder, and exports it with its config and tokenizer."""

import json
import shutil
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from holdfast import multihost
from holdfast.checkpoint import CheckpointManager, EveryNSteps, Files, KeepLast, convert, load

folder = Path(sys.argv[1])
steps = int(sys.argv[2])
downloaded = folder.with_name(f"{folder.name}-hf")
exported = folder.with_name(f"{folder.name}-exported")


def download(where):
    """Stands for `huggingface_hub.snapshot_download`."""
    where.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    names = {"model.embed.weight": (32, 8), "model.up.weight": (8, 8), "lm_head.weight": (32, 8)}
    tensors = {name: rng.normal(size=s).astype(np.float32) / 4 for name, s in names.items()}
    (where / "config.json").write_text(json.dumps({"model_type": "tiny", "hidden_size": 8}))
    (where / "tokenizer.json").write_text(json.dumps({"vocab": {"a": 0}}))
    save_file(tensors, where / "model.safetensors", metadata={"format": "pt"})


def copy_tokenizer(to):
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(downloaded / name, to)


@jax.jit
def train(params, tokens):
    def loss_of(params):
        x = params["model.embed.weight"][tokens[:, :-1]]
        x = jnp.tanh(x @ params["model.up.weight"].T)
        scores = jax.nn.log_softmax(x @ params["lm_head.weight"].T)
        return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1))

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), loss


multihost.initialize()
if multihost.is_primary_host(0) and not downloaded.exists():
    unfinished = downloaded.with_name("unfinished")
    download(unfinished)
    unfinished.rename(downloaded)
multihost.sync_global_processes("downloaded")
params = jax.tree.map(jnp.asarray, load(downloaded))
first = 1
policies = {"save_policy": EveryNSteps(5), "keep_policy": KeepLast(2)}
with CheckpointManager(folder, **policies) as manager:
    if manager.latest_step() is not None:
        first = manager.latest_step() + 1
        params = manager.restore(first - 1, params, item="model")
        print(f"resumed from step {first - 1}", flush=True)
    stopped = False
    for step in range(first, steps + 1):
        start = np.random.default_rng(step).integers(0, 32, (12, 1))
        params, loss = train(params, (start + 5 * np.arange(9)) % 32)
        if jax.process_index() == 0:
            print(f"step {step} loss {loss:.5f}", flush=True)
        items = {"model": params, "files": Files(copy_tokenizer)}
        manager.save(step, items=items, metrics={"loss": float(loss)}, force=step == steps)
        if stopped := manager.reached_preemption(step):
            print(f"stops after step {step}", flush=True)
            break
        time.sleep(0.03)  # a larger model's step
print("statistics", json.dumps(manager.statistics()))
if not stopped and multihost.is_primary_host(0):
    shutil.rmtree(exported, ignore_errors=True)
    convert(folder, exported, "safetensors")
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= {
        path.name for path in exported.iterdir()
    }
    tuned = load(exported)
    assert all((tuned[name] == np.asarray(params[name])).all() for name in params)
multihost.shutdown()
