"""Process 1 raises, and `stays` (a thread of its goes on, an executor's or an exit hook waits) or
`ends`; process 0 waits for it.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from holdfast import multihost

multihost.initialize()
multihost.reached_preemption(1)
if os.environ["HOLDFAST_PROCESS_ID"] == "1":
    if sys.argv[1] == "thread":
        threading.Thread(target=time.sleep, args=(600,)).start()
    elif sys.argv[1] == "executor":
        ThreadPoolExecutor(1).submit(time.sleep, 600)
    elif sys.argv[1] == "hook":
        atexit.register(time.sleep, 600)
    raise ValueError("the loss is NaN")
if sys.argv[1] != "ends":
    multihost.sync_global_processes("never")
