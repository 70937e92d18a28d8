"""`python -m holdfast.compat.orbax SCRIPT [ARGUMENT]...`: runs a program without Orbax."""

from __future__ import annotations

import os
import runpy
import sys

from .installation import install


def main() -> None:
    """Runs the script as `python SCRIPT` would, or a module as `python -m MODULE` would."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help") or arguments == ["-m"]:
        print(
            "usage: python -m holdfast.compat.orbax (SCRIPT | -m MODULE) [ARGUMENT]...",
            file=sys.stderr,
        )
        raise SystemExit(0 if arguments[:1] and arguments[0] != "-m" else 2)
    install()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = arguments
    sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
