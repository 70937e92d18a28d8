"""The Pythons and the versions of jax under which the programs run."""

from __future__ import annotations

from pathlib import Path

from tests.support.environments import environment
from tests.support.paths import ROOT

PYTHONS = ("3.11", "3.12", "3.13")
# jax 0.11 and later need Python 3.12: there the newest of 3.11 is one of 0.10.
JAXES = {"oldest": ["jax==0.10.0", "jaxlib==0.10.0"], "newest": ["jax>=0.10.2"]}
_LIBRARIES = ["dm-haiku", "equinox", "flax", "grain", "optax"]


def interpreter(python: str, jax: str) -> Path:
    """Returns the interpreter of an environment, made on demand. Where the Python is missing, what
    calls this is skipped with the reason.
    """
    packages = ["-e", f"{ROOT}[safetensors,web]", *_LIBRARIES, *JAXES[jax]]
    return environment(f"programs-{python}-{jax}", python, packages)


if __name__ == "__main__":
    for each in PYTHONS:
        for jax in JAXES:
            print(interpreter(each, jax), flush=True)
