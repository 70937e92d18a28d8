"""Lives of jobs beside the launcher's rules: `python -m tests.model.launch --lives 10000`.

Prints the shortest life that breaks each rule, and ends with 1 where there is one.
"""

from __future__ import annotations

import sys

from ..campaign import Campaign, parse_arguments
from .found import FOUND
from .lives import divergence_of, life_of, shortest

arguments = parse_arguments("tests.model.launch", __doc__)
sys.exit(Campaign(life_of, divergence_of, shortest, FOUND).run(arguments))
