"""Hypothesis looks for a schedule that breaks the scheduler: any sequence of submit, abort, retract, flush
and step, under any configuration, gives every request its own right tokens, leaks nothing and always ends."""

from __future__ import annotations

from diptych.shared.tools.conformance.oracles.flag_space import draw_flags
from diptych.shared.tools.conformance.oracles.schedules import (
    MAX_PROMPT_LEN,
    POOL_PAGES,
    Action,
    Drafts,
    Schedule,
    random_schedule,
    run_schedule,
)
from diptych.shared.tools.conformance.oracles.speculative_harness import shape_of
from tests.properties import HealthCheck, given, settings, st

# Three tokens only, so that random prompts share prefixes often.
prompts = st.lists(st.integers(1, 3), min_size=1, max_size=MAX_PROMPT_LEN).map(tuple)
which = st.integers(0, 30)

actions = st.one_of(
    st.builds(
        Action,
        kind=st.just("submit"),
        prompt=prompts,
        max_new_tokens=st.integers(0, 30),
        extra_key=st.sampled_from([None, None, "a"]),
        priority=st.sampled_from([0, 0, 5, 20, 40]),
        routing_key=st.sampled_from([None, "x", "y"]),
    ),
    st.builds(Action, kind=st.just("step"), num_steps=st.integers(1, 6)),
    st.builds(Action, kind=st.sampled_from(["abort", "retract"]), which=which),
    st.just(Action("flush")),
)


@st.composite
def schedules(draw: st.DrawFn, has_drafts: bool) -> Schedule:
    """With drafts that are right here and there, or without."""

    def pick(values):
        return draw(st.sampled_from(values))

    drafts = None
    if has_drafts:
        drafts = Drafts(shape_of(pick((1, 3, 5)), pick((1, 2, 4)), pick((2, 8, 16))), draw(st.integers(0, 3)))
    return Schedule(
        name="found by hypothesis",
        actions=tuple(draw(st.lists(actions, min_size=1, max_size=25 if has_drafts else 40))),
        drafts=drafts,
        **draw_flags(
            pick, pool_pages_of_16=POOL_PAGES, enable_mixed_chunk=(False,) if has_drafts else (False, True)
        ),
    )


ALWAYS = {"derandomize": True, "suppress_health_check": list(HealthCheck)}
"""The same schedules each time; raise max_examples and drop derandomize to hunt."""


@settings(max_examples=120, **ALWAYS)
@given(schedules(has_drafts=False))
def test_any_schedule_gives_every_request_its_own_tokens(schedule: Schedule) -> None:
    run_schedule(schedule)


@settings(max_examples=30, **ALWAYS)
@given(schedules(has_drafts=True))
def test_any_schedule_of_drafts_gives_every_request_its_own_tokens(schedule: Schedule) -> None:
    run_schedule(schedule)


def test_drafts_belong_to_a_schedule() -> None:
    drafts = Drafts(shape_of(3, 2, 8), 1)
    assert random_schedule(0).drafts is None
    assert drafts.flags()["speculative_num_draft_tokens"] == 8
