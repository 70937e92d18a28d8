"""The code in README.md and docs/ runs as it stands there, each page in one fresh process and
folder; then its commands, in the same folder.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest

from holdfast import checkpoint, coordination, multihost
from holdfast.cli.entry import main
from scripts.list_promises import attacked, promises, said_twice
from scripts.prose_figures import words_of_page
from scripts.write_redirects import MOVED, write
from tests.support.doc_pages import BLOCK, PAGES, Part, parts
from tests.support.libraries import need_installed
from tests.support.paths import ROOT

# They need what `make slow` alone installs.
SLOW = {"libraries.md: Brax", "libraries.md: Keras"}
WITH_A_JOB = {"trainer.md", "watching.md"}  # tests/test_tutorials.py types their commands
PARTS = list(parts())
DOCS = ROOT / "docs"
ADRS = sorted((ROOT / "docs" / "adr").glob("*.md"))
WORDS = 26_000  # on all pages; only fewer
REPOSITORY = "https://github.com/holdfast-jax/holdfast/blob/main/"
_OTHERS = re.compile(r"^(?:import|from) (brax|grain|keras)\b", re.MULTILINE)
_TEST = re.compile(r"tests/[a-z_/]*test_[a-z_]+\.py")
_LINK = re.compile(r"\]\((?!https?://|mailto:)([^)#\s]*)#?([^)\s]*)\)")
_ITEM = re.compile(r"^\n* *(?:[-*]|\d+\.) ", re.MULTILINE)
_COMMAND = re.compile(r"^(?:export|holdfast|kill|make|mpirun|pip) [^:\n]*$", re.MULTILINE)
_COMMENT = re.compile(r"\s+# .*$", re.MULTILINE)
# Commands that do not run here, and why.
NOT_HERE = {
    r"^make ": "this is `make test`; tests/system/test_main_job.py runs the demo",
    r"^pip ": "tests/test_tutorials.py installs a wheel in an empty environment",
    r"^(export|mpirun) |^holdfast (kubernetes|coordinator|ray) ": "needs a cluster",
    r"HOST:PORT|DIR|PID| \.\.\. ": "has a placeholder",
    r"^holdfast (status|web)|--web |hang\.py|max-restarts": (
        "needs a job that runs, dies or hangs: tests/test_tutorials.py, tests/cli, tests/system"
    ),
}


def commands(text: str) -> list[str]:
    """Returns the commands in the plain blocks of a text, without comments."""
    lines = (
        line.strip()
        for kind, block in BLOCK.findall(text)
        if not kind
        for line in _COMMENT.sub("", block).splitlines()
    )
    return [line for line in lines if _COMMAND.match(line) or "HOST:PORT" in line]


def runs_here(command: str) -> bool:
    """Says whether a command of a page can run in a test."""
    return not any(re.search(pattern, command) for pattern in NOT_HERE)


def _has_code(part: Part) -> bool:
    has_commands = any(map(runs_here, commands(part.text))) and part.name not in WITH_A_JOB
    return has_commands or part.program != ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_block_is_code_on_the_site_too(page: Path) -> None:
    """A fence has one word at most: the site takes one with more for text, and its block too."""
    kinds = {kind for kind, _ in BLOCK.findall(page.read_text())}
    assert [kind for kind in kinds if kind and not kind.isalnum()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_in_a_table_reads_the_same_everywhere(page: Path) -> None:
    """A bar in it needs a backslash, which the site shows: such code stands outside of tables."""
    rows = [line for line in page.read_text().splitlines() if line.startswith("|")]
    assert [row for row in rows if r"\|" in row] == []


@pytest.mark.parametrize("page", [*PAGES, *ADRS], ids=lambda page: page.name)
def test_a_list_is_one_on_the_site_too(page: Path) -> None:
    """What belongs to an item has four spaces there, and the first item an empty line above."""
    texts = BLOCK.sub("", page.read_text()).split("\n\n")
    assert [text for text in texts if re.match(r" {1,3}\S", text)] == []
    assert [text for text in texts if _ITEM.search(text) and not _ITEM.match(text)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_is_not_wider_than_code(page: Path) -> None:
    """Nobody scrolls sideways to read a line of a program."""
    blocks = [text for kind, text in BLOCK.findall(page.read_text()) if kind in ("python", "py")]
    lines = [line for text in blocks for line in text.splitlines()]
    assert [line for line in lines if len(line) > 100] == []


def test_the_site_needs_nothing_from_elsewhere() -> None:
    """With a repo_url each of its pages asks GitHub how many stars there are."""
    assert "\nrepo_url:" not in (ROOT / "mkdocs.yml").read_text()


WITH_CODE: list[Any] = [
    pytest.param(part, marks=[pytest.mark.slow] if part.name in SLOW else [])
    for part in PARTS
    if _has_code(part)
]


@pytest.mark.parametrize("part", WITH_CODE, ids=lambda part: part.name)
def test_the_code_of_a_page_runs(part: Part, tmp_path: Path) -> None:
    """All ```python blocks of a page run in order as one program (those marked ```py do not), then
    its commands.
    """
    for library in _OTHERS.findall(part.text):
        need_installed(library, "make slow-libraries")
    program = tmp_path / "page.py"
    program.write_text(part.program)
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",  # what a page compiles runs once
        "HOME": str(tmp_path),
        "TMPDIR": str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    run = partial(
        subprocess.run,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    ran = run([sys.executable, program])
    assert ran.returncode == 0, f"{part.name}:\n{program.read_text()}\n{ran.stdout}{ran.stderr}"
    if part.name in WITH_A_JOB:
        return
    (tmp_path / "train.py").write_text("import os; print(os.environ['HOLDFAST_PROCESS_ID'])")
    for command in filter(runs_here, commands(part.text)):
        done = run(shlex.split(command))
        assert done.returncode == 0, f"{part.name}: {command}\n{done.stdout}{done.stderr}"


# Names under which programs import what is installed under another name, and what holdfast brings.
_IMPORTED = {
    "holdfast-jax[testing]": "pytest",
    "orbax-checkpoint": "orbax",
    "opentelemetry-sdk": "opentelemetry",
}
_BROUGHT = {"holdfast", "jax", "numpy", *sys.stdlib_module_names}


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_a_page_says_what_its_program_needs(part: Part) -> None:
    """Whoever has holdfast and what the page names can run it."""
    imported = re.findall(r"^(?:import|from) (\w+)", part.program, re.MULTILINE)
    named = {_IMPORTED.get(library, library) for library in part.libraries}
    assert set(imported) - _BROUGHT - named == set()


def _own_commands() -> list[Any]:
    return [
        pytest.param(command, id=f"{part.name}: {command}")
        for part in PARTS
        for command in commands(part.text)
        if command.startswith("holdfast ") and " ... " not in command
    ]


@pytest.mark.parametrize("command", _own_commands())
def test_a_command_of_a_page_is_one(command: str) -> None:
    """Its name and its options are known, whether it can run here or not."""
    name, *words = shlex.split(command)[1:]
    found = main.get_command(click.Context(main), name)
    assert found is not None, command
    try:
        found.make_context(name, words)
    except click.MissingParameter:
        raise
    except click.BadParameter:
        pass  # a value that stands for the user's, such as a file


def test_the_commands_of_the_pages_are_found() -> None:
    """Those that run, and those that do not."""
    found = [command for part in PARTS for command in commands(part.text)]
    run = set(filter(runs_here, found))
    assert {"holdfast ls runs/first", "holdfast run -n 4 -- python train.py"} <= run
    for pattern in NOT_HERE:
        assert any(re.search(pattern, command) for command in found), pattern


@pytest.mark.parametrize(
    "page",
    [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))],
    ids=lambda p: p.name,
)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    """Every relative link names a file that exists, and a section that is in it."""
    text = BLOCK.sub("", page.read_text())
    for name in re.findall(rf"\]\({REPOSITORY}([^)#]+)", text):
        assert (ROOT / name).exists(), f"{page.name} links to {name}"
    for name, section in _LINK.findall(text):
        target = page.parent / name if name else page
        on_site = page.is_relative_to(DOCS) and target.suffix == ".md"
        assert not on_site or target.resolve().is_relative_to(DOCS), f"{name}: begin {REPOSITORY}"
        assert target.exists(), f"{page.name} links to {name}"
        assert not section or section in _sections(target), f"{page.name} links to {name}#{section}"


def _sections(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize(
    "page",
    [*sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "benchmarks").glob("*.md"))],
    ids=lambda p: p.name,
)
def test_the_tests_that_a_page_names_are_there(page: Path) -> None:
    """Evidence can be found."""
    for name in _TEST.findall(page.read_text()):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_each_decision_has_a_number_of_its_own() -> None:
    """The number of a decision's file is that of its title, and no other has it."""
    files = sorted((ROOT / "docs" / "adr").glob("*.md"))
    numbers = [int(file.name[:4]) for file in files]
    titles = [re.match(r"# (\d+)", file.read_text()) for file in files]
    assert [int(title[1]) for title in titles if title] == numbers
    assert numbers == list(range(1, len(files) + 1))


