"""A client of jaxlib with its own mTLS: argv[3:] are the address, the number of the first process,
the authority, then certificate and key of each process.
"""

from __future__ import annotations

import sys

from jax._src.lib import _jax

index = int(sys.argv[1])
address, first_process, authority, *files = sys.argv[3:]
client = _jax.get_distributed_runtime_client(
    address,
    index + int(first_process),
    init_timeout=30,
    shutdown_timeout=5,
    heartbeat_timeout=100,
    missed_heartbeat_callback=print,
    mtls_cert_file=files[2 * index],
    mtls_key_file=files[2 * index + 1],
    mtls_ca_file=authority,
)
try:
    client.connect()
    client.key_value_set(f"from/{index}", "here")
    client.wait_at_barrier("all", 30_000)
    print("met", sorted(client.key_value_dir_get("from")), flush=True)
    client.shutdown()
except Exception as error:
    print("refused", error, flush=True)
