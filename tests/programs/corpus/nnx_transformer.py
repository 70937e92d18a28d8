"""A tiny transformer of Flax NNX over letters, its sizes saved as JSON beside the weights."""

import dataclasses
import json
import sys
import time

import jax
import numpy as np
import optax
from flax import nnx

from holdfast import multihost
from holdfast.checkpoint import CheckpointManager, EveryNSteps, Json, KeepLast


@dataclasses.dataclass
class Sizes:
    vocabulary: int = 32
    length: int = 8
    width: int = 16
    heads: int = 2
    layers: int = 2


class Block(nnx.Module):
    def __init__(self, sizes, rngs):
        self.attention = nnx.MultiHeadAttention(
            sizes.heads, in_features=sizes.width, decode=False, rngs=rngs
        )
        self.norm = nnx.LayerNorm(sizes.width, rngs=rngs)
        self.mlp = nnx.Linear(sizes.width, sizes.width, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(x, mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.mlp(nnx.gelu(self.norm(x)))


class Transformer(nnx.Module):
    def __init__(self, sizes, rngs):
        self.embed = nnx.Embed(sizes.vocabulary, sizes.width, rngs=rngs)
        for layer in range(sizes.layers):
            setattr(self, f"block{layer}", Block(sizes, rngs))
        self.layers = sizes.layers
        self.out = nnx.Linear(sizes.width, sizes.vocabulary, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in range(self.layers):
            x = getattr(self, f"block{layer}")(x)
        return self.out(x)


@nnx.jit
def train_step(model, optimizer, tokens):
    def loss_of(model):
        logits = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


def main(folder, steps):
    multihost.initialize()
    sizes = Sizes()
    model = Transformer(sizes, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    first = 1
    with CheckpointManager(folder, save_policy=EveryNSteps(10), keep_policy=KeepLast(2)) as manager:
        if (last := manager.latest_step()) is not None:
            known = manager.restore(last, Json, item="sizes")
            if Sizes(**known) != sizes:
                raise SystemExit(f"the checkpoint is of {known}, the model of {sizes}")
            likes = {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
            restored = manager.restore(last, items=likes)
            nnx.update(model, restored["model"])
            nnx.update(optimizer, restored["optimizer"])
            first = last + 1
            print(f"resumed from step {last}", flush=True)
        for step in range(first, steps + 1):
            starts = np.random.default_rng(step).integers(0, sizes.vocabulary, (6, 1))
            tokens = (starts + 3 * np.arange(sizes.length + 1)) % sizes.vocabulary
            loss = train_step(model, optimizer, tokens)
            if jax.process_index() == 0:
                print(f"step {step} loss {loss:.5f}", flush=True)
            items = {
                "model": nnx.state(model),
                "optimizer": nnx.state(optimizer),
                "sizes": Json(dataclasses.asdict(sizes)),
            }
            manager.save(step, items=items, metrics={"loss": float(loss)})
            if manager.reached_preemption(step):
                print(f"stops after step {step}", flush=True)
                break
            time.sleep(0.02)  # a larger model's step
    print("statistics", json.dumps(manager.statistics()))
    multihost.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
