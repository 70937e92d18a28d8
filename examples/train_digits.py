"""Trains a small network on 1,797 real handwritten digits, and survives preemption.

Alone on a laptop, and as four processes of a machine:

    python examples/train_digits.py --directory /tmp/digits
    holdfast run -n 4 -- python examples/train_digits.py --directory /tmp/digits

Run it again with the same directory, on as many processes as you like: it goes on from the last
saved step. What is holdfast's is marked with a number; all else is plain jax. The digits come with
scikit-learn: pip install scikit-learn.
"""

import argparse
import functools
import json
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from rich.progress import track

from holdfast import checkpoint, multihost

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError:
    sys.exit("the digits come with scikit-learn, which is not installed: pip install scikit-learn")

BATCH = 240  # images a step, over all processes
LEARNING_RATE = 2e-3
WIDTHS = (64, 512, 512, 10)  # 8 x 8 pixels in, ten digits out
PREEMPTED = 75  # the exit code that means to a launcher: saved, start me again


def init(key):
    """Returns the parameters: for each layer its weights [inputs, outputs] and bias [outputs]."""
    keys = jax.random.split(key, len(WIDTHS) - 1)
    shapes = zip(keys, WIDTHS[:-1], WIDTHS[1:], strict=True)
    return [
        {"w": jax.random.normal(k, (m, n)) * (2 / m) ** 0.5, "b": jnp.zeros(n)}
        for k, m, n in shapes
    ]


def predict(params, images):
    for layer in params[:-1]:
        images = jax.nn.relu(images @ layer["w"] + layer["b"])
    return images @ params[-1]["w"] + params[-1]["b"]


def loss_of(params, images, labels):
    return -jnp.mean(
        jnp.sum(jax.nn.log_softmax(predict(params, images)) * jax.nn.one_hot(labels, 10), axis=-1)
    )


@jax.jit
def share_right(params, images, labels):
    return jnp.mean(jnp.argmax(predict(params, images), axis=-1) == labels)


def fresh_state():
    params = init(jax.random.key(0))
    zeros = jax.tree.map(jnp.zeros_like, params)
    return {"params": params, "mean": zeros, "square": zeros, "count": jnp.zeros((), jnp.int32)}


def train_step(state, images, labels):
    """One step of Adam. The state has three trees of one shape, and the count of steps."""
    loss, grads = jax.value_and_grad(loss_of)(state["params"], images, labels)
    count = state["count"] + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mean"], grads)
    square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g * g, state["square"], grads)
    scale = LEARNING_RATE * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
    params = jax.tree.map(
        lambda p, m, s: p - scale * m / (jnp.sqrt(s) + 1e-8), state["params"], mean, square
    )
    return {"params": params, "mean": mean, "square": square, "count": count}, loss


# What needs no devices is made once, and is there still when another process's death has ended an
# attempt.
@functools.cache
def dataset():
    """Returns the images and what digits they are."""
    digits = load_digits()
    return (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)


@functools.cache
def state_shapes():
    return jax.eval_shape(fresh_state)


def sharding_of(mesh, leaf):
    """Splits an array's first axis over the mesh where it divides evenly, else replicates it."""
    divisible = leaf.ndim > 0 and leaf.shape[0] % mesh.size == 0
    return NamedSharding(mesh, PartitionSpec("data") if divisible else PartitionSpec())


def placed(shape, sharding):
    """Returns what an array is like, for a restore: its initial value is not made for that."""
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def batches(mesh, images, labels, steps):
    """Yields (step, images, labels).

    A batch depends on the step's number alone, so a resumed run sees what it would have seen.
    """
    for step in steps:
        chosen = np.random.default_rng(step).choice(len(images), BATCH, replace=False)
        x = images[chosen]
        y = labels[chosen]
        sharding = sharding_of(mesh, y)
        yield (
            step,
            jax.make_array_from_callback(x.shape, sharding, x.__getitem__),
            jax.make_array_from_callback(y.shape, sharding, y.__getitem__),
        )


def train(args):
    """Trains from the last saved step on; returns whether it stopped for a notice of preemption."""
    print(
        f"process {jax.process_index()} of {jax.process_count()}, pid {os.getpid()},"
        f" {jax.device_count()} devices in all",
        flush=True,
    )

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    images, labels = dataset()
    training = slice(0, 1437)
    test = slice(1437, None)

    shapes = state_shapes()
    shardings = jax.tree.map(lambda leaf: sharding_of(mesh, leaf), shapes)
    step_fn = jax.jit(
        train_step,
        donate_argnums=0,
        out_shardings=(shardings, NamedSharding(mesh, PartitionSpec())),
    )

    # 2. says when to save and what to keep
    manager = checkpoint.CheckpointManager(
        args.directory,
        save_policy=checkpoint.AnyOf(
            checkpoint.EveryNSteps(args.save_every), checkpoint.OnPreemption()
        ),
        keep_policy=checkpoint.KeepLast(3),
    )
    with manager:
        last = manager.latest_step() or 0
        if last:
            like = jax.tree.map(placed, shapes, shardings)
            state = manager.restore(last, like)  # 3. from any number of processes to this one
            print(f"resumed from step {last}", flush=True)
        else:
            state = jax.jit(fresh_state, out_shardings=shardings)()

        primary = multihost.is_primary_host(0)
        log = args.log.open("a", buffering=1) if args.log and primary else None
        data = batches(mesh, images[training], labels[training], range(last + 1, args.steps + 1))
        if sys.stdout.isatty():
            data = track(data, "training", total=args.steps - last)
        step = last
        preempted = False
        for step, x, y in data:
            state, loss = step_fn(state, x, y)
            if log:
                log.write(json.dumps({"step": step, "loss": float(loss)}) + "\n")
            if step % args.save_every == 0 and primary and not sys.stdout.isatty():
                print(f"step {step} of {args.steps}, loss {float(loss):.4f}", flush=True)
            # 4. when the policy says so, in the background
            manager.save(step, state, force=step == args.steps)
            if preempted := manager.reached_preemption(step):  # 5. the same step on every process
                break
        manager.wait_until_finished()
        if preempted:
            print(f"preempted: stopped at step {step}, which is saved", flush=True)
        else:
            # 6. a launcher believes this, whatever notice comes now
            multihost.default_group().report(done=1)

        right = float(share_right(state["params"], images[test], labels[test]))
        if primary:
            print(f"test accuracy after step {step}: {right:.4f}", flush=True)
            if args.report:
                report = {
                    "first": last + 1,
                    "last": step,
                    "accuracy": right,
                    "statistics": manager.statistics(),
                }
                args.report.write_text(json.dumps(report))
        if log:
            log.close()
    return preempted


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", required=True, type=Path, help="where checkpoints go")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--log", type=Path, help="append one JSON line a step: step and loss")
    parser.add_argument(
        "--report",
        type=Path,
        help="write accuracy and checkpoint statistics here as JSON at the end",
    )
    args = parser.parse_args()
    # 1. joins the other processes, and calls the function again when one of them has died; alone,
    # it only calls it
    preempted = multihost.run_restartable(lambda: train(args))
    sys.exit(PREEMPTED if preempted else 0)


if __name__ == "__main__":
    main()
