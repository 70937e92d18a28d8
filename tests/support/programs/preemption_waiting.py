"""Waits in `initialize()` for a process that does not come."""

from __future__ import annotations

from preemption_start import address

from holdfast import multihost

print("waiting", flush=True)
multihost.initialize(address, 2, 0, timeout_s=60)
