"""A process of a job of jax.distributed's alone, which goes on until SIGUSR1."""

from __future__ import annotations

import signal
import sys

import jax
from jax.experimental import multihost_utils
from starting import count, index

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
jax.distributed.initialize(sys.argv[3], count, index)
multihost_utils.sync_global_devices("all are here")
print("joined", flush=True)
signal.sigwait([signal.SIGUSR1])
multihost_utils.sync_global_devices("unharmed")
jax.distributed.shutdown()
