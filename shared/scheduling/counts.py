"""What a scheduler counts while it works."""

from __future__ import annotations

from dataclasses import dataclass

from shared.interfaces import SchedulerState, SchedulerStats
from shared.types import Req, SpeculationStats


@dataclass
class SchedulerCounts:
    num_steps: int = 0
    num_prompt_tokens: int = 0  # of all requests admitted so far
    num_cached_tokens: int = 0  # those of them that came from the prefix cache
    num_generated_tokens: int = 0
    num_accepted_tokens: int = 0  # those of them that speculation gave in addition
    num_retractions: int = 0

    def admit(self, req: Req, now: float) -> None:
        """It gets memory. What its prompt found in the cache counts the first time."""
        if req.run_start_time is None:
            req.run_start_time = now
            req.num_cached_tokens = len(req.prefix_indices)
            self.num_prompt_tokens += len(req.origin_input_ids)
            self.num_cached_tokens += req.num_cached_tokens
        req.is_retracted = False

    def add_output(self, req: Req, num_new_tokens: int) -> None:
        """What one step gave a request."""
        num_accepted = max(num_new_tokens - 1, 0)
        req.num_accepted_tokens += num_accepted
        self.num_accepted_tokens += num_accepted
        self.num_generated_tokens += num_new_tokens

    def stats(
        self, state: SchedulerState, new_token_ratio: float, speculation: SpeculationStats
    ) -> SchedulerStats:
        return SchedulerStats(
            num_waiting=len(state.waiting_queue),
            num_running=len(state.running) + (state.chunked_req is not None),
            num_steps=self.num_steps,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_generated_tokens=self.num_generated_tokens,
            num_retractions=self.num_retractions,
            new_token_ratio=new_token_ratio,
            speculation=speculation,
        )
