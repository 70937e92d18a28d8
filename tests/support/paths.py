"""Where things are in the source tree."""

from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parent.parent
EXAMPLES = ROOT / "examples"
