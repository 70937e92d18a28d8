"""Network namespaces on a bridge: hosts of their own, as far as IP knows. Needs root and
iproute2.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def ip(*arguments: str) -> None:
    """Runs iproute2's command."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Network:
    """Namespaces on a bridge of this machine; `host` is the bridge's address, which all of them
    reach.
    """

    def __init__(self, count: int) -> None:
        self.tag = uuid.uuid4().hex[:6]
        self.bridge = f"hfb{self.tag}"
        self.net = f"10.{200 + int(self.tag[:2], 16) % 50}.{int(self.tag[2:4], 16)}"
        self.names = [f"hf{self.tag}{index}" for index in range(count)]
        self.host = f"{self.net}.1"

    def up(self) -> None:
        """Makes bridge, namespaces and cables."""
        ip("link", "add", self.bridge, "type", "bridge")
        ip("addr", "add", f"{self.host}/24", "dev", self.bridge)
        ip("link", "set", self.bridge, "up")
        for index, name in enumerate(self.names):
            ip("netns", "add", name)
            ip("link", "add", f"v{name}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"v{name}", "master", self.bridge, "up")
            ip("-n", name, "addr", "add", f"{self.net}.{10 + index}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")

    def down(self) -> None:
        """Takes all away."""
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True, check=False)

    def unplug(self, index: int) -> None:
        """Takes a peer's link down."""
        ip("link", "set", f"v{self.names[index]}", "down")

    def plug(self, index: int) -> None:
        """Takes a peer's link up again."""
        ip("link", "set", f"v{self.names[index]}", "up")

    def part(self, *indices: int, parted: bool = True) -> None:
        """Lets no packet through between any two of these peers, or lets them through again; all
        else they reach as before.
        """
        for index in indices:
            ip(
                "link",
                "set",
                f"v{self.names[index]}",
                "type",
                "bridge_slave",
                "isolated",
                "on" if parted else "off",
            )

    def throttle(self, index: int, megabits_s: int | None) -> None:
        """Bounds what a peer sends a second, or no more (None)."""
        shape = [
            "add",
            "dev",
            "eth0",
            "root",
            "tbf",
            "rate",
            f"{megabits_s}mbit",
            "burst",
            "64kb",
            "latency",
            "100ms",
        ]
        command = shape if megabits_s else ["del", "dev", "eth0", "root"]
        subprocess.run(
            ["tc", "-n", self.names[index], "qdisc", *command], check=True, capture_output=True
        )

    def wait_until_sent(self, index: int, size: int, within_s: float = 30) -> None:
        """Waits until a peer has sent so many bytes more."""
        counter = Path(f"/sys/class/net/v{self.names[index]}/statistics/rx_bytes")
        first = int(counter.read_text())
        end = time.monotonic() + within_s
        while int(counter.read_text()) < first + size:
            assert time.monotonic() < end, f"{self.names[index]} has not sent {size} bytes"
            time.sleep(0.01)  # the kernel tells nobody

    def drop(self, index: int) -> None:
        """Drops every packet of a peer, with its link up: its end of the cable hangs in the air."""
        ip("link", "set", f"v{self.names[index]}", "nomaster")


@contextmanager
def namespaces(count: int = 1) -> Iterator[Network]:
    """Yields a network of `count` namespaces; skips the test where there can be none."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2 for network namespaces")
    network = Network(count)
    try:
        network.up()
    except subprocess.CalledProcessError as error:
        network.down()
        pytest.skip(f"no network namespaces here: {error.stderr!r}")
    try:
        yield network
    finally:
        network.down()


def python_in(namespace: str, folder: Path) -> str:
    """Returns a command that runs Python inside a namespace."""
    script = folder / f"python-{namespace}"
    script.write_text(f'#!/bin/sh\nexec ip netns exec {namespace} {sys.executable} "$@"\n')
    script.chmod(0o755)
    return str(script)
