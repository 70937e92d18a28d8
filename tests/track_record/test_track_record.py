"""The track record holds: each mend stands in the code, and its test fails without it."""

from __future__ import annotations

import ast
from functools import cache

import pytest

from tests.support.paths import ROOT

from .mends import MENDS
from .taking_back import SOURCE, Mend, take_back

PROMISES = range(1, 15)  # as docs/guarantees.md numbers them


@cache
def _tests_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_each_mend_stands_where_the_record_says() -> None:
    """Its text stands once in its file, and its test is there."""
    for mend in MENDS:
        code = (SOURCE / mend.file).read_text()
        assert mend.without(code) != code
        file, _, name = mend.found_by.partition("::")
        assert name in _tests_of(file), f"{mend.name}: {mend.found_by} is not there"


def test_each_promise_has_its_defects() -> None:
    """No promise is without a defect that was mended, no two defects have one name, the list goes
    by promises, and the page says how many there are.
    """
    promises = [mend.promise for mend in MENDS]
    assert set(promises) == set(PROMISES)
    assert promises == sorted(promises)
    assert len({mend.name for mend in MENDS}) == len(MENDS)
    page = (ROOT / "docs" / "how-we-know.md").read_text()
    assert f"{len(MENDS)} defects" in page


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("mend", MENDS, ids=lambda mend: mend.name)
def test_its_test_fails_without_the_mend(mend: Mend) -> None:
    """The defect is found where the code is as it was."""
    verdict = take_back(mend)
    assert verdict.is_found, verdict.says
