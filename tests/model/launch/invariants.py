"""What no life of a job may break: docs/running-jobs.md and docs/guarantees.md as properties.

Each rule takes a trace, and yields a sentence for each place where the supervisor breaks it.
"""

from __future__ import annotations

from collections.abc import Callable

from .budgets import (
    an_attempt_costs_once,
    back_offs_are_bounded,
    budgets_hold,
    idle_attempts_end_the_job,
    only_progress_refills,
)
from .deciding import (
    a_decision_has_its_reason,
    decisions_are_a_function,
    earlier_attempts_are_over,
    growing_waits,
    sizes_fit,
    the_exit_code_says_why,
    the_result_says_it,
)
from .endings import (
    an_attempt_begins_once,
    an_attempt_ends_once,
    attempts_are_alone,
    endings_end,
    no_restart_after_93,
    nothing_follows_what_was_not_given_back,
)
from .notices import (
    a_deadline_holds_for_all,
    a_failure_leaves_less_time,
    a_notice_reaches_all,
    a_withdrawn_notice_ends_nothing,
    leaving_has_its_time,
    leaving_is_not_done,
)
from .reading import Broken
from .rejoining import (
    a_change_of_size_keeps_all,
    joining_again_ends,
    nobody_is_missing,
    only_who_is_late_is_replaced,
    who_has_no_number_ends,
    who_stays_can,
)
from .sparing import (
    nobody_stays_behind,
    the_needed_are_spared,
    who_has_no_client_has_time,
    who_has_nothing_to_do_is_ended,
    who_leaves_has_time,
)
from .trace import Trace
from .waiting import (
    a_final_job_is_left_alone,
    a_time_that_has_come_counts,
    nothing_follows_a_stop,
    nothing_waits_for_ever,
)

INVARIANTS: tuple[Callable[[Trace], Broken], ...] = (
    the_needed_are_spared,
    who_has_nothing_to_do_is_ended,
    who_has_no_client_has_time,
    who_leaves_has_time,
    nobody_stays_behind,
    no_restart_after_93,
    an_attempt_begins_once,
    an_attempt_ends_once,
    nothing_follows_what_was_not_given_back,
    attempts_are_alone,
    endings_end,
    budgets_hold,
    an_attempt_costs_once,
    only_progress_refills,
    idle_attempts_end_the_job,
    back_offs_are_bounded,
    nothing_waits_for_ever,
    a_time_that_has_come_counts,
    nothing_follows_a_stop,
    a_final_job_is_left_alone,
    a_deadline_holds_for_all,
    leaving_has_its_time,
    a_failure_leaves_less_time,
    a_notice_reaches_all,
    a_withdrawn_notice_ends_nothing,
    leaving_is_not_done,
    who_stays_can,
    nobody_is_missing,
    a_change_of_size_keeps_all,
    who_has_no_number_ends,
    only_who_is_late_is_replaced,
    joining_again_ends,
    sizes_fit,
    growing_waits,
    earlier_attempts_are_over,
    the_exit_code_says_why,
    a_decision_has_its_reason,
    decisions_are_a_function,
    the_result_says_it,
)
