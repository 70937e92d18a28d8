"""Who writes which chunk into which pack (signatures; bodies follow)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """Says what each process writes of one tree, the same on every process but for `own`.

    `hash` is the SHA-256, in hex, of its canonical description. `own_bytes` is what this process writes, `total_bytes` what all write.
    """

    hash: str
    process: int
    process_count: int
    own_bytes: int
    total_bytes: int
