"""Runs in the processes of tests/system/test_local_tier.py."""

from __future__ import annotations

import json

from local_tier_start import go_on, manager

go_on()
print("statistics", json.dumps(manager.statistics()), flush=True)
manager.close()
