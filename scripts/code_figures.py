"""Prints how the code reads: tokens a line, sizes of functions, and what a reader stumbles over.

    python scripts/code_figures.py                  this tree
    python scripts/code_figures.py --rooms          a column for each room
    python scripts/code_figures.py PATH ...         a column for each folder or file named
    python scripts/code_figures.py --peers          beside h11, httpx and zarr, where installed

Tokens are those of `tokenize` without comments, newlines and indents. Tests, generated code and
`holdfast.testing` are left out. It is a compass, not a gate: no trick that moves a number alone.
"""

from __future__ import annotations

import argparse
import ast
import bisect
import importlib.util
import io
import statistics
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("coordination", "multihost", "checkpoint", "launch", "compat", "web", "cli")
PEERS = ("h11", "httpx", "zarr")
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
# From Python 3.12 on an f-string is many tokens. It counts as one string on every version.
F_START = getattr(tokenize, "FSTRING_START", None)
F_END = getattr(tokenize, "FSTRING_END", None)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
ASSIGNMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign)
# Nine of ten nodes are none of these.
COUNTED = frozenset({*FUNCTIONS, *ASSIGNMENTS, ast.IfExp, ast.Call, ast.Global, ast.Expr})
MOST_POSITIONAL = 5
MOST_PARAMETERS = 8
MOST_LOCALS = 12


@dataclass
class Figures:
    """What is counted over some files."""

    files: int = 0
    lines: int = 0
    code_lines: int = 0
    tokens: int = 0
    comments: int = 0
    wide_lines: int = 0
    function_tokens: list[int] = field(default_factory=list)
    parallel: list[str] = field(default_factory=list)
    conditionals: int = 0
    nested_conditionals: list[str] = field(default_factory=list)
    positional_calls: list[str] = field(default_factory=list)
    effect_statements: list[str] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    crowded_functions: list[str] = field(default_factory=list)
    globals: list[str] = field(default_factory=list)
    outside_assignments: list[str] = field(default_factory=list)


def code_tokens(text: str) -> list[int]:
    """Returns the line of each token of the code, ascending."""
    lines = []
    depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == F_START:
            depth += 1
            if depth == 1:
                lines.append(token.start[0])
        elif token.type == F_END:
            depth -= 1
        elif depth == 0 and token.type not in NOT_CODE:
            lines.append(token.start[0])
    return lines


def comment_lines(text: str) -> int:
    """Returns how many lines hold nothing but a comment; rulers are not counted."""
    rows = (row.strip() for row in text.splitlines())
    return sum(row.startswith("#") and not row.startswith("# ---") for row in rows)


def is_parallel(node: ast.AST) -> bool:
    """Returns whether a statement assigns several unrelated values at once.

    A swap, or a step of a recurrence, reads what it assigns: its values are related.
    """
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    target = node.targets[0]
    if not isinstance(target, ast.Tuple) or len(target.elts) != len(node.value.elts):
        return False
    assigned = {ast.unparse(each) for each in target.elts}
    read = {ast.unparse(each) for each in ast.walk(node.value) if isinstance(each, ast.expr)}
    return not assigned & read


def positional_arguments(call: ast.Call) -> int:
    """Returns how many arguments a call gives by position."""
    return sum(not isinstance(each, ast.Starred) for each in call.args)


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Returns how many parameters a function has beside `self` or `cls`."""
    signature = function.args
    names = [each.arg for each in (*signature.posonlyargs, *signature.args, *signature.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def locals_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Returns the names that a function assigns, those of functions inside it left out."""
    found: set[str] = set()
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (*FUNCTIONS, ast.Lambda, ast.ClassDef)):
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        waiting.extend(ast.iter_child_nodes(node))
    return found


