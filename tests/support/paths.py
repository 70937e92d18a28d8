"""Where things are in the source tree."""

from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parent.parent
EXAMPLES = ROOT / "examples"


def program(name: str) -> Path:
    """Returns the file of a program that tests run in a process of its own."""
    path = ROOT / "tests" / "support" / "programs" / f"{name}.py"
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such program of the tests")
    return path
