"""Searches configurations by their names' beginnings, and prints how many executions each has."""

from __future__ import annotations

import sys

from .configurations import CONFIGURATIONS, searcher
from .search import TooLarge


def main() -> int:
    wanted = sys.argv[1:]
    failed = 0
    with searcher() as own:
        for configuration in CONFIGURATIONS:
            if wanted and not any(word in configuration.name for word in wanted):
                continue
            try:
                search, violation = own.search(configuration)
            except TooLarge as error:
                failed += 1
                print(f"{configuration.name}: {error}", flush=True)
                continue
            print(f"{configuration.name}: {search.told}", flush=True)
            if violation is not None:
                failed += 1
                print(own.story(configuration, search.found, violation), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
