"""Fuzzes one target. A finding is written beside the folder of inputs, and ends it with a code that
is not 0.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(include=["holdfast"]):
    from .targets import TARGETS, add, known

_ODD: tuple[Any, ...] = (
    *(None, True, 0, 1, -1, 1 << 31, 1 << 63, 10**25, 1.5, 1e308, "", "0", "..", "a/b", "\x00"),
    *("\ud800", "²", "nan", [], {}, [[]], [0], [-1, 2], {"": 0}, {"$array": []}, {"$of": 1}),
)


def change_json(data: bytes, most: int, seed: int) -> bytes:
    """Returns a text of JSON with one place of it changed, or with bytes changed anywhere."""
    drawn = random.Random(seed)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return bytes(atheris.Mutate(data, most))
    places = list(_places(value))
    if not places or drawn.random() < 0.2:
        return bytes(atheris.Mutate(data, most))
    for _ in range(drawn.choice((1, 1, 2, 4))):
        holder, key = drawn.choice(places)
        other = drawn.choice(_ODD)
        change = drawn.randrange(6)
        try:
            if change == 0:
                holder[key] = other
            elif change == 1:
                from_holder, from_key = drawn.choice(places)
                holder[key] = json.loads(json.dumps(from_holder[from_key]))
            elif change == 2:
                del holder[key]
            elif change == 3 and isinstance(holder, list):
                holder.insert(key, holder[key])
            elif change == 4 and isinstance(holder, dict):
                holder[str(other)] = holder.pop(key)
            elif isinstance(holder[key], int):
                holder[key] += drawn.choice((-1, 1, 8, 1 << 32))
            elif isinstance(holder[key], str):
                text = bytes(atheris.Mutate(holder[key].encode("utf-8", "replace"), 200))
                holder[key] = text.decode("utf-8", "replace")
        except (KeyError, IndexError, ValueError):  # another change has taken this place away
            continue
    changed = json.dumps(value).encode()
    return changed if len(changed) <= most else data


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys: Any = list(value) if isinstance(value, dict) else ()
    if isinstance(value, list):
        keys = range(len(value))
    for key in keys:
        yield value, key
        yield from _places(value[key])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0, help="0: another one each time")
    parser.add_argument(
        "--folder", type=Path, help="of inputs; those that reach new code come to it"
    )
    parser.add_argument(
        "--take", type=Path, nargs="+", help="adds these inputs to the corpus, only"
    )
    arguments = parser.parse_args()
    if arguments.take:
        add(arguments.target, [file.read_bytes() for file in arguments.take])
        return
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix=f"fuzz-{arguments.target}-"))
    folder.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(known(arguments.target)):
        (folder / f"known-{number}").write_bytes(data)
    options = [
        f"-max_total_time={arguments.seconds}",
        f"-seed={arguments.seed}",
        f"-artifact_prefix={folder}-",
        *("-timeout=10", "-rss_limit_mb=4096", "-max_len=65536"),
    ]
    logging.disable(logging.CRITICAL)  # of what is refused
    atheris.Setup(
        [sys.argv[0], *options, str(folder)],
        TARGETS[arguments.target].run,
        custom_mutator=change_json,
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
