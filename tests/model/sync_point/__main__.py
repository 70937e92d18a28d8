"""Searches: python -m tests.model.sync_point [NAME ...]; prints how many executions each has."""

from __future__ import annotations

import sys

from tests.model.exhaustive.search import TooLarge

from .orders import ORDERS, prepared, search


def main() -> int:
    failed = 0
    with prepared():
        for orders in ORDERS:
            if sys.argv[1:] and orders.name not in sys.argv[1:]:
                continue
            try:
                found, violation, story = search(orders)
            except TooLarge as error:
                failed += 1
                print(f"{orders.name}: {error}", flush=True)
                continue
            print(f"{orders.name}: {found.told}", flush=True)
            if violation is not None:
                failed += 1
                print(story, violation, sep="\n", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
