"""Lays out build/types/holdfast/* as links to the root folders, where type checkers look for the
packages.
"""

import tomllib
from pathlib import Path

root = Path(__file__).resolve().parent.parent
target = root / "build" / "types" / "holdfast"
target.mkdir(parents=True, exist_ok=True)
config = tomllib.loads((root / "pyproject.toml").read_text())
for package, folder in config["tool"]["setuptools"]["package-dir"].items():
    link = target / package.removeprefix("holdfast.")
    if not link.is_symlink():
        link.symlink_to(root / folder, target_is_directory=True)