def test_the_concepts_name_every_package_and_error() -> None:
    """The table has each package in an order in which it may import those above it; the tree has
    each public error below its base.
    """
    page = (ROOT / "docs" / "concepts.md").read_text()
    shown = re.findall(r"^\| `(holdfast\.\w+)` \|", page, re.MULTILINE)
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    packages = {*config["root_packages"]} - {"holdfast.testing"}
    layers = next(each["layers"] for each in config["contracts"] if each["id"] == "rooms")
    floor = {name: at for at, names in enumerate(layers) for name in names.split(" | ")}
    assert {*shown} == packages
    assert sorted(shown, key=lambda name: -floor[name]) == shown
    tree = page.partition("\nHoldfastError\n")[2].partition("```")[0]
    bases = {}
    for line in tree.splitlines():
        base, *below = line.split()
        bases |= dict.fromkeys(below, base)
    public = {
        error
        for package in (coordination, multihost, checkpoint)
        for error in map(vars(package).get, package.__all__)
        if isinstance(error, type) and issubclass(error, coordination.HoldfastError)
    }
    leaves = {error for error in public if error not in {each.__bases__[0] for each in public}}
    assert bases == {error.__name__: error.__bases__[0].__name__ for error in leaves}


def test_addresses_of_before_lead_to_a_page_and_its_section(tmp_path: Path) -> None:
    """A bookmark of the old site arrives where the text is now."""
    write(tmp_path)
    for old, target in MOVED.items():
        name, _, section = target.partition("/#")
        page = ROOT / "docs" / f"{name.rstrip('/')}.md"
        assert section in {"", *_sections(page)}, (old, target)
        assert not (ROOT / "docs" / f"{old}.md").exists(), old
        assert f"url=../{target}" in (tmp_path / old / "index.html").read_text()


def test_the_pages_grow_no_longer() -> None:
    """Whoever adds words takes as many away: `python scripts/prose_figures.py` counts them."""
    assert sum(words_of_page(page.read_text()) for page in PAGES) <= WORDS


def test_each_promise_has_one_home_and_its_evidence() -> None:
    """The guarantees were attacked, each of them; no page says a long sentence of another's."""
    numbers = list(promises())
    assert numbers == list(range(1, len(numbers) + 1))
    assert set(numbers) <= attacked()
    assert said_twice() == {}