def outside_attributes(node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> Iterator[str]:
    """Yields the targets of an assignment that are attributes of another object than `self`."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    for target in targets:
        for each in ast.walk(target):
            if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
                owner = ast.unparse(each.value)
                if owner not in ("self", "cls"):
                    yield ast.unparse(each)


def count_file(path: Path, figures: Figures) -> None:
    """Adds one file to the figures."""
    text = path.read_text()
    tokens = code_tokens(text)
    rows = text.splitlines()
    figures.files += 1
    figures.lines += len(rows)
    figures.code_lines += len(set(tokens))
    figures.tokens += len(tokens)
    figures.comments += comment_lines(text)
    figures.wide_lines += sum(len(row) > 100 for row in rows)
    for node in ast.walk(ast.parse(text)):
        if type(node) not in COUNTED:
            continue
        where = f"{path}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, FUNCTIONS):
            first = bisect.bisect_left(tokens, node.lineno)
            end = bisect.bisect_right(tokens, node.end_lineno or node.lineno)
            figures.function_tokens.append(end - first)
            if parameters_of(node) > MOST_PARAMETERS:
                figures.parameters.append(f"{where} {node.name}: {parameters_of(node)}")
            if len(locals_of(node)) > MOST_LOCALS:
                figures.crowded_functions.append(f"{where} {node.name}: {len(locals_of(node))}")
        elif is_parallel(node):
            figures.parallel.append(where)
        elif isinstance(node, ast.IfExp):
            figures.conditionals += 1
            inner = (each for each in ast.walk(node) if each is not node)
            if any(isinstance(each, ast.IfExp) for each in inner):
                figures.nested_conditionals.append(where)
        elif isinstance(node, ast.Call) and positional_arguments(node) > MOST_POSITIONAL:
            figures.positional_calls.append(where)
        elif isinstance(node, ast.Global):
            figures.globals.append(f"{where} {', '.join(node.names)}")
        elif isinstance(node, ast.Expr) and isinstance(
            node.value,
            ast.Tuple | ast.ListComp | ast.SetComp | ast.DictComp | ast.IfExp | ast.BoolOp,
        ):
            figures.effect_statements.append(where)
        if isinstance(node, ASSIGNMENTS):
            found = outside_attributes(node)
            figures.outside_assignments.extend(f"{where} {target}" for target in found)


def sources(folder: Path) -> Iterator[Path]:
    """Yields the source files of a file or folder, without tests and generated code."""
    if folder.is_file():
        yield folder
        return
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).parts
        if "_pb2" not in path.name and not {"tests", "testing"} & set(parts[:-1]):
            yield path


def figures_of(folders: Iterable[Path]) -> Figures:
    """Returns the figures of all source files of some folders."""
    figures = Figures()
    for folder in folders:
        for path in sources(folder):
            count_file(path, figures)
    return figures


def rows_of(figures: Figures) -> dict[str, str]:
    """Returns what is printed: a label and its figure."""
    thousands = figures.lines / 1000 or 1.0
    sizes = sorted(figures.function_tokens) or [0]
    p90 = sizes[min(len(sizes) - 1, int(len(sizes) * 0.9))]
    return {
        "tokens in all": f"{figures.tokens:,}",
        "lines": f"{figures.lines:,}",
        "tokens a line": f"{figures.tokens / max(1, figures.lines):.1f}",
        "tokens a line of code": f"{figures.tokens / max(1, figures.code_lines):.1f}",
        "tokens of a function, median": f"{statistics.median(sizes):.0f}",
        "tokens of a function, p90": str(p90),
        "unrelated parallel assignments": str(len(figures.parallel)),
        "conditional expressions, 1,000 lines": f"{figures.conditionals / thousands:.1f}",
        "nested conditional expressions": str(len(figures.nested_conditionals)),
        "statements for their effect": str(len(figures.effect_statements)),
        "calls with six positional arguments": str(len(figures.positional_calls)),
        "functions of more than 8 parameters": str(len(figures.parameters)),
        "functions of more than 12 locals": str(len(figures.crowded_functions)),
        "global statements": str(len(figures.globals)),
        "assignments to others' attributes": str(len(figures.outside_assignments)),
        "comment lines, 1,000 lines": f"{figures.comments / thousands:.1f}",
        "lines over 100 columns": str(figures.wide_lines),
    }


def installed(peer: str) -> Path | None:
    """Returns the folder of an installed package, or None."""
    found = importlib.util.find_spec(peer)
    if found is None or found.origin is None:
        return None
    return Path(found.origin).parent


def main() -> None:
    """Prints a table in Markdown, and where each counted thing stands with --where."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--tree", type=Path, default=ROOT, help="the root of another checkout")
    parser.add_argument("--rooms", action="store_true", help="a column for each room")
    parser.add_argument("--peers", action="store_true", help="columns of installed packages")
    parser.add_argument("--where", action="store_true", help="also list where each thing stands")
    chosen = parser.parse_args()
    rooms = [chosen.tree / room for room in ROOMS]
    columns: dict[str, Figures] = {}
    if chosen.paths:
        columns |= {str(path): figures_of([path]) for path in chosen.paths}
    else:
        columns["this tree"] = figures_of(rooms)
    if chosen.rooms:
        columns |= {room.name: figures_of([room]) for room in rooms}
    if chosen.peers:
        for peer in PEERS:
            folder = installed(peer)
            if folder is None:
                print(f"{peer} is not installed: pip install {peer}", file=sys.stderr)
            else:
                columns[peer] = figures_of([folder])
    tables = {name: rows_of(figures) for name, figures in columns.items()}
    print(f"| | {' | '.join(tables)} |")
    print("|---" * (1 + len(tables)) + "|")
    for label in next(iter(tables.values())):
        print(f"| {label} | {' | '.join(table[label] for table in tables.values())} |")
    if chosen.where:
        for figures in columns.values():
            for name, found in vars(figures).items():
                if isinstance(found, list) and found and isinstance(found[0], str):
                    print(f"\n{name}:", *found, sep="\n  ")


if __name__ == "__main__":
    main()
