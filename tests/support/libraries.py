"""Libraries and programs that some tests need and most do not."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any, NoReturn

import pytest


def need(module: str, install: str) -> Any:
    """Returns a library. Without it the test, or the file, is skipped; in CI it fails.

    `install` is what brings the library: a target of make, or a command.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        miss(f"{module} is not installed ({error}): {install}")


def need_installed(module: str, install: str) -> None:
    """Does the same for a library that a program of the test imports, and the test does not."""
    if importlib.util.find_spec(module) is None:
        miss(f"{module} is not installed: {install}")


def need_program(name: str, installed: Path, install: str) -> str:
    """Returns a program, where it was installed or on the PATH. Without it the test is skipped; in
    CI it fails.
    """
    found = shutil.which(installed) or shutil.which(name)
    if found is None:
        miss(f"{name} is not installed: {install}")
    return found


def miss(why: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(why, pytrace=False)
    pytest.skip(why, allow_module_level=True)
