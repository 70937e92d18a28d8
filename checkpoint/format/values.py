"""Python values as a record has them: as a type and a text, exactly."""

from __future__ import annotations

import base64
import json
from typing import Any


def encode_value(value: Any) -> tuple[str, str]:
    """Returns a Python value as (type, text), exactly."""
    match value:
        case bool():
            return "bool", "true" if value else "false"
        case int():
            return "int", hex(value)
        case float():
            return "float", value.hex()
        case complex():
            return "complex", f"{value.real.hex()} {value.imag.hex()}"
        case bytes():
            return "bytes", base64.b64encode(value).decode()
    return "str", value


def count_value_bytes(value: Any) -> int:
    """Returns how many bytes a Python value and its type take in a record; a short one at most."""
    if isinstance(value, int):
        return value.bit_length() // 4 + 20
    if not isinstance(value, str | bytes):
        return 100
    if len(value) < 1000:  # six bytes for an escaped character: an estimate costs no encoding
        return 6 * len(value) + 20
    return len(json.dumps(encode_value(value)))


def decode_value(kind: str, text: str) -> Any:
    """Returns the value that `encode_value` encoded; raises ValueError for anything else."""
    match kind:
        case "bool" if text in ("true", "false"):
            return text == "true"
        case "int":
            return int(text, 16)
        case "float":
            return float.fromhex(text)
        case "complex":
            real, imaginary = text.split(" ")
            return complex(float.fromhex(real), float.fromhex(imaginary))
        case "bytes":
            return base64.b64decode(text, validate=True)
        case "str":
            return text
    raise ValueError(f"no value of kind {kind!r}")
