"""Renames leaves, between other people's names and the caller's: by a mapping or by rules."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

Names: TypeAlias = Mapping[str, str] | Sequence[tuple[str, str]] | Callable[[str], str] | None


def renamer(names: Names) -> Callable[[str], str]:
    """Returns the function that renames one leaf.

    A mapping renames the names that it has and leaves the others. Rules are regular expressions,
    tried in order on the whole name: the first whose pattern matches all of it decides, with `\\1`
    or `\\g<name>` in its replacement. A function is used as it is.
    """
    if names is None:
        return lambda name: name
    if callable(names):
        return names
    if isinstance(names, Mapping):
        table = dict(names)
        return lambda name: table.get(name, name)
    rules = [(compiled(pattern), replacement) for pattern, replacement in names]

    def rename(name: str) -> str:
        for pattern, replacement in rules:
            match = pattern.fullmatch(name)
            if match:
                return _expand(match, replacement)
        return name

    return rename


def _expand(match: re.Match[str], replacement: str) -> str:
    try:
        return match.expand(replacement)
    except (re.error, IndexError) as error:
        raise ValueError(
            f"the rule {match.re.pattern!r} cannot rename {match.string!r}: {error} in"
            f" {replacement!r}"
        ) from None


def matches(names: Mapping[str, str] | Sequence[tuple[str, str]], name: str) -> bool:
    """Says whether a mapping, or one of the rules, is for this name."""
    if isinstance(names, Mapping):
        return name in names
    return any(compiled(pattern).fullmatch(name) for pattern, _ in names)


def compiled(pattern: str) -> re.Pattern[str]:
    """Returns the pattern of a rule; raises ValueError for what is none."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"the rule {pattern!r} is no regular expression: {error}") from None


def rename_all(names: Names, old: Iterable[str]) -> dict[str, str]:
    """Returns {old name: new name}; raises ValueError when two leaves would get one name, and
    TypeError for a new name that is no text.
    """
    rename = renamer(names)
    taken: dict[str, str] = {}
    for name in old:
        new = rename(name)
        if not isinstance(new, str):
            raise TypeError(f"the renaming gives {name!r} the name {new!r}: expected a str")
        if new in taken:
            raise ValueError(
                f"the renaming gives '{taken[new]}' and '{name}' the same name '{new}'; change one"
                " of its rules"
            )
        taken[new] = name
    return {name: new for new, name in taken.items()}


def parse_names(text: str) -> Names:
    """Parses the file of `--map`: a JSON object {old: new}, or a list of [pattern, replacement]."""
    try:
        value: Any = json.loads(text)
    except ValueError as error:
        raise ValueError(f"the map is not JSON: {error}") from None
    if isinstance(value, dict) and all(isinstance(new, str) for new in value.values()):
        return value
    if isinstance(value, list) and all(_is_rule(rule) for rule in value):
        return [(rule[0], rule[1]) for rule in value]
    raise ValueError('the map must be {"old": "new", ...} or [["pattern", "replacement"], ...]')


def _is_rule(rule: Any) -> bool:
    return isinstance(rule, list) and len(rule) == 2 and all(isinstance(text, str) for text in rule)
