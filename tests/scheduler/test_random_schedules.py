"""Hypothesis looks for a schedule that breaks the scheduler: any sequence of submit, abort, retract, flush
and step, under any configuration, gives every request its own right tokens, leaks nothing and always ends."""

from __future__ import annotations

from diptych.shared.tools.conformance.oracles.schedules import (
    MAX_PROMPT_LEN,
    POLICIES,
    Action,
    Schedule,
    run_schedule,
)
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
def schedules(draw: st.DrawFn) -> Schedule:
    page_size = draw(st.sampled_from([1, 1, 4, 16]))
    policy = draw(st.sampled_from(POLICIES))
    return Schedule(
        name="found by hypothesis",
        actions=tuple(draw(st.lists(actions, min_size=1, max_size=40))),
        page_size=page_size,
        pool_pages_of_16=draw(st.sampled_from([3, 6, 12])),
        chunked_prefill_size=draw(st.sampled_from([None, page_size, 16, 23])),
        enable_mixed_chunk=draw(st.booleans()),
        disable_radix_cache=draw(st.integers(0, 3)) == 0,
        schedule_policy=policy,
        enable_priority_scheduling=policy in ("fcfs", "lof") and draw(st.booleans()),
        eviction_policy=draw(st.sampled_from(["lru", "lfu", "fifo", "priority"])),
        max_running_requests=draw(st.sampled_from([1, 3, 8])),
        max_prefill_tokens=draw(st.sampled_from([8, 64, 1000])),
        schedule_conservativeness=draw(st.sampled_from([0.1, 1.0])),
        in_batch_prefix_check_threshold=draw(st.sampled_from([0, 32])),
        in_batch_prefix_deprioritize_threshold=draw(st.sampled_from([4, 32])),
    )


@settings(
    max_examples=250,
    derandomize=True,  # the same schedules each time; raise max_examples and drop this to hunt
    suppress_health_check=list(HealthCheck),
)
@given(schedules())
def test_any_schedule_gives_every_request_its_own_tokens(schedule: Schedule) -> None:
    run_schedule(schedule)
