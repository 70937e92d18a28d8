"""The rules of surgery: what is done to the leaves whose names a pattern matches.

Rules are values. `surgery` says what they make of a tree, `array_views` reads it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeAlias, get_args

import numpy as np

from ..arrays.dtypes import Dtype, dtype_named

Group: TypeAlias = int | str


class _Checked:
    """Checks a rule's fields where it is made: by the name of a field, in all rules alike."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name in _CHECKS:
                is_right, expected = _CHECKS[name]
                if not is_right(value):
                    raise TypeError(f"{type(self).__name__}({name}={value!r}): expected {expected}")


def _is_whole(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_whole(value: Any) -> bool:
    return isinstance(value, Sequence | np.ndarray) and all(map(_is_whole, value))


def _is_dtype(value: Any) -> bool:
    try:
        return value is not None and to_dtype(value) is not None
    except (TypeError, ValueError):
        return False


def to_dtype(given: Any) -> Dtype:
    """Returns the dtype that `Cast` is given. Raises TypeError for what is none."""
    named = dtype_named(given) if isinstance(given, str) else None
    return np.dtype(given) if named is None else named


def _are_names(value: Any) -> bool:
    if not isinstance(value, Mapping | Sequence):
        return False
    sizes = value.values() if isinstance(value, Mapping) else ()
    is_right = all(map(_is_text, value)) and all(map(_is_whole, sizes))
    return is_right and len(set(value)) == len(value)


_WHOLE_NUMBERS = "whole numbers: (2, -1)"
_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "to": (_is_text, "text"),
    "axes": (lambda value: value is None or _are_whole(value), _WHOLE_NUMBERS),
    "axis": (_is_whole, "a whole number"),
    "by": (
        lambda value: _is_text(value) or _is_whole(value),
        "the number or the name of a group of the pattern",
    ),
    "count": (_is_whole, "a whole number"),
    "dtype": (_is_dtype, 'a dtype: "bfloat16", jnp.float32'),
    "names": (
        _are_names,
        'names, each once: ["q", "k", "v"], or for Split with sizes: {"q": 8, "kv": 4}',
    ),
    "shape": (_are_whole, _WHOLE_NUMBERS),
}


@dataclass(frozen=True)
class Rename(_Checked):
    """Gives a leaf the name `to`; a text alone stands for it.

    `\\1` and `\\g<name>` in `to` are what the groups of the pattern have matched. Dots divide it
    into the keys of nested dicts; `\\.` is a dot in a key.
    """

    to: str


@dataclass(frozen=True)
class Transpose(_Checked):
    """Permutes the axes, as numpy.transpose (None: reverses them)."""

    axes: Sequence[int] | None = None


@dataclass(frozen=True)
class Cast(_Checked):
    """Casts to another dtype, as numpy's `astype`: "bfloat16", `jnp.float32`."""

    dtype: Any


@dataclass(frozen=True)
class Reshape(_Checked):
    """Gives an array another shape, in C order; one size may be -1."""

    shape: Sequence[int]


@dataclass(frozen=True)
class Repeat(_Checked):
    """Repeats each entry along an axis `count` times, as numpy.repeat."""

    count: int
    axis: int = 0


@dataclass(frozen=True)
class Stack(_Checked):
    """Stacks leaves along a new axis, as layers are for jax.lax.scan.

    The leaves of one name `to` become one. The group `by` of the pattern is the place of each, from
    0 on and without a gap.
    """

    to: str
    _: KW_ONLY
    by: Group = 1
    axis: int = 0


@dataclass(frozen=True)
class Unstack(_Checked):
    """Makes one leaf of each entry along an axis: `{index}` in `to` is its place."""

    to: str
    _: KW_ONLY
    axis: int = 0


@dataclass(frozen=True)
class Fuse(_Checked):
    """Concatenates leaves along an axis, such as q, k and v.

    The leaves of one name `to` become one. The group `by` of the pattern is one of `names`, which
    are in the order of the result; each has to be there.
    """

    to: str
    names: Sequence[str]
    _: KW_ONLY
    by: Group = 1
    axis: int = 0


@dataclass(frozen=True)
class Split(_Checked):
    """Cuts one leaf along an axis: `{name}` in `to` is the name of each result.

    `names` have the sizes along the axis, or are a sequence: the results are equally large then.
    """

    to: str
    names: Mapping[str, int] | Sequence[str]
    _: KW_ONLY
    axis: int = 0


@dataclass(frozen=True)
class Drop:
    """Leaves a leaf out."""


@dataclass(frozen=True)
class Add:
    """Adds a leaf: the left side is its name and no pattern.

    `value` is an array, or what numpy makes one of; `np.broadcast_to(np.float32(0), shape)` takes
    no memory.
    """

    value: Any


ShapeRule: TypeAlias = Transpose | Cast | Reshape | Repeat
NameRule: TypeAlias = Rename | Stack | Unstack | Fuse | Split | Drop
Rule: TypeAlias = ShapeRule | NameRule | Add | str
RuleSet: TypeAlias = Mapping[str, Rule | Sequence[Rule]]
Rules: TypeAlias = RuleSet | Sequence[RuleSet]


@dataclass(frozen=True)
class Steps:
    """The right side of one pattern, in order: what is done to each leaf, then to each result.

    `naming` is the one rule that says what the results are called; None: as the leaves are.
    """

    before: tuple[ShapeRule, ...] = ()
    naming: NameRule | None = None
    after: tuple[ShapeRule, ...] = ()

    @property
    def is_gentle(self) -> bool:
        """Says whether they rename or drop, and do nothing else."""
        return not (self.before or self.after) and isinstance(self.naming, Rename | Drop | None)


def steps_of(pattern: str, given: Rule | Sequence[Rule]) -> Steps | Add:
    """Returns the right side of a pattern; raises TypeError or ValueError for what is none."""
    if not isinstance(pattern, str):
        raise TypeError(f"rules={{{pattern!r}: ...}}: expected a pattern or a name, which is text")
    rules = [given] if isinstance(given, str) or not isinstance(given, Sequence) else list(given)
    rules = [Rename(rule) if isinstance(rule, str) else rule for rule in rules]
    if len(rules) == 1 and isinstance(rules[0], Add):
        return rules[0]
    before: list[ShapeRule] = []
    after: list[ShapeRule] = []
    naming: list[NameRule] = []
    for rule in rules:
        if isinstance(rule, NameRule):
            naming.append(rule)
        elif isinstance(rule, ShapeRule):
            (after if naming else before).append(rule)
        else:
            raise TypeError(
                f"rules={{{pattern!r}: ...}}: expected Rename, Stack, Cast or another rule, or"
                f" several of them (Add alone), found {rule!r}"
            )
    if len(naming) > 1 or not rules:
        raise ValueError(
            f"rules={{{pattern!r}: ...}}: expected rules, of which at most one is"
            f" {', '.join(kind.__name__ for kind in get_args(NameRule))}, found {rules};"
            " what follows on another goes into a second mapping: rules=[{...}, {...}]"
        )
    return Steps(tuple(before), next(iter(naming), None), tuple(after))
