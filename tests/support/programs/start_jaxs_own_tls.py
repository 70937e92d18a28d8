"""Runs in the processes of tests/system/test_start.py."""

from __future__ import annotations

import jax
from starting import index

import holdfast.multihost as multihost
from holdfast.multihost.job import current_job
from holdfast.multihost.start.start import Membership

multihost.initialize(timeout_s=60)
relay = current_job().get(Membership).relay
print("relay", relay is not None, "tls", hasattr(jax.config, "jax_mtls_cert_file"))
assert multihost.global_max([index, -index]) == [1, 0]
multihost.sync_global_processes("all", timeout=30)
multihost.shutdown()
