"""Schedules that hypothesis thinks of, with drafts that are right here and there."""

from __future__ import annotations

from diptych.shared.tools.conformance.oracles.schedules import Drafts, Schedule, random_schedule, run_schedule
from diptych.shared.tools.conformance.oracles.speculative_harness import shape_of
from tests.properties import HealthCheck, given, settings, st
from tests.scheduler.test_random_schedules import actions


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    shape = shape_of(*(draw(st.sampled_from(numbers)) for numbers in ((1, 3, 5), (1, 2, 4), (2, 8, 16))))
    page_size = draw(st.sampled_from([1, 4, 16]))
    return Schedule(
        name="found by hypothesis",
        actions=tuple(draw(st.lists(actions, min_size=1, max_size=25))),
        page_size=page_size,
        pool_pages_of_16=draw(st.sampled_from([3, 6, 12])),
        chunked_prefill_size=draw(st.sampled_from([None, page_size, 16, 23])),
        disable_radix_cache=draw(st.integers(0, 3)) == 0,
        max_running_requests=draw(st.sampled_from([1, 3, 8])),
        schedule_conservativeness=draw(st.sampled_from([0.1, 1.0])),
        drafts=Drafts(shape, draw(st.integers(0, 3))),
    )


@settings(max_examples=60, derandomize=True, suppress_health_check=list(HealthCheck))
@given(schedules())
def test_any_schedule_of_drafts_gives_every_request_its_own_tokens(schedule: Schedule) -> None:
    run_schedule(schedule)


def test_drafts_belong_to_a_schedule() -> None:
    drafts = Drafts(shape_of(3, 2, 8), 1)
    assert random_schedule(0).drafts is None
    assert drafts.flags()["speculative_num_draft_tokens"] == 8
