"""Runs in the processes of tests/system/test_clients.py."""

from __future__ import annotations

import json
import os
import sys

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np

x = np.linspace(-1, 1, 128, dtype=np.float32).reshape(32, 4)
y = x.sum(axis=1, keepdims=True)


def make():
    keras.utils.set_random_seed(7)
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(8, activation="relu", name="hidden")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1, name="out")(hidden))
    model.compile(optimizer="adam", loss="mse")
    return model


def look(
    model,
):  # what it says, and how it goes on: by its weights, and by the state of its optimizer
    keras.utils.set_random_seed(1)
    return [
        model.predict(x, verbose=0).tolist(),
        model.fit(x, y, epochs=2, verbose=0).history["loss"],
    ]


root = sys.argv[1]
others = sys.argv[2:]
model = make()
callback = keras.callbacks.OrbaxCheckpoint(root, max_to_keep=2)
found = {"losses": model.fit(x, y, epochs=4, verbose=0, callbacks=[callback]).history["loss"]}
found["steps"] = sorted(name for name in os.listdir(root) if name.isdigit())
model.save(f"{root}.keras")
found["saved"] = look(keras.saving.load_model(f"{root}.keras"))
found["checkpoints"], found["weights"] = [], []
for name in [root, *others]:
    found["checkpoints"].append(look(keras.saving.load_model(name)))
    fresh = make()
    fresh.load_weights(name)
    found["weights"].append(fresh.predict(x, verbose=0).tolist())
print(json.dumps(found))
