"""jaxlib's agent: XLA's flag for collectives, and the certificate that the agent may show."""

from __future__ import annotations

import dataclasses
import inspect
import os
from pathlib import Path

import jax
import pytest

from holdfast.multihost import ProcessSpec
from holdfast.multihost.start.jax_agent import own_tls, set_collective_timeout
from tests.support.tls import Authority, Pems


def test_the_collective_timeout_is_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is added to the user's flags in whole seconds, rounded up; a user's own value stays."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    set_collective_timeout(12.3)
    assert (
        os.environ["XLA_FLAGS"]
        == "--xla_force_host_platform_device_count=2 --xla_cpu_collective_timeout_seconds=13"
    )
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_collective_timeout_seconds=5")
    set_collective_timeout(12.3)
    assert os.environ["XLA_FLAGS"] == "--xla_cpu_collective_timeout_seconds=5"


def test_own_tls_needs_a_certificate_for_this_process(tmp_path: Path) -> None:
    """jaxlib shows neither a token nor a key: the certificate has to stand for both, for this very
    process.
    """
    named = Authority(tmp_path, "ours").issue(
        "one", uris=["holdfast:process/1", "spiffe://example.org/job/holdfast/process/12"]
    )
    shared = Authority(tmp_path, "theirs").issue("two")

    def options(process_id: int, pems: Pems, **fields: str) -> dict[str, str]:
        spec = ProcessSpec(
            process_id=process_id,
            num_processes=20,
            coordinator="h:1",
            tls_cert=pems.cert,
            tls_key=pems.key,
            tls_ca=pems.ca,
        )
        return own_tls(dataclasses.replace(spec, **fields))

    known = "mtls_cert_file" in inspect.signature(jax.distributed.initialize).parameters
    expected = (
        {"mtls_cert_file": named.cert, "mtls_key_file": named.key, "mtls_ca_file": named.ca}
        if known
        else {}
    )
    assert options(1, named) == options(12, named) == expected
    assert options(2, named) == options(1, shared) == options(1, named, token_file="t") == {}
