"""Runs in the processes of tests/system/test_health.py."""

from __future__ import annotations

from health_start import index, total

from holdfast import multihost


def outcome():
    try:
        with multihost.live_devices() as devices:
            assert total(devices) == len(devices)
            if index == 1:
                raise KeyError("mine")
    except Exception as error:
        return f"{type(error).__name__}: {error}"


print(outcome())
with multihost.live_devices() as devices:
    print(len(devices), "devices")
print(sorted(multihost.live_processes([0, 1, 2])))
multihost.shutdown()
