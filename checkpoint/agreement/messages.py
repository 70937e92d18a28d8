"""What processes tell each other: values whose classes say by their type hints how they are read.

On the wire they are JSON by name, without what is as by default. An error travels as a SentError.
"""

from __future__ import annotations

import json
import types
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, partial
from typing import Any, Self, TypeAlias, Union, get_args, get_origin, get_type_hints

from holdfast.coordination import HoldfastError

from ..errors import SENT_ERRORS, CheckpointError, SaveFailed

Parse: TypeAlias = Callable[[Any], Any]
LONG_BYTES = 1024  # of a message that is compressed: it may go to as many processes as it names


class Message:
    """A dataclass that travels; so do dataclasses and named tuples in it."""

    def to_bytes(self) -> bytes:
        """Returns JSON, compressed where it is long."""
        data = json.dumps(self, default=_plain, separators=(",", ":")).encode()
        return data if len(data) < LONG_BYTES else zlib.compress(data, 1)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Reads what `to_bytes` wrote."""
        text = data if data.startswith(b"{") else zlib.decompress(data)
        message: Self = parsed(cls, json.loads(text))
        return message


@dataclass(frozen=True)
class SentError:
    """An error on its way to another process. No pickle crosses between processes."""

    kind: str
    message: str
    fields: Mapping[str, int | str] = field(default_factory=dict)

    @classmethod
    def of(cls, error: Exception) -> Self:
        """Takes the kind, the sentence and, of our own errors, the facts."""
        sentence = str(error)
        facts = {}
        if isinstance(error, HoldfastError):
            sentence = error.message
            facts = {
                name: value
                for name, value in vars(error).items()
                if isinstance(value, int | str) and not name.startswith("_")
            }
        elif isinstance(error, OSError):
            facts = {"passes": True, "errno": error.errno or 0}
        return cls(type(error).__name__, sentence, facts)

    @property
    def text(self) -> str:
        """Kind and sentence, as part of a message."""
        return f"{self.kind}: {self.message}"

    def rebuilt(
        self, *, unknown: type[HoldfastError] = CheckpointError, start: str = "", **facts: Any
    ) -> HoldfastError:
        """Returns the error, of its own kind or of `unknown`; its sentence begins with `start`."""
        made = SENT_ERRORS.get(self.kind, unknown)
        sentence = self.message if self.kind in SENT_ERRORS else self.text
        known = {
            name: value
            for name, value in {**self.fields, **facts}.items()
            if hasattr(made, name) and value is not None
        }
        return made(start + sentence, **known)


@dataclass(frozen=True)
class AgreedError:
    """The error of one process that all processes raise."""

    process: int
    error: SentError

    def here(self, index: int, own: Exception | None) -> Exception:
        """Returns what process `index` raises: its own error where that is of the agreed kind."""
        if own is not None and (self.process == index or type(own).__name__ == self.error.kind):
            if isinstance(own, CheckpointError):
                own.process = index
            return own
        # An error that knows its process names it in its sentence already.
        start = "" if "process" in self.error.fields else f"process {self.process}: "
        error = self.error.rebuilt(start=start, process=self.process)
        error.__cause__ = own
        return error


def _plain(value: Any) -> Any:
    """Returns what json takes of a value that it does not know."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, HoldfastError):
        value = SentError.of(value)
    if hasattr(value, "to_json"):
        return value.to_json()
    pairs = ((each, getattr(value, each.name)) for each in fields(value))
    return {each.name: found for each, found in pairs if found != each.default}


def parsed(hint: Any, data: Any) -> Any:
    """Returns the value of a type that JSON types were made of."""
    return _parser(hint)(data)


@cache
def _parser(hint: Any) -> Parse:
    origin = get_origin(hint)
    parts = get_args(hint)
    if origin in (types.UnionType, Union):
        parse = _parser(parts[0])  # before None, or of what JSON tells apart by itself
        return lambda data: None if data is None else parse(data)
    if origin is Mapping:
        parse = _parser(parts[1])
        return lambda data: {parts[0](key): parse(each) for key, each in data.items()}
    if origin is tuple and parts[-1] is not Ellipsis:
        return _parser_of_each(tuple, parts)
    if origin in (tuple, list, Sequence):
        return _parser_of_all(tuple if origin is tuple else list, _parser(parts[0]))
    return _parser_of_class(hint)


def _parser_of_all(make: Parse, parse: Parse) -> Parse:
    return make if parse is _as_is else lambda data: make(map(parse, data))


def _parser_of_class(hint: Any) -> Parse:
    if hint is HoldfastError:
        return lambda data: SentError(**data).rebuilt(unknown=SaveFailed)
    if hasattr(hint, "from_json"):
        return partial(hint.from_json)
    if hasattr(hint, "_make"):
        return _parser_of_each(hint._make, get_type_hints(hint).values())
    if isinstance(hint, type) and is_dataclass(hint):
        return _parser_of_fields(hint)
    return _as_is


def _as_is(data: Any) -> Any:
    """Reads what JSON has as it is: thousands of them come in one message."""
    return data


def _parser_of_fields(made: Any) -> Parse:
    hints = get_type_hints(made).items()
    parsers = {name: each for name, of in hints if (each := _parser(of)) is not _as_is}
    return lambda data: made(
        **data | {name: parse(data[name]) for name, parse in parsers.items() if name in data}
    )


def _parser_of_each(make: Parse, hints: Iterable[Any]) -> Parse:
    others = [(at, parse) for at, parse in enumerate(map(_parser, hints)) if parse is not _as_is]

    def parse_each(data: Iterable[Any]) -> Any:
        each = [*data]
        for at, parse in others:
            each[at] = parse(each[at])
        return make(each)

    return parse_each if others else make
