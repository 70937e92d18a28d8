"""Renaming: rules, mappings and functions, and their JSON form."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.format.rename import parse_names, rename_all, renamer


def test_rules_of_renaming() -> None:
    """The first rule that matches the whole name decides; a mapping and its JSON form do the same;
    nonsense is refused.
    """
    rename = renamer([(r"a\.(\d)", r"b.\1"), (r"a.*", "c")])
    assert [rename(name) for name in ("a.1", "a.x", "z.a.1")] == ["b.1", "c", "z.a.1"]
    assert parse_names('{"a": "b"}') == {"a": "b"} and parse_names('[["a", "b"]]') == [("a", "b")]
    assert rename_all({"a": "b"}, ["a", "c"]) == {"a": "b", "c": "c"}
    for text in ("{", '{"a": 1}', "[1]"):
        with pytest.raises(ValueError, match="map"):
            parse_names(text)
    with pytest.raises(ValueError, match="no regular expression"):
        renamer([("(", "x")])
    with pytest.raises(ValueError, match=r"rule 'a\(.\)' cannot rename 'ab': invalid group"):
        rename_all([("a(.)", r"\2")], ["c", "ab"])
    with pytest.raises(TypeError, match="gives 'a' the name 5: expected a str"):
        rename_all(lambda name: 5, ["a"])  # type: ignore[arg-type,return-value]


@given(
    st.lists(st.text("ab.", min_size=1, max_size=4), unique=True),
    st.dictionaries(st.text("ab.", min_size=1, max_size=4), st.text("ab.", max_size=3)),
)
def test_no_two_leaves_get_one_name(old: list[str], names: dict[str, str]) -> None:
    """A renaming is one to one, or a ValueError that names both leaves."""
    new = [names.get(name, name) for name in old]
    if len(set(new)) == len(new):
        assert rename_all(names, old) == dict(zip(old, new, strict=True))
        return
    with pytest.raises(ValueError, match="the same name") as caught:
        rename_all(names, old)
    first, second = re.findall(r"gives '(.*?)' and '(.*?)'", str(caught.value))[0]
    assert first != second and names.get(first, first) == names.get(second, second)
