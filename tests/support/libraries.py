"""Libraries that some tests need and most do not."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest


def need(module: str, install: str) -> Any:
    """Returns a library. Without it the test, or the file, is skipped; in CI it fails.

    `install` is what brings the library: a target of make, or a command.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = f"{module} is not installed ({error}): {install}"
        if os.environ.get("CI"):
            pytest.fail(missing, pytrace=False)
        pytest.skip(missing, allow_module_level=True)
