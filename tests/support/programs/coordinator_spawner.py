"""Spawns a coordinator, prints its pid and address, and ends at once."""

from __future__ import annotations

import os

from holdfast.coordination import CoordinationService, ServiceTimeouts

service = CoordinationService.spawn(1, timeouts=ServiceTimeouts(startup_s=60))
print(service.pid, service.address, flush=True)
assert os.getsid(service.pid) == service.pid
os._exit(0)
