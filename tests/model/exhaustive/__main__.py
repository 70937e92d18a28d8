"""Searches configurations by their names' beginnings, and prints how many executions each has; with
`--table` as the rows of a table in Markdown.
"""

from __future__ import annotations

import sys

from .configurations import CONFIGURATIONS, Configuration, searcher
from .search import Search, TooLarge

HEAD = """\
| configuration | bounds | processes | operations | executions | seconds, of the CPU |
|---|---|---|---|---|---|"""


def row(configuration: Configuration, search: Search) -> str:
    """Returns the row of a search that has come to its end."""
    cells = (
        configuration.name,
        configuration.bounds,
        str(search.processes),
        str(search.longest),
        f"{search.executions:,}",
        f"{search.seconds:.1f}, {search.cpu_s:.1f}",
    )
    return f"| {' | '.join(cells)} |"


def main() -> int:
    is_table = "--table" in sys.argv
    wanted = [word for word in sys.argv[1:] if word != "--table"]
    failed = 0
    if is_table:
        print(HEAD)
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
            told = f"{configuration.name}: {search.told}"
            print(row(configuration, search) if is_table else told, flush=True)
            if violation is not None:
                failed += 1
                print(own.story(configuration, search.found, violation), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
