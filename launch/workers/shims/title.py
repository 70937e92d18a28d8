"""What ps and pgrep show of a process. Loaded by its path, by other scripts of this folder."""

import contextlib

_ARGUMENTS = 48  # proc_pid_stat(5): arg_start and, behind it, arg_end, counted from 1


def name() -> bytes:
    """Returns what `pgrep` alone shows, b"" where that is not known."""
    try:
        with open("/proc/self/comm", "rb") as comm:
            return comm.read().rstrip(b"\n")
    except OSError:
        return b""


def set_title(title: bytes, name: bytes) -> None:
    """Has `ps` and `pgrep -f` show `title`, and `pgrep` alone `name`.

    Arguments in `title` end in NUL. It is cut off where the process was started with less. Without
    /proc, or where the kernel refuses, all stays as it was.
    """
    # Only Linux has these files, and a hardened kernel refuses to write the first.
    with contextlib.suppress(OSError):
        with open("/proc/self/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
        # The state, field 3, is the first behind the name.
        begin, end = map(int, fields[_ARGUMENTS - 3 : _ARGUMENTS - 1])
        room = end - begin
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(begin)
            # The last byte stays NUL: another one tells the kernel to read on behind it.
            memory.write(title[: room - 1].ljust(room, b"\0"))
        with open("/proc/self/comm", "wb") as comm:
            comm.write(name)
