"""Roots with other tools' files about them: `python -m tests.model.neighbours --lives 2000`.

Prints the plainest draw of each divergence, and ends with 1 where there is one.
"""

from __future__ import annotations

import logging
import os
import warnings

os.environ["JAX_PLATFORMS"] = "cpu"

from ..campaign import Campaign, parse_arguments
from .found import FOUND
from .lives import divergence_of, life_of, shortest

warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
arguments = parse_arguments("tests.model.neighbours", __doc__)
code = Campaign(life_of, divergence_of, shortest, FOUND).run(arguments)
raise SystemExit(code)
