"""Runs in the processes of tests/system/test_ids.py."""

from __future__ import annotations

from ids_start import client, count, index

from holdfast.multihost.group.ids import ProcessIds, exchange_ids

try:
    exchange_ids(client, ProcessIds(0, index, ()), count)
except ValueError as error:
    print(error)
