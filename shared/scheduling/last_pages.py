"""The last pages of prompts that are sent to another engine."""

from __future__ import annotations

from typing import NamedTuple

import torch

from diptych.shared.interfaces import Drafter, ReqToTokenPool, SchedulerFeature, TokenToKVPoolAllocator
from diptych.shared.scheduling.pages import round_down_to_page
from diptych.shared.scheduling.state_checkpoints import StateCheckpoints
from diptych.shared.types import FinishAbort, FinishError, Req
from diptych.shared.types.req import NO_SLOTS


class LastPage(NamedTuple):
    slots: torch.Tensor = NO_SLOTS
    draft_state: bytes = b""  # what the drafter keeps of the request
    checkpoint: int | None = None  # with the state of linear attention at the prompt's end


class LastPages(SchedulerFeature):
    """Keeps the slots behind a prompt's last full page when its request ends. The prefix cache takes full
    pages, of pairs of tokens with an EAGLE head, and would free them. With them goes the state."""

    def __init__(
        self,
        req_to_token_pool: ReqToTokenPool,
        allocator: TokenToKVPoolAllocator,
        drafter: Drafter | None,
        states: StateCheckpoints | None,
    ) -> None:
        self.req_to_token_pool = req_to_token_pool
        self.allocator = allocator
        self.page_size = allocator.page_size
        self.drafter = drafter
        self.states = states
        self.is_bigram = drafter is not None and drafter.is_bigram
        self.wanted: set[str] = set()  # ids of requests
        self._kept: dict[str, LastPage] = {}
        if states is not None:
            states.sent = self.wanted

    # --8<-- [start:keep-the-last-page]
    def has_left(self, req: Req) -> None:
        has_kv = req.finished and not isinstance(req.finished_reason, (FinishAbort, FinishError))
        if req.rid in self.wanted and has_kv:
            assert req.req_pool_idx is not None
            num_full = round_down_to_page(req.kv_committed_len - self.is_bigram, self.page_size)
            slots = self.req_to_token_pool.read(req.req_pool_idx, num_full, req.kv_committed_len)
            state = b"" if self.drafter is None else self.drafter.state_of(req)
            checkpoint = None if self.states is None else self.states.begin_sending(req)
            self._kept[req.rid] = LastPage(slots, state, checkpoint)
            req.kv_committed_len, req.kv_allocated_len = num_full + self.is_bigram, num_full

    # --8<-- [end:keep-the-last-page]

    def take(self, rid: str) -> LastPage:
        """That of a request that is wanted no more. The caller frees it."""
        self.wanted.discard(rid)
        return self._kept.pop(rid, LastPage())

    def free(self, last_page: LastPage) -> None:
        self.allocator.free(last_page.slots)
        if self.states is not None and last_page.checkpoint is not None:
            self.states.end_sending(last_page.checkpoint)
