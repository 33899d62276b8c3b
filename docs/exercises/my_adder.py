"""Stage 04, chunked prefill: complete the functions that raise NotImplementedError.

diptych course grade 04     # in the folder of `diptych course start`
diptych check --stage 04 my_adder.py

The contract is in shared/interfaces/prefill_adder.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from diptych.shared.interfaces import (
    CLIP_MAX_NEW_TOKENS,
    MAX_WAITS,
    AddReqResult,
    PrefillBudget,
    PrefixCache,
    RadixKey,
    TokenToKVPoolAllocator,
)
from diptych.shared.interfaces import prefill_adder as interface
from diptych.shared.scheduling.admission import prefix_key
from diptych.shared.scheduling.pages import round_down_to_page, round_up_to_page
from diptych.shared.types import Req


class PrefillAdder(interface.PrefillAdder):
    def __init__(
        self,
        budget: PrefillBudget,
        tree_cache: PrefixCache,
        allocator: TokenToKVPoolAllocator,
        running: Sequence[Req],
    ) -> None:
        self.page_size = budget.page_size
        self.new_token_ratio = budget.new_token_ratio
        self.tree_cache = tree_cache
        self.allocator = allocator
        self.running = list(running)
        self.can_run_list: list[Req] = []
        self.new_chunked_req: Req | None = None
        self.num_waits = 0
        threshold = None if tree_cache.disable else budget.in_batch_prefix_threshold
        self.min_shared_len = (
            None if threshold is None else round_up_to_page(max(threshold, 1), self.page_size)
        )

        num_mixed = budget.num_mixed_decode_tokens
        self.reserved_tokens = num_mixed + budget.num_reserved_tokens
        self.reserved_tokens += sum(self._reservation(req) for req in running)
        self.rem_input_tokens = budget.max_prefill_tokens - num_mixed
        self.rem_chunk_tokens = (
            None if budget.chunked_prefill_size is None else budget.chunked_prefill_size - num_mixed
        )

    @property
    def rem_total_tokens(self) -> int:
        """Computed at each call: locking a prefix makes it not evictable."""
        raise NotImplementedError("TODO budgets: what could a request get now?")

    def add_chunked_req(self, req: Req) -> Req | None:
        """Continue a prompt: None if this was its last chunk, else the request."""
        raise NotImplementedError("TODO chunks: how much of its prompt comes now?")

    def add_one_req(self, req: Req) -> AddReqResult:
        """Try one waiting request: CONTINUE if it was added, NO_TOKEN without memory, WAIT if
        `_is_computed_now` (at most MAX_WAITS times in a step, counted in `num_waits`, then OTHER), OTHER if
        a budget is used up."""
        raise NotImplementedError("TODO admission: what has it already, what does it need, does it fit?")

    def preempt_to_schedule(self, req: Req, min_priority_gap: int) -> list[Req]:
        """The running requests to retract for `req`, whose priority is higher by more than the gap."""
        raise NotImplementedError("TODO preemption: who loses its memory?")

    def _num_free(self) -> int:
        """Tokens that are free, or become free by eviction."""
        return self.allocator.available_size() + self.tree_cache.evictable_size()

    def _is_computed_now(self, key: RadixKey, matched_len: int) -> bool:
        """Whether an added request computes a prefix of `key` that is long enough to wait for."""
        if self.min_shared_len is None or not self.can_run_list:
            return False
        if len(key) < matched_len + self.min_shared_len:
            return False
        raise NotImplementedError("TODO shared prefixes: does another request compute what this one needs?")

    def _reservation(self, req: Req) -> int:
        return int(_clipped_max_new(req) * self.new_token_ratio)

    def _fits(self, req: Req, extend_len: int) -> bool:
        """Whether the extension, in pages, and the output (`_clipped_max_new`) are below rem_total_tokens.
        A lone request, beside which nothing runs or was added, may use all of it, and needs no room for its
        output."""
        raise NotImplementedError("TODO admission: a lone request may use all memory")

    def _truncate(self, remaining: int, limit: int | None) -> int:
        """Tokens to compute in this step, of `remaining`. The limit counts whole pages; None: no limit."""
        raise NotImplementedError("TODO admission: where may a prompt be cut?")

    def _add(self, req: Req, extend_len: int) -> None:
        """The request computes `extend_len` tokens in this step. Its last chunk also reserves its output."""
        prefix_len = len(req.prefix_indices)
        req.fill_ids = req.all_ids[: prefix_len + extend_len]
        req.extend_input_len = extend_len
        self.can_run_list.append(req)
        is_last_chunk = len(req.fill_ids) == req.num_tokens
        num_tokens = round_up_to_page(extend_len, self.page_size)
        self.reserved_tokens += num_tokens + (_clipped_max_new(req) if is_last_chunk else 0)
        self.rem_input_tokens -= num_tokens
        if self.rem_chunk_tokens is not None:
            self.rem_chunk_tokens -= num_tokens


def _clipped_max_new(req: Req) -> int:
    return min(max(req.max_new_tokens - len(req.output_ids), 0), CLIP_MAX_NEW_TOKENS)
