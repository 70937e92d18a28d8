"""Lives of a job whose processes are threads: `python -m tests.model.multihost --lives 300`.

It has jax's number of the process to itself, and holdfast's job. Prints the shortest life of each
divergence, and ends with 1 where there is one.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

from ..campaign import Campaign, parse_arguments
from .drawing import life_of
from .found import FOUND, UNMENDED
from .lives import divergence_of, shortest
from .process import install

arguments = parse_arguments("tests.model.multihost", __doc__)
install()
mended = {name: life for name, life in FOUND.items() if name not in UNMENDED}
code = Campaign(life_of, divergence_of, shortest, mended).run(arguments)
# Threads of processes that were killed in the middle of a call would be waited for.
os._exit(code)
