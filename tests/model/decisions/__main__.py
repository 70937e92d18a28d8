"""Searches: python -m tests.model.decisions [--depth 6]"""

from __future__ import annotations

import argparse
import sys
import time

from .search import search


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", type=int, default=6, help="events of a sequence, at most")
    depth = parser.parse_args().depth
    began_s = time.process_time()
    found = search(depth)
    took_s = time.process_time() - began_s
    print(f"{found.states:,} states, {found.decisions:,} decisions, {took_s:.0f} s of CPU")
    if found.broken is not None:
        print(*found.story, found.broken, sep="\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
