"""Lives of processes that save: `python -m tests.model.process_lives --lives 300`.

LIVES_PYTHON names another Python that has holdfast: the processes are of that one. Prints the
plainest life of each divergence, and ends with 1 where there is one.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

from ..campaign import Campaign, parse_arguments
from .found import FOUND
from .life import life_of
from .lives import divergence_of, shortest

arguments = parse_arguments("tests.model.process_lives", __doc__)
code = Campaign(life_of, divergence_of, shortest, FOUND).run(arguments)
raise SystemExit(code)
