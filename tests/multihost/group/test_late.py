"""What one process finds out for all, and what is left of it with the coordinator."""

from __future__ import annotations

from holdfast.coordination import CoordinationClient
from holdfast.multihost.group.group_client import GroupClient
from holdfast.multihost.group.late import tell_once
from tests.support.in_process import serving


def test_who_asks_first_tells_the_others_and_clears_up() -> None:
    """A job that hangs or waits many times leaves the keys of the last time of each kind."""
    with serving(1) as service, CoordinationClient(service.address, 0) as client:
        group_client = GroupClient(client)
        for kind in ("late", "hangs"):
            for turn in range(3):
                folder = f"holdfast/{kind}/{turn}"
                assert tell_once(group_client, folder, lambda: "found", 10.0) == "found"
                assert tell_once(group_client, folder, lambda: "again", 10.0) == "found"
        keys = {key for key, _ in client.key_value_dir_get("holdfast")}
    assert keys == {
        f"holdfast/{kind}/2/{key}" for kind in ("late", "hangs") for key in ("asked", "why")
    }
