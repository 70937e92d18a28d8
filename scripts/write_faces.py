"""Writes the public faces of the rooms as stubs: what tests/test_faces.py compares today's with.

Run as `python scripts/write_faces.py` when a release is made, and never to silence the test: until
the release a break wants a line in CHANGELOG.md. A face is what `__all__` of the room names, and of
a class what has no underscore, inherited members too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import griffe

ROOT = Path(__file__).resolve().parent.parent
FACES = ROOT / "tests" / "faces"
# holdfast.testing is provisional, Orbax's names follow Orbax, and options stand in docs/cli.md.
ROOMS = ("checkpoint", "multihost", "coordination", "launch", "web")
SPECIAL = ("__init__", "__call__", "__enter__", "__exit__", "__iter__", "__bool__")
_KINDS = griffe.ParameterKind


def load_faces(source: Path) -> dict[str, griffe.Module]:
    """Returns the rooms' faces, read from the sources below a folder; nothing of it is run."""
    loader = griffe.GriffeLoader(search_paths=[source], allow_inspection=False)
    package = loader.load("holdfast", try_relative_path=False)
    loader.resolve_aliases(implicit=True, external=False)
    return {room: package[room] for room in ROOMS}


def stub_of(module: griffe.Module) -> str:
    """Returns a face as a stub: signatures, fields and bases, in the order of the names."""
    names = sorted(str(name) for name in module.exports or ())
    # griffe takes the texts in a Literal for names unless it knows whose Literal it is.
    lines = ["from typing import Literal", f"__all__ = {names!r}"]
    lines += [line for name in names for line in stub_lines(module, name)]
    return "\n".join(lines) + "\n"


def stub_lines(owner: griffe.Module | griffe.Class, name: str, indent: str = "") -> Iterator[str]:
    """Yields the lines of one name of a face, or of one member of a class."""
    found = owner.all_members[name]
    value = found.final_target if isinstance(found, griffe.Alias) else found
    match value:
        case griffe.Class():
            bases = ", ".join(str(base) for base in value.bases)
            yield f"{indent}class {name}({bases}):" if bases else f"{indent}class {name}:"
            members = sorted(each for each in value.all_members if is_public(each))
            inner = [line for each in members for line in stub_lines(value, each, f"{indent}    ")]
            yield from inner or [f"{indent}    ..."]
        case griffe.Function():
            for label in ("classmethod", "staticmethod"):
                if label in value.labels:
                    yield f"{indent}@{label}"
            returns = "" if value.returns is None else f" -> {value.returns}"
            yield f"{indent}def {name}({parameters_of(value)}){returns}: ..."
        case griffe.Attribute():
            if value.annotation is not None:
                yield f"{indent}{name}: {value.annotation}"
            else:  # a constant has its value; what __init__ computes has none to rely on
                yield f"{indent}{name} = {value.value if name.isupper() else '...'}"
        case _:  # a module among the names
            yield f"{indent}{name}: object"


def is_public(name: str) -> bool:
    """Says whether a member of a class belongs to its face."""
    return not name.startswith("_") or name in SPECIAL


def parameters_of(function: griffe.Function) -> str:
    """Returns what stands between the parentheses."""
    shown: list[str] = []
    last = None
    for each in function.parameters:
        is_first = last not in (_KINDS.keyword_only, _KINDS.var_positional)
        if each.kind is _KINDS.keyword_only and is_first:
            shown.append("*")
        if last is _KINDS.positional_only and each.kind is not _KINDS.positional_only:
            shown.append("/")
        stars = {_KINDS.var_positional: "*", _KINDS.var_keyword: "**"}.get(each.kind, "")
        annotation = "" if each.annotation is None else f": {each.annotation}"
        default = "" if stars or each.default is None else f" = {each.default}"
        shown.append(f"{stars}{each.name}{annotation}{default}")
        last = each.kind
    if last is _KINDS.positional_only:
        shown.append("/")
    return ", ".join(shown)


def main(folder: Path) -> None:
    (folder / "holdfast").mkdir(parents=True, exist_ok=True)
    for room, face in load_faces(ROOT / "src").items():
        (folder / "holdfast" / f"{room}.pyi").write_text(stub_of(face))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else FACES)
