"""Turns a public name into Markdown: its signature, its docstring, and its public members."""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import os
import re
from collections.abc import Iterator
from typing import Any

WIDTH = 96  # columns of a signature
# What a docstring lists: names, a colon, and a text whose later lines are indented.
_LISTED = re.compile(r"^(`?[\w.*]+(?:`?, `?[\w.*]+)*`?): (?=\S)")
_CODE = re.compile(r"(`[^`]*`)")


def entry(name: str, value: Any, level: int = 3) -> str:
    """Returns the entry of a name: a function, a class with its members, or a value."""
    heading = f"\n{'#' * level} {name}\n"
    if not callable(value):
        return f"{heading}\n`{name} = {value!r}`\n"
    parts = [heading]
    is_class = inspect.isclass(value)
    if not (is_class and issubclass(value, BaseException)):
        parts.append(signature(name, value))
    parts.append(text_of(value))
    if is_class:
        parts += [member_entry(value, *member, level + 1) for member in members(value)]
    return "".join(parts)


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """Yields the public methods and properties of a class, without those that a base describes."""
    for name, member in vars(cls).items():
        plain = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if name.startswith("_") or not (inspect.isfunction(plain) or isinstance(plain, property)):
            continue
        if plain.__doc__ or not any(name in vars(base) for base in cls.__mro__[1:]):
            yield name, plain


def member_entry(cls: type, name: str, member: Any, level: int) -> str:
    """Returns the entry of a method or a property."""
    heading = f"\n{'#' * level} {cls.__name__}.{name}\n"
    if isinstance(member, property):
        kind = inspect.signature(member.fget).return_annotation if member.fget else "Any"
        return f"{heading}\n```py\n{name}: {kind}\n```\n{text_of(member)}"
    return heading + signature(name, member) + text_of(member)


def signature(name: str, value: Any) -> str:
    """Returns the call as code: one line, or one for each argument; the members of an Enum, whose
    call each Python writes in another way.
    """
    if inspect.isclass(value) and issubclass(value, enum.Enum):
        return f"\n```py\n{name}: {', '.join(value.__members__)}\n```\n"
    try:
        found = inspect.signature(value)
    except ValueError:
        return ""
    arguments = list(written_arguments(found))
    if arguments == ["*args", "**kwargs"]:  # a Protocol: nobody makes one
        return ""
    returned = found.return_annotation
    # What a call of a class returns needs no saying.
    tail = "" if returned is found.empty or inspect.isclass(value) else f" -> {written(returned)}"
    line = f"{name}({', '.join(arguments)}){tail}"
    if len(line) > WIDTH:
        rows = "".join(f"    {argument},\n" for argument in arguments)
        line = f"{name}(\n{rows}){tail}"
    return f"\n```py\n{line}\n```\n"


def written_arguments(found: inspect.Signature) -> Iterator[str]:
    """Yields the arguments as they are written, with the bare star before keywords."""
    starred = False
    for argument in found.parameters.values():
        if argument.name in ("self", "cls"):
            continue
        if argument.kind is argument.VAR_POSITIONAL:
            starred = True
        if argument.kind is argument.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        yield written_argument(argument)


def written_argument(argument: inspect.Parameter) -> str:
    """Returns an argument with its type and its default."""
    stars = {argument.VAR_POSITIONAL: "*", argument.VAR_KEYWORD: "**"}.get(argument.kind, "")
    text = f"{stars}{argument.name}"
    if argument.annotation is not argument.empty:
        text += f": {written(argument.annotation)}"
    if argument.default is not argument.empty:
        equals = " = " if ":" in text else "="
        text += f"{equals}{written_default(argument.default)}"
    return text


def written(annotation: Any) -> str:
    """Returns a type as the source has it."""
    if isinstance(annotation, str):
        return annotation.strip("'\"")
    return inspect.formatannotation(annotation)


def written_default(value: Any) -> str:
    """Returns a default. One that is no literal is three dots: its text is of this machine."""
    if value is os.environ:
        return "os.environ"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__name__}()" if value == type(value)() else "..."
    if callable(value):
        return str(getattr(value, "__name__", "..."))
    try:
        ast.literal_eval(repr(value))
    except (SyntaxError, ValueError):
        return str(value) if isinstance(value, enum.Enum | float) else "..."
    return repr(value)


def text_of(value: Any) -> str:
    """Returns a docstring in Markdown, with a line before it; what it lists becomes a list."""
    doc = value.__doc__
    if not doc or (dataclasses.is_dataclass(value) and doc.startswith(f"{value.__name__}(")):
        return ""
    return "".join(f"\n{paragraph(each)}\n" for each in inspect.cleandoc(doc).split("\n\n"))


def paragraph(text: str) -> str:
    """Returns a paragraph of a docstring in Markdown."""
    rows = text.splitlines()
    if text.lstrip().startswith(("- ", ">>>", "| ")):
        return text
    if rows[0].startswith("    "):
        return f"```py\n{inspect.cleandoc(text)}\n```"
    if not all(_LISTED.match(row) or row.startswith("    ") for row in rows):
        return escaped(text)
    items: list[str] = []
    for row in rows:
        found = _LISTED.match(row)
        if found:
            names = found[1].replace("`", "").replace(", ", "`, `")
            items.append(f"- `{names}`: {escaped(row[found.end() :])}")
        else:
            items.append(f"  {escaped(row.strip())}")
    return "\n".join(items)


def escaped(text: str) -> str:
    """Returns text in which nothing but code between backticks means something to Markdown."""
    pieces = _CODE.split(text)
    pieces[::2] = [re.sub(r"([*<])", r"\\\1", piece) for piece in pieces[::2]]
    return "".join(pieces)
