"""Rounds of speculation, launched before the CPU knows the result of the previous round.

Differs from reference: a round gets the previous round's results on the device
(optimized/overlap/future_runs.py): each request's new tokens and their number. Slots are not freed after a
round: until it ends, is retracted, or memory is short, a request owns slots for all tokens that the round in
flight may give and the next one may draft. The CPU reads a small buffer once per round, one round late. A row
of an ended request is computed once more, which affects no other request. Assumes a drafter and an attention
backend that accept upper bounds of lengths on the CPU. With others, and where a grammar needs every token,
each round waits for the previous one. Loses where that is so, and a round's work for requests that end.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from diptych.optimized.decoding import PlainDecoding
from diptych.optimized.kernels.compile_ahead import compile_ahead
from diptych.optimized.overlap.in_flight import BatchInFlight, Extension, InFlight
from diptych.optimized.speculative.chain import ChainRound
from diptych.optimized.speculative.round import Outcome, RoundInFlight, Starts, max_kept
from diptych.optimized.speculative.tree import TreeRound
from diptych.shared.config import EngineConfig
from diptych.shared.config.speculation_flags import possible_shapes
from diptych.shared.interfaces import SchedulerParts
from diptych.shared.loading.kv_sizing import num_speculative_slots
from diptych.shared.sampling.logprobs import to_token_logprobs
from diptych.shared.scheduling.pages import evict_for, round_up_to_page, rows_of
from diptych.shared.speculation.adaptive_shape import Acceptance
from diptych.shared.speculation.computed_prompt import computed_chunks, learn_prompt
from diptych.shared.speculation.kept_tokens import kept_tokens
from diptych.shared.speculation.node_sampling import make_early_bans
from diptych.shared.to_device import to_device, vectors_to_device
from diptych.shared.types import (
    BatchResult,
    ForwardBatch,
    ForwardMode,
    LogitsOutput,
    Req,
    SampleOutput,
    ScheduleBatch,
    SpeculationStats,
)


class SpeculativeDecoding(PlainDecoding):
    """`kv_committed_len` is the length known to the CPU: where the round in flight begins. The request's
    slots reach from there over all that this round may accept, and then `num_slots` further."""

    def __init__(self, config: EngineConfig, context_len: int, parts: SchedulerParts) -> None:
        super().__init__(parts)
        assert parts.drafter is not None
        self.pipeline.extension_of = self._extension_of
        self.device = parts.allocator.device
        self.drafter = parts.drafter
        self.acceptance = Acceptance(config)
        self.num_slots = num_speculative_slots(config, self.drafter)
        self.max_kept = max_kept(self.acceptance.largest)
        self._numbers = torch.arange(self.num_slots + self.max_kept, device=self.device)
        is_chain = self.acceptance.largest.top_k == 1
        self.round = (ChainRound if is_chain else TreeRound)(
            context_len, parts, self.pipeline, self.num_slots, self.max_kept
        )
        if self.device.type == "cuda" and not config.skip_warmup:
            with compile_ahead():
                self.rehearse(config)

    @torch.inference_mode()
    def rehearse(self, config: EngineConfig) -> None:
        """Link and accept an example of each size of trees, draft one, and move each number of slots,
        in `compile_ahead`: these kernels run between graphs."""
        draft_tree, kv_pool = self.parts.draft_tree, self.parts.kv_pool
        assert draft_tree is not None
        assert kv_pool is not None
        for shape in possible_shapes(config):
            zeros = torch.zeros(1, shape.num_draft_tokens, dtype=torch.int64, device=self.device)
            tree = draft_tree.from_parents(zeros, zeros - 1, zeros[:, 0] + 1)
            draft_tree.accept(tree, zeros, max_kept(shape) - 1)
            self.drafter.rehearse(shape)
        for num_bits in range(9 if self.acceptance.largest.top_k > 1 else 0):
            slots = torch.zeros(2**num_bits, dtype=torch.int64, device=self.device)
            kv_pool.move(slots, slots)

    def num_ahead(self, running: Sequence[Req]) -> int:
        return int(self.round.runs_ahead and not any(req.needs_output for req in running))

    def num_reserved(self, running: Sequence[Req]) -> int:
        # So that they can go on speculating.
        return sum(max(self._end(req) - req.kv_allocated_len, 0) for req in running)

    def prepare(self, reqs: list[Req], most_steps: int | None = None) -> ScheduleBatch | None:
        """Prepare a round, or a plain step if there is no room for drafts, which cause no retraction. A plain
        step needs the length of each request, so it returns None while a round is in flight."""
        if self.can_speculate(reqs):
            return self._prepare_round(reqs)
        if any(map(self.is_in_round, reqs)):
            return None
        self._give_back(reqs)
        return super().prepare(reqs)

    def can_speculate(self, reqs: Sequence[Req]) -> bool:
        """Whether there are slots for every request's drafts, and a request that may still produce two
        tokens."""
        if all(self._num_tokens_left(req) <= 1 for req in reqs):
            return False
        if self._has_room(reqs):
            return True
        if self.pipeline:
            return False
        self._give_back(reqs)  # excess slots of one request may be needed by another
        return self._has_room(reqs)

    def _has_room(self, reqs: Sequence[Req]) -> bool:
        tree_cache, allocator = self.parts.tree_cache, self.parts.allocator
        page_size = allocator.page_size
        num_tokens = sum(
            max(
                round_up_to_page(self._end(req), page_size)
                - round_up_to_page(req.kv_allocated_len, page_size),
                0,
            )
            for req in reqs
        )
        # Do not evict cached prefixes if eviction cannot suffice.
        if num_tokens > allocator.available_size() + tree_cache.evictable_size():
            return False
        return evict_for(num_tokens, tree_cache, allocator)

    def _prepare_round(self, reqs: list[Req]) -> ScheduleBatch:
        """Allocate slots behind those that each request already has."""
        pool = self.parts.req_to_token_pool
        starts = [req.kv_allocated_len for req in reqs]
        ends = [max(start, self._end(req)) for start, req in zip(starts, reqs)]
        rows = rows_of(reqs)
        if starts != ends:
            last_locs = pool.read_each(rows, [start - 1 for start in starts])
            slots = self.parts.allocator.alloc_extend(starts, ends, last_locs)
            assert slots is not None, "no slots for drafts: the caller checks this"
            pool.write_ragged(rows, starts, [end - start for start, end in zip(starts, ends)], slots)
        for req, end in zip(reqs, ends):
            req.kv_allocated_len = end
        return ScheduleBatch(list(reqs), ForwardMode.TARGET_VERIFY)

    def is_in_round(self, req: Req) -> bool:
        """Whether the request is in a round in flight, so that the length of its KV is unknown."""
        newest = self.pipeline.batches[-1] if self.pipeline else None
        return isinstance(newest, RoundInFlight) and req in newest.rows

    def _give_back(self, reqs: Sequence[Req]) -> None:
        """Free the slots of requests beyond their KV, if memory is short or before a plain step. The length
        of their KV must be known."""
        page_size = self.parts.allocator.page_size
        for req in reqs:
            assert not self.is_in_round(req), f"{req.rid}: a round in flight writes where it may"
            assert req.req_pool_idx is not None
            start, end = round_up_to_page(req.kv_committed_len, page_size), req.kv_allocated_len
            if start < end:
                self.parts.allocator.free(self.parts.req_to_token_pool.read(req.req_pool_idx, start, end))
            req.kv_allocated_len = req.kv_committed_len

    def run(self, batch: ScheduleBatch, chunked_req: Req | None) -> None:
        if batch.forward_mode is ForwardMode.TARGET_VERIFY:
            self._launch_round(batch)
        else:
            super().run(batch, chunked_req)

    def _launch_round(self, batch: ScheduleBatch) -> None:
        """Launch a round with copies of the CPU's state, which may change before the device starts the
        round."""
        reqs = batch.reqs
        launched = RoundInFlight(batch, self.pipeline.future_map.take(len(reqs)), self.acceptance.shape)
        with self.parts.timeline.span("prepare"):
            launched.starts = self._starts(reqs)
            # The device adds the tokens in flight, whose number the CPU does not know yet.
            launched.info = self.pipeline.sampling_info(reqs, [0] * len(reqs), reads_texts=False)
            launched.bans = make_early_bans(reqs, self.parts.num_token_ids, self.device)
        work = partial(self.round.run, launched, launched.shape)
        launched.results = self.pipeline.streams.launch(work)
        self.pipeline.batches.append(launched)

    def finish(self, launched: InFlight, outputs: Any) -> BatchResult:
        if isinstance(launched, RoundInFlight):
            return self._finish_round(launched, outputs)
        return super().finish(launched, outputs)

    def _finish_round(self, launched: RoundInFlight, outcome: Outcome) -> BatchResult:
        """The results of the requests that are still in the batch; none of the others."""
        width = launched.max_kept
        numbers = outcome.numbers.tolist()
        if launched.kept is not None:
            self._extend_late(launched, [row[width] for row in numbers])
        all_ids = [token_id for row in numbers for token_id in row[:width]]
        all_logprobs = to_token_logprobs(all_ids, outcome.logprobs)
        result = BatchResult([[] for _ in numbers], [[] for _ in numbers])
        for req, row in launched.rows.items():
            num_kept, depth = numbers[row][width:]
            self.acceptance.record(req, depth, num_kept)
            req.kv_committed_len += num_kept
            result.token_ids[row] = numbers[row][:num_kept]
            result.logprobs[row] = all_logprobs[row * width : row * width + num_kept]
        return result

    def has_come(self, req: Req, first_token: int, draft_state: bytes) -> None:
        if self.drafter.kv_pool is not None:
            learn = partial(self.drafter.restore, req, draft_state)
        else:
            chunks = [*computed_chunks(req, self.parts)]
            learn = partial(learn_prompt, req, first_token, chunks, self.drafter)
        self.pipeline.streams.launch(learn).wait()  # what it reads is kept until then, and prompts are rare

    def has_left(self, req: Req) -> None:
        super().has_left(req)
        self.drafter.forget(req)

    def stats(self, num_accepted_tokens: int) -> SpeculationStats:
        return self.acceptance.stats(num_accepted_tokens)

    # ---- calls of the drafter's `extend` ----

    def _extension_of(self, launched: BatchInFlight) -> Extension:
        """A function that, after a prefill or a decode step, calls the drafter and stores the batch's tokens
        for the next round. It is made when the batch is launched, because a prompt may be at its next chunk
        when it runs."""
        reqs = launched.batch.reqs
        prompt_ids = None
        chunked = launched.chunked_req
        if chunked in reqs:  # the sampled token has no meaning
            ids = [req.all_ids[len(req.fill_ids)] if req is chunked else -1 for req in reqs]
            prompt_ids = launched.keep(to_device(ids, torch.int64, self.device))

        def extend(batch: ForwardBatch, logits_output: LogitsOutput, sampled: SampleOutput) -> None:
            token_ids = sampled.next_token_ids
            self.round.runs.store(launched.first_place, token_ids[:, None], 1)
            if prompt_ids is not None:
                token_ids = torch.where(prompt_ids < 0, token_ids, prompt_ids)
            # After a NaN the id is negative, and the request ends.
            self.drafter.extend(reqs, batch, logits_output.hidden_states, token_ids.clamp(min=0))

        return extend

    def _extend_late(self, launched: RoundInFlight, num_kept: list[int]) -> None:
        """Extend, after a round, a drafter that needs the number of accepted tokens; for requests that are
        still in the batch."""
        kept, width = launched.kept, launched.max_kept
        assert kept is not None
        reqs, rows = list(launched.rows), list(launched.rows.values())
        if not reqs:
            return
        lens = [num_kept[row] for row in rows]
        tokens = [row * width + i for row, n in zip(rows, lens) for i in range(n)]
        ends = [req.kv_committed_len + n for req, n in zip(reqs, lens)]

        def extend() -> None:
            forward_batch, which = kept_tokens(kept.forward_batch, tokens, lens, ends, rows)
            states = None if kept.hidden_states is None else kept.hidden_states[which]
            newest = kept.next_token_ids[to_device(rows, torch.int64, self.device)]
            self.drafter.extend(reqs, forward_batch, states, newest)

        self.pipeline.streams.launch(extend).wait()

    # ---- state known to the CPU ----

    def _num_tokens_left(self, req: Req) -> int:
        """The most tokens that the request may still produce, those in flight included."""
        is_in_flight = self.pipeline.place_of(req) is not None
        return req.max_new_tokens - len(req.output_ids) - is_in_flight

    def _bound(self, req: Req) -> int:
        """An upper bound of the request's KV length when the next round starts."""
        if not self.is_in_round(req):
            return req.kv_committed_len
        return min(req.kv_committed_len + self.max_kept, _last_start(req))

    def _end(self, req: Req) -> int:
        """The end of the slots that the next round may use."""
        return self._bound(req) + self.num_slots

    def _starts(self, reqs: list[Req]) -> Starts:
        places = [self.pipeline.place_of(req) or 0 for req in reqs]
        kv_lens = [req.kv_committed_len for req in reqs]
        vectors = vectors_to_device(
            [
                rows_of(reqs),
                kv_lens,
                [_last_start(req) for req in reqs],
                places,
                [int(self.is_in_round(req)) for req in reqs],
                [0 if place else req.output_ids[-1] for req, place in zip(reqs, places)],
            ],
            self.device,
        )
        bounds = tuple(self._bound(req) for req in reqs)
        width = max(bound - kv_len for bound, kv_len in zip(bounds, kv_lens)) + self.num_slots
        # Read now, in the scheduler's stream, because the row changes later.
        pool = self.parts.req_to_token_pool
        columns = vectors[1][:, None] + self._numbers[:width]
        slots = pool.req_to_token[vectors[0][:, None], columns.clamp(max=pool.max_len - 1)].to(torch.int64)
        return Starts(*vectors[:6], slots, bounds)  # type: ignore[call-arg, arg-type]


def _last_start(req: Req) -> int:
    """The KV length of a request at its maximum length, which no continuing request reaches."""
    return len(req.origin_input_ids) + req.max_new_tokens - 1
