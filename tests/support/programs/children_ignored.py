"""A program that ignores SIGCHLD in C++, as Ray's core does, and runs a job and a coordinator on
another thread.
"""

import ctypes
import os
import queue
import signal
import sys
import threading

from holdfast.launch import run_local
from holdfast.launch.workers.coordinator import Coordinator

ctypes.CDLL(None).signal(signal.SIGCHLD, 1)


def run() -> None:
    result = run_local([sys.executable, "-S", "-c", "raise SystemExit(3)"], 2)
    print("job", result.outcome, result.exit_code, flush=True)


def lose_coordinator() -> None:
    coordinator = Coordinator("j", 1, 1)
    codes: queue.SimpleQueue[int] = queue.SimpleQueue()
    coordinator.on_end(codes.put)
    os.kill(coordinator.pid, signal.SIGKILL)
    print("coordinator", codes.get(timeout=30), flush=True)
    coordinator.close()


for each in (run, lose_coordinator):
    thread = threading.Thread(target=each)
    thread.start()
    thread.join()
