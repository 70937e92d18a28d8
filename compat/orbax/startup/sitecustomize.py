"""Run by every interpreter that starts with this folder on its path.

Installs the stand-ins, then runs the sitecustomize of the site.
"""

import importlib.machinery
import importlib.util
import os
import sys

from holdfast.compat.orbax import install

_HERE = os.path.dirname(os.path.abspath(__file__))

install()
_next = importlib.machinery.PathFinder.find_spec(
    "sitecustomize", [path for path in sys.path if os.path.abspath(path) != _HERE]
)
if _next is not None and _next.loader is not None:
    _next.loader.exec_module(importlib.util.module_from_spec(_next))
