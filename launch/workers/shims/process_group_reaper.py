"""Kills process groups when the process that started them is gone. Run as a script by its path: `python -I -S process_group_reaper.py`.

Reads `+PGID` and `-PGID` lines. When its input ends, its parent has closed it or is dead, however it died: what is still listed gets
SIGKILL. It runs in a session of its own, so that what ends its parent does not end it.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
