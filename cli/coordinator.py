"""`holdfast coordinator`: serves one job until it is over."""

from __future__ import annotations

import os

# By default newer grpcio reads sockets on a pool of threads ("event engine"), each message waking
# three of them before ours. gRPC reads this when it is imported.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")

from holdfast.coordination.server.main import coordinator as coordinator
