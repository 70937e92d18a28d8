"""The rules of surgery: what is done to the leaves whose names a pattern matches.

Rules are values. `surgery` says what they make of a tree, `array_views` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Group: TypeAlias = int | str


@dataclass(frozen=True)
class Rename:
    """Gives a leaf the name `to`; a text alone stands for it.

    `\\1` and `\\g<name>` in `to` are what the groups of the pattern have matched. Dots divide it
    into the keys of nested dicts; `\\.` is a dot in a key.
    """

    to: str


@dataclass(frozen=True)
class Transpose:
    """Permutes the axes, as numpy.transpose (None: reverses them)."""

    axes: Sequence[int] | None = None


@dataclass(frozen=True)
class Cast:
    """Casts to another dtype, as numpy's `astype`: "bfloat16", `jnp.float32`."""

    dtype: Any


@dataclass(frozen=True)
class Reshape:
    """Gives an array another shape, in C order; one size may be -1."""

    shape: Sequence[int]


@dataclass(frozen=True)
class Repeat:
    """Repeats each entry along an axis `count` times, as numpy.repeat."""

    count: int
    axis: int = 0


@dataclass(frozen=True)
class Stack:
    """Stacks leaves along a new axis, as layers are for jax.lax.scan.

    The leaves of one name `to` become one. The group `by` of the pattern is the place of each, from
    0 on and without a gap.
    """

    to: str
    by: Group = field(default=1, kw_only=True)
    axis: int = field(default=0, kw_only=True)


@dataclass(frozen=True)
class Unstack:
    """Makes one leaf of each entry along an axis: `{index}` in `to` is its place."""

    to: str
    axis: int = field(default=0, kw_only=True)


@dataclass(frozen=True)
class Fuse:
    """Concatenates leaves along an axis, such as q, k and v.

    The leaves of one name `to` become one. The group `by` of the pattern is one of `names`, which
    are in the order of the result; each has to be there.
    """

    to: str
    names: Sequence[str]
    by: Group = field(default=1, kw_only=True)
    axis: int = field(default=0, kw_only=True)


@dataclass(frozen=True)
class Split:
    """Cuts one leaf along an axis: `{name}` in `to` is the name of each result.

    `names` have the sizes along the axis, or are a sequence: the results are equally large then.
    """

    to: str
    names: Mapping[str, int] | Sequence[str]
    axis: int = field(default=0, kw_only=True)


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

SHAPE_RULES = (Transpose, Cast, Reshape, Repeat)
NAME_RULES = (Rename, Stack, Unstack, Fuse, Split, Drop)


@dataclass(frozen=True)
class Steps:
    """The right side of one pattern, in order: what is done to each leaf, then to each result.

    `naming` is the one rule that says what the results are called; None: as the leaves are.
    """

    before: tuple[ShapeRule, ...] = ()
    naming: NameRule | None = None
    after: tuple[ShapeRule, ...] = ()


def steps_of(pattern: str, given: Rule | Sequence[Rule]) -> Steps | Add:
    """Returns the right side of a pattern; raises TypeError or ValueError for what is none."""
    rules = [given] if isinstance(given, str) or not isinstance(given, Sequence) else list(given)
    rules = [Rename(rule) if isinstance(rule, str) else rule for rule in rules]
    if len(rules) == 1 and isinstance(rules[0], Add):
        return rules[0]
    before: list[ShapeRule] = []
    after: list[ShapeRule] = []
    naming: list[NameRule] = []
    for rule in rules:
        if isinstance(rule, NAME_RULES):
            naming.append(rule)
        elif isinstance(rule, SHAPE_RULES):
            (after if naming else before).append(rule)
        else:
            raise TypeError(
                f"rules={{{pattern!r}: ...}}: expected Rename, Stack, Cast or another rule, or"
                f" several of them (Add alone), found {rule!r}"
            )
    if len(naming) > 1 or not rules:
        raise ValueError(
            f"rules={{{pattern!r}: ...}}: expected rules, of which at most one is"
            f" {', '.join(kind.__name__ for kind in NAME_RULES)}, found {rules};"
            " what follows on another goes into a second mapping: rules=[{...}, {...}]"
        )
    return Steps(tuple(before), next(iter(naming), None), tuple(after))
