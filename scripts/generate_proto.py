"""Generates proto/*_pb2.py and *_pb2.pyi from proto/*.proto.

Its argument, if there is one, is another folder to generate into.
"""

import sys
import tempfile
from pathlib import Path

from grpc_tools import _protoc_compiler  # type: ignore[import-not-found]

ROOT = Path(__file__).resolve().parent.parent


def generate(target: Path) -> list[Path]:
    """Writes the generated modules into `target` and returns their paths."""
    protos = sorted((ROOT / "proto").glob("*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        arguments = [
            "protoc",
            f"-Iholdfast/proto={ROOT / 'proto'}",
            f"--python_out={scratch}",
            f"--pyi_out={scratch}",
        ]
        arguments += [f"holdfast/proto/{proto.name}" for proto in protos]
        if _protoc_compiler.run_main([argument.encode() for argument in arguments]) != 0:
            raise SystemExit("protoc failed")
        written = []
        for file in sorted((Path(scratch) / "holdfast" / "proto").iterdir()):
            (target / file.name).write_bytes(file.read_bytes())
            written.append(target / file.name)
    return written


if __name__ == "__main__":
    for path in generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "proto"):
        print(path)
