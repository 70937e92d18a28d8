"""What one process finds out for all, and what is left of it with the coordinator."""

from __future__ import annotations

from holdfast.coordination import CoordinationClient
from holdfast.multihost.group.late import tell_once
from tests.support.in_process import serving


def test_who_asks_first_tells_the_others_and_clears_up() -> None:
    """A job that hangs or waits many times leaves the keys of the last time of each kind."""
    with serving(1) as service, CoordinationClient(service.address, 0) as client:
        for kind in ("late", "hangs"):
            for turn in range(3):
                folder = f"holdfast/{kind}/{turn}"
                assert tell_once(client, folder, lambda: "found") == "found"
                assert tell_once(client, folder, lambda: "again") == "found"
        keys = {key for key, _ in client.key_value_dir_get("holdfast")}
    assert keys == {
        f"holdfast/{kind}/2/{key}" for kind in ("late", "hangs") for key in ("asked", "why")
    }
