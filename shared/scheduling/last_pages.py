"""The last pages of prompts that are sent to another engine."""

from __future__ import annotations

import torch

from diptych.shared.interfaces import ReqToTokenPool, SchedulerFeature
from diptych.shared.scheduling.pages import round_down_to_page
from diptych.shared.types import FinishAbort, FinishError, Req
from diptych.shared.types.req import NO_SLOTS


class LastPages(SchedulerFeature):
    """Keeps the slots behind a prompt's last full page when its request ends. The prefix cache takes full
    pages, and would free them."""

    def __init__(self, req_to_token_pool: ReqToTokenPool, page_size: int) -> None:
        self.req_to_token_pool = req_to_token_pool
        self.page_size = page_size
        self.wanted: set[str] = set()  # ids of requests
        self._kept: dict[str, torch.Tensor] = {}

    # --8<-- [start:keep-the-last-page]
    def has_left(self, req: Req) -> None:
        has_kv = req.finished and not isinstance(req.finished_reason, (FinishAbort, FinishError))
        if req.rid in self.wanted and has_kv:
            assert req.req_pool_idx is not None
            num_full = round_down_to_page(req.kv_committed_len, self.page_size)
            self._kept[req.rid] = self.req_to_token_pool.read(
                req.req_pool_idx, num_full, req.kv_committed_len
            )
            req.kv_committed_len = req.kv_allocated_len = num_full

    # --8<-- [end:keep-the-last-page]

    def take(self, rid: str) -> torch.Tensor:
        """The slots of a request that is wanted no more. The caller frees them."""
        self.wanted.discard(rid)
        return self._kept.pop(rid, NO_SLOTS)
