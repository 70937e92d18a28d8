"""Ends by the exception of its argument, in a job of two or alone."""

from __future__ import annotations

import sys

from holdfast import multihost

multihost.initialize()
name = sys.argv[1]
raise getattr(multihost, name)(f"{name} was meant")
