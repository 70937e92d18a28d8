"""The local tier in jobs whose coordinator has TLS: real processes, a certificate each, and
strangers at their part servers.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from holdfast.coordination import CoordinationService, JobIdentity
from holdfast.multihost import ProcessSpec
from tests.support.cluster import Processes
from tests.support.tls import STRANGERS, Authority, dial
from tests.system.test_local_tier import RESTORE, TRAIN


@contextlib.contextmanager
def _by_tls(script: Path, folder: Path, names: str, *arguments: object) -> Iterator[Processes]:
    """Runs a job; process i is the host that is named at i, by a certificate of its own."""
    count = len(names.split(","))
    authority = Authority(folder, "ours")
    server = authority.issue("server")
    pems = [authority.issue(f"process{index}") for index in range(count)]
    secured = (f"--tls-cert={server.cert}", f"--tls-key={server.key}", f"--tls-ca={server.ca}")
    with CoordinationService.spawn(count, job=JobIdentity(name="j"), arguments=secured) as service:

        def environment(index: int) -> dict[str, str]:
            files = {
                "tls_cert": pems[index].cert,
                "tls_key": pems[index].key,
                "tls_ca": pems[index].ca,
            }
            return ProcessSpec(
                process_id=index,
                num_processes=count,
                coordinator=service.address,
                job_id="j",
                **files,
            ).to_env()

        devices = 6 // count
        own = ["launched", folder / "root", folder / "hosts", names, *arguments]
        with Processes(
            script, count, arguments=own, env_of=environment, devices=devices
        ) as processes:
            yield processes


def test_parts_go_by_tls_and_strangers_disturb_nobody(tmp_path: Path) -> None:
    """Strangers of each kind come to each part server while it serves, and one stalls; saves go on,
    and the copies of a lost host serve the host in its place.
    """
    with (
        contextlib.ExitStack() as stalled,
        _by_tls(TRAIN, tmp_path, "h0,h1", 100_000) as first,
    ):
        first.wait_for(0, "acknowledged 2:")
        addresses = [
            re.findall(r"parts by TLS True at (\S+)", first.output(index))[0] for index in range(2)
        ]
        for address in addresses:
            stalled.enter_context(dial(address))
            for stranger in STRANGERS:
                with stranger(address, tmp_path) as connection, contextlib.suppress(OSError):
                    assert connection.recv(1) == b""
        known = first.output(0).count("acknowledged")
        first.wait_for(0, f"acknowledged {known + 3}:")
        outputs = [first.output(index) for index in range(2)]
        for index in range(2):
            first.kill(index)
        newest = max(
            int(step)
            for each in first.wait(30)
            for step in re.findall(r"acknowledged \d+: (\d+)\n", each.output)
        )
    assert not any("failed; durable saves go on" in output for output in outputs), outputs
    assert sum("did not show a certificate" in output for output in outputs) == 2, outputs
    shutil.rmtree(tmp_path / "hosts" / "h1")
    with _by_tls(RESTORE, tmp_path, "h2,h0") as second:
        finished = second.wait(90)
    assert [each.code for each in finished] == [0, 0], finished
    restored = {
        int(step) for each in finished for step in re.findall(r"restored (\d+)", each.output)
    }
    assert len(restored) == 1 and restored.pop() >= newest
    assert '"local_off": ""' in finished[0].output
