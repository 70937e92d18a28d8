"""An iterator of one's own over lines of text, which says where it is and can go back there."""

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from holdfast import multihost
from holdfast.checkpoint import CheckpointManager, EveryNSteps, KeepLast

TEXT = """the holdfast anchors kelp to rock
where currents pull and surges knock
each frond that bends is held below
by roots that neither tire nor go""".splitlines()


class Lines:
    """Yields the lines in another order each time round."""

    def __init__(self):
        self.place = 0
        self.rng = np.random.default_rng(0)
        self.order = self.rng.permutation(len(TEXT))

    def __iter__(self):
        return self

    def __next__(self):
        if self.place == len(TEXT):
            self.place = 0
            self.order = self.rng.permutation(len(TEXT))
        self.place += 1
        return TEXT[self.order[self.place - 1]]

    def get_state(self):
        return {
            "place": self.place,
            "order": self.order.tolist(),
            "rng": self.rng.bit_generator.state,
        }

    def set_state(self, state):
        self.place = state["place"]
        self.order = np.array(state["order"])
        self.rng.bit_generator.state = state["rng"]


@jax.jit
def train(table, letters):
    """A bigram model: one step of gradient descent."""

    def loss_of(table):
        scores = jax.nn.log_softmax(table[letters[:-1]])
        return -jnp.mean(jnp.take_along_axis(scores, letters[1:, None], axis=1))

    loss, gradient = jax.value_and_grad(loss_of)(table)
    return table - 5.0 * gradient, loss


multihost.initialize()
table = jnp.zeros((128, 128))
lines = Lines()
step = 0
manager = CheckpointManager(sys.argv[1], save_policy=EveryNSteps(5), keep_policy=KeepLast(3))
with manager:
    if manager.latest_step() is not None:
        step = manager.latest_step()
        table = manager.restore(step, table, item="table")
        manager.restore(step, lines, item="lines", process=0)
        print(f"resumed from step {step}", flush=True)
    for line in lines:
        if step == int(sys.argv[2]):
            break
        step += 1
        letters = np.frombuffer(line.ljust(40).encode(), np.uint8).astype(np.int32)
        table, loss = train(table, letters)
        if jax.process_index() == 0:
            print(f"step {step} loss {loss:.5f}", flush=True)
        items = {"table": table, "lines": lines}
        manager.save(step, items=items, metrics={"loss": float(loss)})
        if manager.reached_preemption(step):
            print(f"stops after step {step}", flush=True)
            break
        time.sleep(0.03)  # a larger model's step
print("statistics", json.dumps(manager.statistics()))
multihost.shutdown()
