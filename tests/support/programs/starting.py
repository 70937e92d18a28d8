"""What programs that join a job by `initialize()` begin with: argv has index and count."""

from __future__ import annotations

import logging
import sys

logging.basicConfig(format="%(levelname)s %(message)s")
logging.getLogger("holdfast").setLevel("INFO")

index = int(sys.argv[1])
count = int(sys.argv[2])
