"""`python -m tests.track_record [NAME | --all]`: lists the defects that were mended, or takes one
mend, or each, back and says whether its test finds it.
"""

from __future__ import annotations

import argparse
import sys
import time

from .mends import MENDS
from .taking_back import Mend, take_back


def _is_found(mend: Mend) -> bool:
    begin = time.monotonic()
    verdict = take_back(mend)
    word = "found" if verdict.is_found else "NOT FOUND"
    print(f"{word} in {time.monotonic() - begin:.0f} s: {mend.name} ({mend.found_by})")
    print("    " + verdict.says.replace("\n", "\n    "), flush=True)
    return verdict.is_found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.track_record", description=__doc__)
    parser.add_argument("name", nargs="?", help="the mend that is taken back")
    parser.add_argument("--all", action="store_true", help="takes back each in turn")
    args = parser.parse_args()
    chosen = [mend for mend in MENDS if args.all or mend.name == args.name]
    if args.name is not None and not chosen:
        parser.error(f"no mend is called {args.name!r}; without a name they are listed")
    if not chosen:
        for mend in MENDS:
            print(f"{mend.promise:2}  {mend.mended}  {mend.name}\n    {mend.wrong}")
        return 0
    results = [_is_found(mend) for mend in chosen]
    print(f"{sum(results)} of {len(results)} found")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
