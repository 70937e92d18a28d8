"""`orbax.checkpoint.transform_utils`: trees whose leaves come from other places of another tree."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .args import RestoreArgs  # noqa: F401
from .refusals import refusing
from .trees.flat import (
    from_flat_dict,
    intersect_trees,  # noqa: F401
    merge_trees,  # noqa: F401
    to_flat_dict,
)

REFUSED = "MultiValueFn ValueFn"
__getattr__ = refusing(__name__, "it is a name for annotations", REFUSED)

SEPARATOR = "/"


@dataclass
class Transform:
    """Where one leaf, or those whose paths a regular expression matches, come from.

    That is `original_key` in the other tree (the same path if None), changed by `value_fn`; or what
    `multi_value_fn(path, other_tree)` makes; or with `use_fallback` the tree that is asked for.
    """

    original_key: str | tuple[str, ...] | None = None
    use_fallback: bool = False
    value_fn: Callable[[Any], Any] | None = None
    multi_value_fn: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        moved = self.original_key is not None or self.value_fn is not None
        if sum([moved, self.use_fallback, self.multi_value_fn is not None]) > 1:
            raise ValueError(
                f"{type(self).__name__}: expected one of original_key and value_fn, use_fallback,"
                f" multi_value_fn; found {self}"
            )

    def source_of(self, match: re.Match[str]) -> str:
        """Returns the path in the other tree of the leaf whose path matched."""
        if self.original_key is None:
            return match[0]
        if isinstance(self.original_key, str):
            return match.expand(self.original_key)
        return match.expand(SEPARATOR.join(self.original_key))


@dataclass
class RestoreTransform(Transform):
    """A Transform of a restore: `multi_value_fn` takes the leaf's RestoreArgs too.

    It is given the saved leaves that `multi_value_fn_input_args` names, with their RestoreArgs.
    """

    multi_value_fn_input_args: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Rules:
    """Transforms by the paths that they are for. Without one a leaf has its own path."""

    by_path: Mapping[str, Transform]
    default_to_original: bool
    restore_args: Mapping[str, Any] | None = None  # by path, in a restore

    @classmethod
    def of(cls, transforms: Any, default_to_original: bool, restore_args: Any = None) -> Rules:
        """Returns the rules of a tree, or a flat dict, of Transforms."""
        flat = to_flat_dict(transforms, sep=SEPARATOR)
        args = None if restore_args is None else to_flat_dict(restore_args, sep=SEPARATOR)
        return cls(flat, default_to_original, args)

    def find(self, path: str) -> tuple[Transform, str] | None:
        """Returns a path's transform and where its leaf comes from, None where no rule is for it.

        The last rule that matches counts.
        """
        found = None
        for pattern, transform in self.by_path.items():
            match = re.fullmatch(pattern, path)
            if match is not None:
                found = (transform, transform.source_of(match))
        return found

    def sources(self, path: str) -> Mapping[str, Any]:
        """Returns the paths of the saved leaves that the leaf at `path` is made of, each with its
        RestoreArgs or None.
        """
        args = (self.restore_args or {}).get(path)
        found = self.find(path)
        if found is None:
            return {path: args} if self.default_to_original else {}
        transform, source = found
        if isinstance(transform, RestoreTransform) and transform.multi_value_fn is not None:
            return transform.multi_value_fn_input_args or {}
        if transform.use_fallback and self.default_to_original:
            return {}
        return {source: args}

    def value(self, path: str, own: Any, original: Mapping[str, Any], tree: Any) -> Any:
        """Returns the leaf at `path`; `own` is that of the tree that is asked for.

        `original` are the other tree's leaves, `tree` is what a `multi_value_fn` sees.
        """
        found = self.find(path)
        if found is None:
            return original.get(path, own) if self.default_to_original else own
        transform, source = found
        if transform.multi_value_fn is not None:
            about = () if self.restore_args is None else (self.restore_args.get(path),)
            return transform.multi_value_fn(path, tree, *about)
        if transform.use_fallback and self.default_to_original:
            return own
        if source not in original:
            raise ValueError(
                f'Transformation key "{source}" not found in origin tree; it has'
                f" {sorted(original)[:10]}"
            )
        value = original[source]
        return value if transform.value_fn is None else transform.value_fn(value)


def apply_transformations(
    original_tree: Any, transformations: Any, new_tree: Any, default_to_original: bool = True
) -> Any:
    """Returns `new_tree` with the leaves that `transformations` takes from `original_tree`.

    A leaf without a rule is that of `original_tree` at its path, of `new_tree` where none is there.
    """
    rules = Rules.of(transformations, default_to_original)
    original = to_flat_dict(original_tree, sep=SEPARATOR)
    new = to_flat_dict(new_tree, sep=SEPARATOR)
    values = {path: rules.value(path, own, original, original_tree) for path, own in new.items()}
    return from_flat_dict(values, target=new_tree, sep=SEPARATOR)
