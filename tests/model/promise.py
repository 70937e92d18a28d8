"""Promises with names, and edits of the code that show which promise misses a rule."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from typing import Any


class Broken(AssertionError):
    """A promise that does not hold; its name stands first."""

    def __init__(self, promise: str, what: str) -> None:
        super().__init__(f"{promise}: {what}")
        self.promise = promise


def need(holds: bool, promise: str, what: str) -> None:
    """Raises Broken where a promise does not hold."""
    if not holds:
        raise Broken(promise, what)


@contextlib.contextmanager
def edited(
    module_name: str, path: str, text: str, instead: str, *, takers: tuple[str, ...] = ()
) -> Iterator[None]:
    """Has a function, or a method by its path, go with `instead` in the place of `text`.

    What modules whose names begin as `takers` have imported of it is the changed one too.
    """
    module = importlib.import_module(module_name)
    owner: Any = module
    *owners, last = path.split(".")
    for part in owners:
        owner = getattr(owner, part)
    real = inspect.getattr_static(owner, last)
    function = real.func if hasattr(real, "func") else real
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(text) == 1, f"{module_name}: {path} reads otherwise now"
    scope: dict[str, Any] = {}
    changed = "from __future__ import annotations\n" + source.replace(text, instead)
    exec(compile(changed, f"<{path}, edited>", "exec"), module.__dict__, scope)
    # What has taken the function's name from its module has the old one.
    owners_of_it = [owner] + [
        other
        for name, other in list(sys.modules.items())
        if takers and name.startswith(takers) and other is not module
        if getattr(other, last, None) is real
    ]
    for each in owners_of_it:
        setattr(each, last, scope[last])
    try:
        yield
    finally:
        for each in owners_of_it:
            setattr(each, last, real)
