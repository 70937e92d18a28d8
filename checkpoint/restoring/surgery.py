"""Surgery: a tree as rules make it of a stored one.

What is made of what is known before anything is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple

from ..arrays.dtypes import Dtype, can_store, name_of
from ..errors import TreeMismatch, UnsupportedLeaf
from ..format.grid import Grid
from ..format.record import ItemRecord, LeafRecord
from ..format.rename import compiled
from ..format.tree import describe, escape, flatten, keys_of, plain_name
from .array_views import (
    Casted,
    Expanded,
    Given,
    Joined,
    Repeated,
    Reshaped,
    SavedArray,
    Sliced,
    Squeezed,
    Transposed,
    View,
    axis_of,
)
from .match import listed
from .reader import ArrayReader
from .surgery_rules import (
    Add,
    Cast,
    Drop,
    Fuse,
    Group,
    NameRule,
    Rename,
    Repeat,
    Reshape,
    Rules,
    RuleSet,
    ShapeRule,
    Split,
    Stack,
    Steps,
    Transpose,
    Unstack,
    steps_of,
    to_dtype,
)
from .view_reader import ViewReader


@dataclass(frozen=True, eq=False)
class NewLeaf:
    """A leaf of the new tree.

    `view` makes it; None for a Python value. `origins` are the stored leaves that it is made of,
    and the first of the leaves before the rules was at `place` among them.
    """

    path: str
    record: LeafRecord
    view: View | None
    origins: tuple[str, ...]
    place: int

    @property
    def name(self) -> str:
        """The name that patterns are matched with."""
        return plain_name(self.path)

    @property
    def is_fixed(self) -> bool:
        """Says whether the leaf can be renamed and dropped, and nothing else."""
        record = self.record
        return self.view is None or record.kind in ("key", "unreadable") or record.per_process


class Matched(NamedTuple):
    """A leaf whose name a pattern matches; its shape rules are applied."""

    leaf: NewLeaf
    match: re.Match[str]

    def name_of(self, template: str) -> str:
        """Returns the name that a template gives the leaf."""
        try:
            return self.match.expand(template)
        except (re.error, IndexError) as error:
            raise ValueError(
                f"rules={{{self.match.re.pattern!r}: ...}}: {template!r} is no template for it:"
                f" {error}"
            ) from None

    def group(self, by: Group) -> str:
        """Returns what a group of the pattern has matched."""
        try:
            return self.match[by] or ""
        except (IndexError, re.error):
            raise ValueError(
                f"rules={{{self.match.re.pattern!r}: ...}}: by={by!r}: the pattern has no such"
                " group; expected one in brackets"
            ) from None


def operate(item: ItemRecord, reader: ArrayReader, rules: Rules) -> tuple[ItemRecord, ViewReader]:
    """Returns an item as rules make it, and the reader of its arrays. Reads nothing yet.

    Its tree is one of nested dicts, or stays where no name changes. Raises TreeMismatch for rules
    that match no leaf, the same leaf twice, or do not fit their leaves; ValueError for what are no
    rules.
    """
    leaves = [_stored(leaf, index) for index, leaf in enumerate(item.leaves)]
    for mapping in rules if isinstance(rules, Sequence) else [rules]:
        leaves = _Operation(item.name, mapping).run(leaves)
    tree, ordered = _tree_of(item, leaves)
    views = {leaf.path: leaf.view for leaf in ordered if leaf.view is not None}
    by_place = sorted(ordered, key=attrgetter("place"))  # in the order of what they are made of
    order = [leaf.path for leaf in by_place if leaf.view is not None]
    records = tuple(_record(leaf) for leaf in ordered)
    statics = item.statics if tree is item.tree else {}
    new = ItemRecord(item.name, item.kind, item.files, tree, records, statics=statics)
    return new, ViewReader(reader, views, order)


class _Operation:
    """One mapping of rules, applied to the leaves of an item."""

    def __init__(self, item: str, rules: RuleSet) -> None:
        self._item = item
        if not isinstance(rules, Mapping):
            raise TypeError(
                f"rules=: expected a mapping of patterns to rules, or several, found {rules!r}"
            )
        self._rules = {pattern: steps_of(pattern, given) for pattern, given in rules.items()}

    def run(self, leaves: Sequence[NewLeaf]) -> list[NewLeaf]:
        """Returns the leaves after it; each is where the first that it is made of was."""
        matched = self._match(leaves)
        touched = {found.leaf.path for each in matched.values() for found in each}
        new = [leaf for leaf in leaves if leaf.path not in touched]
        for pattern, steps in self._rules.items():
            if isinstance(steps, Add):
                new.append(self._added(pattern, steps, len(leaves)))
            else:
                new += self._apply(pattern, steps, matched[pattern])
        new.sort(key=attrgetter("place"))
        self._check_names(new)
        return [replace(leaf, place=index) for index, leaf in enumerate(new)]

    def _match(self, leaves: Sequence[NewLeaf]) -> dict[str, list[Matched]]:
        matched: dict[str, list[Matched]] = {}
        touched: dict[str, str] = {}
        for pattern, steps in self._rules.items():
            if isinstance(steps, Add):
                continue
            whole = compiled(pattern)
            found = [
                Matched(leaf, match) for leaf in leaves if (match := whole.fullmatch(leaf.name))
            ]
            for each in found:
                path = each.leaf.path
                if path in touched:
                    self._refuse(
                        f"the rules {touched[path]!r} and {pattern!r} both touch the leaf"
                        f" {each.leaf.name!r}; let one of them match it, or put the second into"
                        " another mapping: rules=[{...}, {...}]",
                        leaf=path,
                        expected="one rule",
                        found=listed([touched[path], pattern]),
                    )
                touched[path] = pattern
            matched[pattern] = found
        unused = [pattern for pattern, found in matched.items() if not found]
        if unused:
            free = [leaf.name for leaf in leaves if leaf.path not in touched]
            self._refuse(
                f"the rules {listed(unused)} match no leaf; no rule touches the leaves"
                f" {listed(free) or 'none'} (a pattern has to match a whole name)",
                expected=unused[0],
                found=listed(free),
            )
        return matched

    def _added(self, name: str, rule: Add, place: int) -> NewLeaf:
        try:
            view = Given.of(rule.value)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"rules={{{name!r}: Add({rule.value!r:.100})}}: expected what numpy makes an array"
                f" of: {error}"
            ) from None
        _check_storable(name, view.dtype)
        path = _path(name)
        return NewLeaf(path, LeafRecord(path, "array"), view, (f"Add({name!r})",), place)

    def _apply(self, pattern: str, steps: Steps, matched: Sequence[Matched]) -> Iterator[NewLeaf]:
        """Yields the results of a rule."""
        for leaf, _ in matched:
            if leaf.is_fixed and not steps.is_gentle:
                self._refuse(
                    f"the rule {pattern!r} touches the leaf {leaf.name!r}, which is"
                    f" {_what(leaf)}: it can be renamed and dropped, and nothing else",
                    leaf=leaf.path,
                    expected="an array",
                    found=_what(leaf),
                )
        try:
            shaped = [Matched(_shaped(leaf, steps.before), match) for leaf, match in matched]
            for leaf in _named(steps.naming, shaped):
                yield _shaped(leaf, steps.after)
        except _Misfit as error:
            self._refuse(
                f"the rule {pattern!r} does not fit the leaf {error.leaf.name!r}: {error.text}",
                leaf=error.leaf.path,
                expected=error.text,
                found=_what(error.leaf),
            )

    def _check_names(self, leaves: Sequence[NewLeaf]) -> None:
        taken: dict[str, NewLeaf] = {}
        for leaf in leaves:
            other = taken.setdefault(leaf.path, leaf)
            if other is not leaf:
                self._refuse(
                    f"the rules give one name, {leaf.name!r}, to {listed(other.origins)} and to"
                    f" {listed(leaf.origins)}; change one of them",
                    leaf=leaf.path,
                    expected="a name for each leaf",
                    found=leaf.name,
                )

    def _refuse(self, text: str, *, leaf: str = "", expected: str, found: str) -> None:
        raise TreeMismatch(
            f"item {self._item!r}: {text}", leaf=leaf, expected=expected, found=found
        )


class _Misfit(Exception):
    """A leaf that a rule does not fit."""

    def __init__(self, leaf: NewLeaf, text: str) -> None:
        super().__init__(text)
        self.leaf = leaf
        self.text = text


def _stored(leaf: LeafRecord, place: int) -> NewLeaf:
    view = None if leaf.grid is None else SavedArray.of(leaf)
    return NewLeaf(leaf.path, leaf, view, (plain_name(leaf.path),), place)


def _what(leaf: NewLeaf) -> str:
    if leaf.view is None:
        return f"a Python {leaf.record.kind}"
    if leaf.record.kind == "key":
        return "an array of random keys"
    if leaf.record.kind == "unreadable":
        return f"of the dtype {leaf.record.impl}"
    if leaf.record.per_process:
        return "kept per process"
    return f"{leaf.view.dtype.name}{list(leaf.view.shape)}"


def _shaped(leaf: NewLeaf, rules: Sequence[ShapeRule]) -> NewLeaf:
    """Returns a leaf after rules that do not change its name."""
    for rule in rules:
        view = leaf.view
        assert view is not None
        try:
            leaf = replace(leaf, view=_view(view, rule))
        except ValueError as error:
            raise _Misfit(leaf, str(error)) from None
    return leaf


def _view(view: View, rule: ShapeRule) -> View:
    match rule:
        case Transpose(axes):
            return Transposed.of(view, axes)
        case Cast(dtype):
            wanted = to_dtype(dtype)
            _check_storable("", wanted)
            return Casted.of(view, wanted)
        case Reshape(shape):
            return Reshaped.of(view, shape)
        case Repeat(count, axis):
            return Repeated.of(view, count, axis)


def _check_storable(name: str, dtype: Dtype) -> None:
    if not can_store(dtype):
        what = f"Add({name!r})" if name else "Cast"
        raise UnsupportedLeaf(
            f"rules=: {what}: a checkpoint cannot hold the dtype {dtype}; expected a dtype of"
            " numbers, little-endian",
            leaf=name,
            found=str(dtype),
        )


def _named(rule: NameRule | None, matched: Sequence[Matched]) -> Iterator[NewLeaf]:
    """Yields the results of the rule that names them."""
    match rule:
        case None:
            yield from (found.leaf for found in matched)
        case Drop():
            return
        case Rename(to):
            for found in matched:
                yield replace(found.leaf, path=_path(found.name_of(to)))
        case Stack(to):
            for name, sources in _by_name(matched, to).items():
                yield _stacked(name, sources, rule)
        case Fuse(to):
            for name, sources in _by_name(matched, to).items():
                yield _fused(name, sources, rule)
        case Unstack():
            for found in matched:
                yield from _unstacked(found, rule)
        case Split():
            for found in matched:
                yield from _divided(found, rule)


def _by_name(matched: Sequence[Matched], template: str) -> dict[str, list[Matched]]:
    groups: dict[str, list[Matched]] = {}
    for found in matched:
        groups.setdefault(found.name_of(template), []).append(found)
    return groups


def _stacked(name: str, sources: Sequence[Matched], rule: Stack) -> NewLeaf:
    places: dict[int, NewLeaf] = {}
    for found in sources:
        text = found.group(rule.by)
        if not text.isdecimal():
            raise _Misfit(found.leaf, f"its place is {text!r}; expected a number")
        if int(text) in places:
            raise _Misfit(
                found.leaf,
                f"it has the place {text} of {name!r}, as {places[int(text)].name!r} has",
            )
        places[int(text)] = found.leaf
    missing = sorted(set(range(len(places))) - places.keys())
    if missing:
        numbers = listed(list(map(str, sorted(places))))
        raise _Misfit(
            sources[-1].leaf,
            f"{name!r} is stacked of the places {numbers}; expected each from 0 on, and"
            f" {missing[0]} is missing",
        )
    return _joined(name, [places[place] for place in range(len(places))], rule)


def _fused(name: str, sources: Sequence[Matched], rule: Fuse) -> NewLeaf:
    by_name: dict[str, NewLeaf] = {}
    for found in sources:
        text = found.group(rule.by)
        if text not in rule.names or text in by_name:
            raise _Misfit(
                found.leaf, f"{name!r} is fused of one of each of {listed(list(rule.names))}"
            )
        by_name[text] = found.leaf
    missing = [each for each in rule.names if each not in by_name]
    if missing:
        raise _Misfit(
            sources[-1].leaf,
            f"{name!r} is fused of {listed(list(rule.names))}, and {missing[0]!r} is missing; found"
            f" {listed([found.leaf.name for found in sources])}",
        )
    return _joined(name, [by_name[each] for each in rule.names], rule)


def _joined(name: str, leaves: Sequence[NewLeaf], rule: Stack | Fuse) -> NewLeaf:
    first = leaves[0]
    axis = rule.axis
    views: list[View] = []
    for leaf in leaves:
        assert leaf.view is not None
        try:
            views.append(Expanded.of(leaf.view, axis) if isinstance(rule, Stack) else leaf.view)
            # Each is compared with the first, so that the message names the one that differs.
            Joined.of([views[0], views[-1]], axis)
        except ValueError as error:
            raise _Misfit(leaf, f"{error}, the shape or dtype of {first.name!r}") from None
    return NewLeaf(
        _path(name),
        _changed(first.record),
        Joined.of(views, axis),
        tuple(origin for leaf in leaves for origin in leaf.origins),
        place=min(leaf.place for leaf in leaves),
    )


def _unstacked(found: Matched, rule: Unstack) -> Iterator[NewLeaf]:
    leaf = found.leaf
    view, axis = _along(leaf, rule.axis)
    name = found.name_of(rule.to)
    for index in range(view.shape[axis]):
        path = _path_of(name, "{index}", str(index), found)
        entry = Squeezed.of(Sliced.of(view, axis, index, 1), axis)
        yield replace(leaf, path=path, record=_changed(leaf.record), view=entry)


def _divided(found: Matched, rule: Split) -> Iterator[NewLeaf]:
    leaf = found.leaf
    view, axis = _along(leaf, rule.axis)
    whole = view.shape[axis]
    sizes = rule.names
    if not isinstance(sizes, Mapping):
        sizes = dict.fromkeys(sizes, whole // max(len(sizes), 1))
    if sum(sizes.values()) != whole or min(sizes.values(), default=-1) < 0:
        raise _Misfit(
            leaf,
            f"its axis {axis} has {whole} entries, and {dict(sizes)} are {sum(sizes.values())}",
        )
    template = found.name_of(rule.to)
    first = 0
    for name, size in sizes.items():
        path = _path_of(template, "{name}", name, found)
        part = Sliced.of(view, axis, first, size)
        yield replace(leaf, path=path, record=_changed(leaf.record), view=part)
        first += size


def _along(leaf: NewLeaf, axis: int) -> tuple[View, int]:
    """Returns the view of a leaf, and the number of its axis from 0 on."""
    assert leaf.view is not None
    try:
        return leaf.view, axis_of(leaf.view.shape, axis)
    except ValueError as error:
        raise _Misfit(leaf, str(error)) from None


def _path_of(name: str, where: str, value: str, found: Matched) -> str:
    """Returns the path of one of several results."""
    if where not in name:
        raise ValueError(
            f"rules={{{found.match.re.pattern!r}: ...}}: its results would all be called {name!r};"
            f" expected {where} in `to`"
        )
    return _path(name.replace(where, value))


def _changed(record: LeafRecord) -> LeafRecord:
    """Returns what stays of a record whose array has another shape."""
    kind = "numpy" if record.kind == "scalar" else record.kind
    return replace(record, kind=kind, sharding=None)


def _record(leaf: NewLeaf) -> LeafRecord:
    """Returns the record of a leaf of the new tree."""
    view = leaf.view
    record = leaf.record
    if view is None or isinstance(view, SavedArray):
        return replace(record, path=leaf.path)
    if view.shape != record.shape:
        record = _changed(record)
    grid = Grid(view.shape, view.shape, tuple(max(size, 1) for size in view.chunk))
    return replace(
        record,
        path=leaf.path,
        dtype=name_of(view.dtype),
        shape=view.shape,
        grid=grid,
        files=None,
    )


def _path(name: str) -> str:
    keys = _keys(name)
    if not keys:
        raise ValueError(f"rules=: {name!r} is no name: expected keys with dots between them")
    return ".".join(escape(key) for key in keys)


def _keys(name: str) -> list[str]:
    """Returns the keys that the dots of a name divide, [] for a name with an empty key."""
    texts = keys_of(name)
    return [plain_name(text) for text in texts] if ".".join(texts) == name else []


def _tree_of(item: ItemRecord, leaves: Sequence[NewLeaf]) -> tuple[Any, list[NewLeaf]]:
    """Returns the description of the new tree, and the leaves in its order."""
    by_path = {leaf.path: leaf for leaf in leaves}
    if by_path.keys() == {leaf.path for leaf in item.leaves}:
        return item.tree, [by_path[leaf.path] for leaf in item.leaves]
    nested: dict[str, Any] = {}
    for index, leaf in enumerate(leaves):
        *above, last = _keys(leaf.path) or [leaf.name]
        level = nested
        for key in above:
            level = level.setdefault(key, {})
            if not isinstance(level, dict):
                break
        if not isinstance(level, dict) or last in level:
            raise TreeMismatch(
                f"item {item.name!r}: {leaf.name!r} cannot stand beside the others: a leaf has the"
                " name of a dict there; rename one of them",
                leaf=leaf.path,
                expected="a leaf or a dict",
                found="both",
            )
        level[last] = index
    tree, paths = describe(nested)
    order = flatten(nested)[0]
    return tree, [
        replace(leaves[index], path=path) for index, path in zip(order, paths, strict=True)
    ]
