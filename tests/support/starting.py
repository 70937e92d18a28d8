"""The start of scripts that join a job by `initialize()`."""

from __future__ import annotations

import textwrap

# argv: index, count, then the test's own.
START = """
import logging, os, sys, time
logging.basicConfig(format="%(levelname)s %(message)s")
logging.getLogger("holdfast").setLevel("INFO")
import jax
import holdfast.multihost as multihost
from holdfast.coordination import CoordinationError, CoordinatorLost, ProcessLost
from holdfast.multihost import StartupTimeout
index, count = int(sys.argv[1]), int(sys.argv[2])
"""


def script(text: str) -> str:
    """Returns a script that runs START and then `text`."""
    return START + textwrap.dedent(text)
