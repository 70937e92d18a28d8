"""What programs of tests/system/test_preemption.py begin with."""

from __future__ import annotations

import sys

import jax

from holdfast.multihost.preemption import preemption as notices

index = int(sys.argv[1])
count = int(sys.argv[2])
address = sys.argv[3]


def begin(sources=None, service=False, **options):
    jax.config.update("jax_enable_preemption_service", service)
    jax.distributed.initialize(address, count, index)
    client = jax._src.distributed.global_state.client
    return client, notices.start(client, index, count, sources=sources, **options)


def end():
    notices.stop()
    jax.distributed.shutdown()
