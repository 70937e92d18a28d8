"""Lives of roots beside their model: `python -m tests.model.checkpoint --lives 5000`.

It has the devices of a process to itself, and its clock. Prints the shortest life of each
divergence, and ends with 1 where there is one.
"""

from __future__ import annotations

import os
import sys
import warnings

from ..campaign import Campaign, parse_arguments
from .clock import install, watch_policies

install()
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

# Only now: holdfast keeps the clock that it finds, and jax the devices.
from .faults import register  # noqa: E402
from .found import FOUND, UNMENDED  # noqa: E402
from .lives import divergence_of, life_of, shortest  # noqa: E402
from .site import JOBS  # noqa: E402

arguments = parse_arguments("tests.model.checkpoint", __doc__)
warnings.simplefilter("error")
watch_policies()
register()
mended = {name: life for name, life in FOUND.items() if name not in UNMENDED}
code = Campaign(life_of, divergence_of, shortest, mended).run(arguments)
JOBS.close()
sys.exit(code)
