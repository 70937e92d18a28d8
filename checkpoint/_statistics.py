"""What a manager counts. Times are this process's seconds; bytes of a save are those of the whole job."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Statistics:
    """Counts saves, restores and deletions. Thread-safe."""

    saves: int = 0
    saves_failed: int = 0
    saves_skipped: int = 0
    save_s: float = 0.0
    save_blocked_s: float = 0.0
    save_bytes: int = 0
    restores: int = 0
    restore_s: float = 0.0
    restore_bytes: int = 0
    steps_deleted: int = 0
    delete_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, **amounts: float) -> None:
        """Adds to counters, by name."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)

    def to_dict(self) -> dict[str, Any]:
        """Returns all counters, in JSON types."""
        with self._lock:
            return {name: getattr(self, name) for name in self.__dataclass_fields__ if not name.startswith("_")}


__all__ = ["Statistics"]
