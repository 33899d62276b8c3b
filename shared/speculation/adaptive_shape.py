"""How much is drafted and accepted, and so how much to draft next (`speculative_auto`)."""

from __future__ import annotations

from diptych.shared.config import EngineConfig, draft_shape
from diptych.shared.config.speculation_flags import shapes_up_to
from diptych.shared.types import DraftShape, Req, SpeculationStats

WINDOW = 32
"""Verifications after which the shape is looked at again: few enough to follow a change of the text."""
DEEPER, SHALLOWER = 2 / 3, 1 / 3
"""Shares of the drafted depth. Above the one deeper drafts would mostly be accepted too, below the other most
of the drafting is for nothing; between them the shape stays, so that it does not swing."""


class Acceptance:
    """Counts drafts and accepted tokens; `shape` is what the next round drafts."""

    def __init__(self, config: EngineConfig) -> None:
        self.largest = draft_shape(config)
        self.adaptive_shape = AdaptiveShape(self.largest) if config.speculative_auto else None
        self.num_verifications = 0
        self.num_drafted_tokens = 0

    @property
    def shape(self) -> DraftShape:
        return self.largest if self.adaptive_shape is None else self.adaptive_shape.current

    def record(self, req: Req, depth: int, num_kept: int) -> None:
        """A round gave the request `num_kept` tokens from a tree of this depth. Call it before the tokens
        are appended: drafts that the output has no room for do not count."""
        num_drafted = min(depth, req.max_new_tokens - len(req.output_ids) - 1)
        req.num_verifications += 1
        req.num_drafted_tokens += num_drafted
        self.num_verifications += 1
        self.num_drafted_tokens += num_drafted
        if self.adaptive_shape is not None:
            self.adaptive_shape.record(num_drafted, min(num_kept - 1, num_drafted))

    def stats(self, num_accepted_tokens: int) -> SpeculationStats:
        return SpeculationStats(self.num_verifications, self.num_drafted_tokens, num_accepted_tokens)


class AdaptiveShape:
    """Shapes of 1, 2, 4 ... steps, up to the configured one, with nodes in proportion. It starts with the
    largest, and after each WINDOW verifications goes one up, one down, or stays. The same verifications give
    the same shapes; and no shape changes an answer."""

    def __init__(self, largest: DraftShape) -> None:
        self.shapes = shapes_up_to(largest)
        self.level = len(self.shapes) - 1
        self._clear()

    @property
    def current(self) -> DraftShape:
        return self.shapes[self.level]

    def record(self, num_drafted: int, num_accepted: int) -> None:
        """One verification. (A tree without a draft says nothing about depth.)"""
        if num_drafted == 0:
            return
        self.num_verifications += 1
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        if self.num_verifications < WINDOW:
            return
        rate = self.num_accepted / self.num_drafted
        if rate > DEEPER:
            self.level = min(self.level + 1, len(self.shapes) - 1)
        elif rate < SHALLOWER:
            self.level = max(self.level - 1, 0)
        self._clear()

    def _clear(self) -> None:
        self.num_verifications = self.num_drafted = self.num_accepted = 0
