"""Model-based: any sequence of submit, abort, retract and step, under any configuration, gives every request
its own right tokens, leaks nothing and always ends."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from shared.types import FinishAbort, FinishLength
from tests.scheduler.harness import Harness

POLICIES = ("fcfs", "lpm", "dfs-weight", "lof", "random", "routing-key")


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    page_size = draw(st.sampled_from([1, 1, 4, 16]))
    policy = draw(st.sampled_from(POLICIES))
    return {
        "page_size": page_size,
        "pool_tokens": draw(st.sampled_from([3, 6, 12])) * 16,
        "chunked_prefill_size": draw(st.sampled_from([None, max(1, page_size), 16, 23])),
        "enable_mixed_chunk": draw(st.booleans()),
        "disable_radix_cache": draw(st.integers(0, 3)) == 0,
        "schedule_policy": policy,
        "enable_priority_scheduling": policy in ("fcfs", "lof") and draw(st.booleans()),
        "eviction_policy": draw(st.sampled_from(["lru", "lfu", "fifo", "priority"])),
        "max_running_requests": draw(st.sampled_from([1, 3, 8])),
        "max_prefill_tokens": draw(st.sampled_from([8, 64, 1000])),
        "schedule_conservativeness": draw(st.sampled_from([0.1, 1.0])),
        "in_batch_prefix_check_threshold": draw(st.sampled_from([0, 32])),
        "in_batch_prefix_deprioritize_threshold": draw(st.sampled_from([4, 32])),
    }


# Three tokens only, so that random prompts share prefixes often.
prompts = st.lists(st.integers(1, 3), min_size=1, max_size=40)


class Schedules(RuleBasedStateMachine):
    panel = "reference"
    use: ClassVar[dict[str, str]] = {}

    @initialize(config=configurations())
    def start(self, config: dict[str, Any]) -> None:
        note(str(config))
        self.harness = Harness(panel=self.panel, use=self.use, context_len=64, **config)
        self.aborted: set[str] = set()

    @rule(prompt=prompts, max_new=st.integers(0, 30), key=st.sampled_from([None, None, "a"]),
          priority=st.sampled_from([0, 0, 5, 20, 40]), routing=st.sampled_from([None, "x", "y"]))  # fmt: skip
    def submit(
        self, prompt: list[int], max_new: int, key: str | None, priority: int, routing: str | None
    ) -> None:
        if len(prompt) > self.harness.allocator.size:
            with pytest.raises(ValueError, match="KV pool"):
                self.harness.submit(prompt, max_new)
            return
        self.harness.submit(prompt, max_new, extra_key=key, priority=priority, routing_key=routing)

    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.harness.step()

    @precondition(lambda self: self.harness.reqs)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.harness.reqs)))
        alive = not self.harness.reqs[rid].finished
        assert self.harness.scheduler.abort(rid) is alive
        if alive:
            self.aborted.add(rid)

    @precondition(lambda self: self.harness.reqs)
    @rule(data=st.data())
    def retract(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.harness.reqs)))
        self.harness.scheduler.retract(rid)

    @rule()
    def flush(self) -> None:
        harness = self.harness
        idle = all(rid in harness.ended or harness.reqs[rid].finished for rid in harness.reqs)
        assert harness.scheduler.flush_cache() is idle

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        harness = self.harness
        # A request takes at most one step a chunk token and one an output token, some more for retractions.
        harness.run(max_steps=200 + 300 * len(harness.reqs))
        assert set(harness.ended) == set(harness.reqs)
        for rid, reason in harness.ended.items():
            if isinstance(reason, FinishAbort):
                assert rid in self.aborted
                harness.expect(rid, len(harness.tokens[rid]))
            else:
                assert isinstance(reason, FinishLength)
                harness.expect(rid, harness.reqs[rid].max_new_tokens)
        harness.expect_idle()


def test_any_schedule_gives_every_request_its_own_tokens() -> None:
    run_state_machine_as_test(
        Schedules,
        settings=settings(
            max_examples=250,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,  # CI runs the same schedules each time; raise max_examples to hunt
            suppress_health_check=list(HealthCheck),
        ),
    )
