"""A decode step that speculates: draft, let the target verify, keep what it would have written itself."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from shared.config import EngineConfig, draft_shape
from shared.interfaces import SchedulerParts
from shared.loading.kv_sizing import num_speculative_slots
from shared.sampling.sampling_batch import make_sampling_batch_info
from shared.scheduling.pages import num_pages_of, round_up_to_page
from shared.scheduling.step_memory import evict_for, rows_of
from shared.speculation.adaptive_shape import AdaptiveShape
from shared.speculation.node_sampling import expand_to_nodes, make_early_bans, with_grammars
from shared.types import (
    Accepted,
    DraftBatch,
    DraftTree,
    ForwardBatch,
    ForwardMode,
    LogitsOutput,
    LogprobsOutput,
    Req,
    SampleOutput,
    SamplingBatchInfo,
    ScheduleBatch,
    SpeculationStats,
)


class Speculator:
    """Stands beside the scheduler's plain decode step, and does what that does, several tokens at a time.

    At every node of a drafted tree the target's own token is sampled, with the parameters, penalties and
    noise that the request would have there. The walk from the root follows the drafts that equal it. So
    what comes out is, token by token, what decoding one at a time gives, at any temperature.

    Between steps a request owns no slot beyond its committed ones (to the end of a page). During a step it
    owns `num_slots` more: the drafter works in them, then the tree's nodes have their KV there, node n at
    position kv_committed_len + n of the row. What is not accepted is freed before the step ends.
    """

    def __init__(self, config: EngineConfig, context_len: int, parts: SchedulerParts) -> None:
        assert parts.drafter is not None
        assert parts.draft_tree is not None
        self.parts = parts
        self.context_len = context_len
        self.drafter = parts.drafter
        self.draft_tree = parts.draft_tree
        self.shape = draft_shape(config)
        self.adaptive_shape = AdaptiveShape(self.shape) if config.speculative_auto else None
        self.num_verifications = 0
        self.num_drafted_tokens = 0
        self.num_slots = num_speculative_slots(config, self.drafter)

    def num_reserved(self, running: Sequence[Req]) -> int:
        """Tokens that admitting others should leave free, so that those who run can go on speculating."""
        return self.num_slots * len(running)

    def can_prepare(self, reqs: Sequence[Req]) -> bool:
        """Whether there are slots for every request's tree, and a request that may still produce two tokens.
        If not, the step is a decode step: drafts cause no retraction."""
        if all(_num_tokens_left(req) <= 1 for req in reqs):
            return False
        tree_cache, allocator = self.parts.tree_cache, self.parts.allocator
        page_size = allocator.page_size
        num_tokens = page_size * sum(
            num_pages_of(req.kv_committed_len + self.num_slots, page_size)
            - num_pages_of(req.kv_committed_len, page_size)
            for req in reqs
        )
        # What cannot suffice must not cost the cached prefixes.
        if num_tokens > allocator.available_size() + tree_cache.evictable_size():
            return False
        return evict_for(num_tokens, tree_cache, allocator)

    def prepare(self, reqs: list[Req]) -> ScheduleBatch:
        """Slots behind each request's committed ones."""
        pool = self.parts.req_to_token_pool
        starts = [req.kv_committed_len for req in reqs]
        rows = rows_of(reqs)
        last_locs = pool.read_each(rows, [start - 1 for start in starts])
        slots = self.parts.allocator.alloc_extend(starts, [n + self.num_slots for n in starts], last_locs)
        assert slots is not None, "no slots for drafts: the caller checks this"
        pool.write_ragged(rows, starts, [self.num_slots] * len(reqs), slots)
        for req in reqs:
            req.kv_allocated_len = req.kv_committed_len + self.num_slots
        return ScheduleBatch(list(reqs), ForwardMode.TARGET_VERIFY, len(reqs), out_cache_loc=slots)

    # --8<-- [start:speculative-step]
    def run(self, batch: ScheduleBatch) -> tuple[ForwardBatch, LogitsOutput, SampleOutput]:
        """What was kept: as an extension by the accepted nodes of each request, and a token sampled behind
        each of these."""
        draft_batch = self._draft_batch(batch)
        with self.parts.timeline.span("draft"):
            tree = self.drafter.draft(draft_batch, self.shape)
        positions = tree.positions(draft_batch.seq_lens)  # siblings share one, though their slots do not
        forward_batch = self._verify_batch(draft_batch, tree, positions)
        info = self._node_sampling_info(batch.reqs, tree)
        with self.parts.timeline.forward(forward_batch):
            logits_output = self.parts.model_runner.forward(forward_batch)
            logits = logits_output.next_token_logits[:, : self.parts.num_token_ids]
            sampled = self.parts.sampler.sample(logits, info, positions)
        target_ids = sampled.next_token_ids.view(tree.batch_size, tree.num_draft_tokens)
        accepted = self.draft_tree.accept(tree, target_ids)
        paths = _paths(accepted)
        self._count(batch.reqs, tree, paths)
        kept = self._keep(batch, forward_batch, paths, logits_output, sampled)
        if self.adaptive_shape is not None:
            self.shape = self.adaptive_shape.current  # from the next step on
        return kept

    # --8<-- [end:speculative-step]

    def extend(
        self,
        reqs: Sequence[Req],
        forward_batch: ForwardBatch,
        logits_output: LogitsOutput,
        sample_output: SampleOutput,
    ) -> None:
        """Call the drafter's `extend` for KV that stays, after a prefill or a decode step."""
        next_token_ids = sample_output.next_token_ids.clamp(min=0)  # a NaN's: its request ends anyway
        for i, req in enumerate(reqs):
            if req.num_pending_chunks:  # what was sampled is no token of this prompt
                next_token_ids[i] = req.all_ids[len(req.fill_ids)]
        self.drafter.extend(reqs, forward_batch, logits_output.hidden_states, next_token_ids)

    def stats(self, num_accepted_tokens: int) -> SpeculationStats:
        return SpeculationStats(self.num_verifications, self.num_drafted_tokens, num_accepted_tokens)

    # ---- the pieces of a step ----

    def _draft_batch(self, batch: ScheduleBatch) -> DraftBatch:
        assert batch.out_cache_loc is not None
        reqs = batch.reqs
        seq_lens = [req.kv_committed_len for req in reqs]
        return DraftBatch(
            reqs=list(reqs),
            root_ids=self._tensor([req.output_ids[-1] for req in reqs]),
            req_pool_indices=self._tensor([req.req_pool_idx for req in reqs]),
            seq_lens=self._tensor(seq_lens),
            seq_lens_cpu=tuple(seq_lens),
            slots=batch.out_cache_loc.to(self.parts.allocator.device).view(len(reqs), self.num_slots),
        )

    def _node_sampling_info(self, reqs: list[Req], tree: DraftTree) -> SamplingBatchInfo:
        num_token_ids, device = self.parts.num_token_ids, self.parts.allocator.device
        info = make_sampling_batch_info(reqs, num_token_ids, device)
        info = expand_to_nodes(info, tree, make_early_bans(reqs, num_token_ids, device))
        return with_grammars(info, reqs, tree, num_token_ids)

    def _verify_batch(self, batch: DraftBatch, tree: DraftTree, positions: torch.Tensor) -> ForwardBatch:
        bs, num_nodes = tree.token_ids.shape
        seq_lens_cpu = [seq_len + num_nodes for seq_len in batch.seq_lens_cpu]
        seq_lens = batch.seq_lens + num_nodes
        custom_mask = None  # a chain is causal as it is
        if self.shape.top_k > 1:
            custom_mask = self.draft_tree.custom_mask(tree, seq_lens, num_nodes * sum(seq_lens_cpu))
        return ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            input_ids=tree.token_ids.flatten(),
            # A node behind the context's end has no position of its own, and its token is never kept.
            positions=positions.clamp(max=self.context_len - 1),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=seq_lens,
            out_cache_loc=batch.slots[:, :num_nodes].flatten(),
            extend_seq_lens=torch.full_like(seq_lens, num_nodes),
            extend_start_loc=torch.arange(bs, device=seq_lens.device) * num_nodes,
            seq_lens_cpu=tuple(seq_lens_cpu),
            extend_seq_lens_cpu=(num_nodes,) * bs,
            custom_mask=custom_mask,
        )

    def _keep(
        self,
        batch: ScheduleBatch,
        forward_batch: ForwardBatch,
        paths: list[list[int]],
        logits_output: LogitsOutput,
        sampled: SampleOutput,
    ) -> tuple[ForwardBatch, LogitsOutput, SampleOutput]:
        """Commit the nodes of `paths`, free the others, and call the drafter's `extend`."""
        reqs, num_nodes = batch.reqs, self.shape.num_draft_tokens
        rows = self._tensor([i * num_nodes + node for i, path in enumerate(paths) for node in path])
        slots = torch.cat(self._keep_slots(reqs, paths))
        kept_lens = [len(path) for path in paths]
        kept = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            input_ids=forward_batch.input_ids[rows],
            positions=forward_batch.positions[rows],
            req_pool_indices=forward_batch.req_pool_indices,
            seq_lens=self._tensor([req.kv_committed_len for req in reqs]),
            out_cache_loc=slots,
            extend_seq_lens=self._tensor(kept_lens),
            extend_start_loc=self._tensor([0, *accumulate(kept_lens)][:-1]),
            seq_lens_cpu=tuple(req.kv_committed_len for req in reqs),
            extend_seq_lens_cpu=tuple(kept_lens),
        )
        token_ids = sampled.next_token_ids[rows]
        hidden_states = logits_output.hidden_states
        if hidden_states is not None:
            hidden_states = hidden_states[rows]
        last_token_ids = token_ids[kept.last_token_rows].clamp(min=0)
        self.drafter.extend(reqs, kept, hidden_states, last_token_ids)
        logprobs = sampled.logprobs
        if logprobs is not None:
            logprobs = LogprobsOutput(*(values[rows] for values in logprobs))
        return kept, logits_output, SampleOutput(token_ids, logprobs)

    def _keep_slots(self, reqs: list[Req], paths: list[list[int]]) -> list[torch.Tensor]:
        """The slots of each request's accepted nodes, in order, once all others are given back.

        With pages of one token, whatever slots the nodes have become the row's next ones. Slots of a larger
        page must stay in order: KV is moved to the first slots, and the pages behind them are freed."""
        pool, page_size = self.parts.req_to_token_pool, self.parts.allocator.page_size
        kept, unused, targets, sources = [], [], [], []
        # --8<-- [start:keep-accepted-slots]
        for req, path in zip(reqs, paths):
            assert req.req_pool_idx is not None
            start, end = req.kv_committed_len, req.kv_committed_len + len(path)
            slots = pool.read(req.req_pool_idx, start, req.kv_allocated_len).to(self.parts.allocator.device)
            nodes = self._tensor(path)
            if page_size == 1:
                kept.append(slots[nodes])
                is_unused = torch.ones_like(slots, dtype=torch.bool)
                is_unused[nodes] = False
                unused.append(slots[is_unused])
                pool.write(req.req_pool_idx, start, kept[-1])
            else:
                kept.append(slots[: len(path)])
                if path != list(range(len(path))):
                    targets.append(kept[-1])
                    sources.append(slots[nodes])
                unused.append(slots[round_up_to_page(end, page_size) - start :])
        if targets:
            assert self.parts.kv_pool is not None
            self.parts.kv_pool.move(torch.cat(targets), torch.cat(sources))
        self.parts.allocator.free(torch.cat(unused))
        # --8<-- [end:keep-accepted-slots]
        for req, path in zip(reqs, paths):
            req.kv_committed_len += len(path)
            req.kv_allocated_len = req.kv_committed_len
        return kept

    def _count(self, reqs: list[Req], tree: DraftTree, paths: list[list[int]]) -> None:
        for req, path, depth in zip(reqs, paths, tree.depths.amax(dim=1).tolist()):
            num_drafted = min(depth, _num_tokens_left(req) - 1)
            req.num_verifications += 1
            req.num_drafted_tokens += num_drafted
            self.num_verifications += 1
            self.num_drafted_tokens += num_drafted
            if self.adaptive_shape is not None:
                self.adaptive_shape.record(num_drafted, min(len(path) - 1, num_drafted))

    def _tensor(self, values: Sequence[int | None]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.parts.allocator.device)


def _paths(accepted: Accepted) -> list[list[int]]:
    """The accepted nodes of each request, the root first."""
    lens = (accepted.num_accepted + 1).tolist()
    return [nodes[:num] for nodes, num in zip(accepted.node_indices.tolist(), lens)]


def _num_tokens_left(req: Req) -> int:
    return req.max_new_tokens - len(req.output_ids)
