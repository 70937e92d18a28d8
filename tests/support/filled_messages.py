"""Protobuf messages with every field filled, by chance: what a test does not name is drawn too."""

from __future__ import annotations

import math
import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_ODD_FLOATS = (0.0, -1.0, 0.5, 1e308, math.inf, -math.inf, math.nan)
_TEXTS = ("", "a", "loss", "grad/norm", "é\u0000\n", "x" * 3_000)


def fill(message: Message, chance: random.Random, depth: int = 4) -> Message:
    """Fills every field of a message, lists and maps too, down to `depth` messages; returns it."""
    for each in message.DESCRIPTOR.fields:
        if each.containing_oneof is not None and each.containing_oneof.fields[0] is not each:
            if chance.random() < 0.5:
                _fill_field(message, each, chance, depth)
        else:
            _fill_field(message, each, chance, depth)
    return message


def _fill_field(message: Message, each: FieldDescriptor, chance: random.Random, depth: int) -> None:
    kind = each.message_type
    target = getattr(message, each.name)
    if kind is not None and kind.GetOptions().map_entry:
        value = kind.fields_by_name["value"]
        for _ in range(chance.randrange(1, 4)):
            key = _scalar(kind.fields_by_name["key"], chance)
            if value.message_type is None:
                target[key] = _scalar(value, chance)
            elif depth:
                fill(target[key], chance, depth - 1)
    elif hasattr(target, "extend"):  # a list: only newer protobufs say so of the field
        for _ in range(chance.randrange(1, 4)):
            if kind is None:
                target.append(_scalar(each, chance))
            elif depth:
                fill(target.add(), chance, depth - 1)
    elif kind is None:
        setattr(message, each.name, _scalar(each, chance))
    elif depth:
        fill(target, chance, depth - 1)


def _scalar(each: FieldDescriptor, chance: random.Random) -> Any:
    match each.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            text = chance.choice(_TEXTS)
            return text.encode() if each.type == FieldDescriptor.TYPE_BYTES else text
        case FieldDescriptor.CPPTYPE_BOOL:
            return chance.random() < 0.5
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return chance.choice(_ODD_FLOATS)
        case FieldDescriptor.CPPTYPE_ENUM:
            return chance.choice(each.enum_type.values).number
        case FieldDescriptor.CPPTYPE_INT32:
            return chance.choice((0, 1, 2, 7, -1, -(2**31), 2**31 - 1))
        case FieldDescriptor.CPPTYPE_UINT32:
            return chance.choice((0, 1, 2, 2**32 - 1))
        case FieldDescriptor.CPPTYPE_UINT64:
            return chance.choice((0, 1, 2, 11, 2**64 - 1))
        case _:
            return chance.choice((0, 1, 2, 11, -1, -(2**63), 2**63 - 1))
