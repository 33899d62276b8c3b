"""How much of the output that running requests may still produce is set aside when others are admitted."""

from __future__ import annotations

from collections.abc import Sequence

from shared.types import Req

INIT_RATIO = 0.7  # times the conservativeness: most requests stop before max_new_tokens
MIN_FACTOR = 0.14
DECAY_STEPS = 600  # decode steps without a retraction from the initial ratio to the least
RETRACT_DECODE_STEPS = 20  # head-room after a retraction, so that the next one is not due at once


class NewTokenRatio:
    """Expected used fraction of max_new_tokens: falls while all goes well, jumps up on a retraction."""

    def __init__(self, conservativeness: float) -> None:
        self.initial = min(INIT_RATIO * conservativeness, 1.0)
        self.least = self.initial * MIN_FACTOR
        self.current = self.initial

    def decay(self) -> None:
        step = (self.initial - self.least) / DECAY_STEPS
        self.current = max(self.current - step, self.least)

    def raise_after_retraction(self, running: Sequence[Req]) -> None:
        """To what the remaining requests have used of theirs, plus some steps more."""
        num_used = sum(len(req.output_ids) for req in running) + RETRACT_DECODE_STEPS * len(running)
        num_allowed = sum(req.max_new_tokens for req in running) + 1
        self.current = min(num_used / num_allowed, 1.0)
