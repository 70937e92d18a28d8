"""Makes claims one after the other in one process, and prints which of them do not hold."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path


def print_claims(claims: Mapping[str, Callable[[Path], None]], folder: Path) -> None:
    """Prints as JSON what each claim raised, "" where it holds. Each has a folder of its own."""
    found: dict[str, str] = {}
    for name, claim in claims.items():
        found[name] = ""
        try:
            claim(folder / name)
        except Exception:
            found[name] = traceback.format_exc()
    print(json.dumps(found))
