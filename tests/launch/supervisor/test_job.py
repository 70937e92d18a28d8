"""The supervisor's values: sizes and policies that cannot be, and what a job says of itself."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.launch import RestartPolicy
from holdfast.launch.supervisor.job import Job, State


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(RestartPolicy)])
def test_no_setting_of_a_policy_is_negative(name: str) -> None:
    """Each is refused with its name and value; 0 is allowed everywhere."""
    RestartPolicy(**{name: 0})
    with pytest.raises(ValueError, match=rf"RestartPolicy\.{name} is -1; expected 0 or more"):
        RestartPolicy(**{name: -1})


@given(st.integers(-2, 5), st.integers(-2, 5))
def test_the_numbers_of_processes_fit(least: int, most: int) -> None:
    """Sizes that do not fit are the caller's mistake, with both numbers in the message."""
    if 1 <= least <= most:
        assert Job("j", least, most).num_processes == 0
    else:
        with pytest.raises(
            ValueError,
            match=f"a job needs 1 <= min_processes <= num_processes, found {least} and {most}",
        ):
            Job("j", least, most)


@given(st.sets(st.integers(0, 9)), st.dictionaries(st.integers(10, 19), st.integers(-9, 124)))
def test_a_job_counts_the_living_and_the_left(alive: set[int], exit_codes: dict[int, int]) -> None:
    """The processes of an attempt are those that run and those that have an exit code."""
    job = Job("j", 1, 20, alive=frozenset(alive), exit_codes=exit_codes)
    assert job.num_processes == len(alive) + len(exit_codes)


def test_three_states_are_final() -> None:
    """From every other state something can still happen."""
    assert [state for state in State if Job("j", 1, 1, state=state).final] == [
        State.FINISHED,
        State.PREEMPTED,
        State.FAILED,
    ]
