"""Writes a page for each address that the site once had: it leads to where the text is now.

python scripts/write_redirects.py site
"""

from __future__ import annotations

import sys
from pathlib import Path

# Pages of before, and the page (with its section) that took their text.
MOVED = {
    "accelerators": "how-we-know/#limits-of-this",
    "add-a-layout": "extending/#a-layout",
    "add-a-policy": "extending/#a-policy",
    "add-a-store": "extending/#a-store",
    "add-an-engine": "extending/#an-engine",
    "beside-others": "from-orbax/",
    "brax": "libraries/#brax",
    "engines-local": "running-jobs/#this-machine",
    "engines-mpi-kubernetes": "running-jobs/#mpi",
    "engines-ray": "running-jobs/#ray",
    "engines-slurm": "running-jobs/#slurm",
    "equinox": "libraries/#equinox",
    "flax-nnx": "libraries/#flax-and-optax",
    "from-jax-distributed": "from-orbax/#from-jaxdistributed",
    "grain": "libraries/#grain",
    "hangs": "watching/#when-it-hangs",
    "incremental": "local-tier/#incremental-saves",
    "keras": "libraries/#keras",
    "operators": "reading/",
    "policies": "concepts/#which-policies",
    "stability": "guarantees/#what-is-stable",
    "survivors": "preemption/#survivors-stay",
    "tutorial-hang": "watching/#when-it-hangs",
    "tutorial-machines": "trainer/",
    "tutorial-policies": "concepts/#which-policies",
    "tutorial-trainer": "trainer/",
    "web": "watching/#the-page-of-a-job",
}
PAGE = """<!doctype html>
<meta charset="utf-8">
<meta http-equiv="refresh" content="0; url=../{target}">
<link rel="canonical" href="../{target}">
<a href="../{target}">This page has moved.</a>
"""


def write(site: Path) -> None:
    """Writes the pages into a built site."""
    for old, target in MOVED.items():
        folder = site / old
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "index.html").write_text(PAGE.format(target=target))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
