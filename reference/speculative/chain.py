"""Speculation with chains: draft tokens, verify them in one forward pass, keep the accepted ones."""

from __future__ import annotations

import torch

from diptych.shared.interfaces import SchedulerParts
from diptych.shared.sampling.logprobs import to_token_logprobs
from diptych.shared.sampling.sampling_batch import make_sampling_batch_info
from diptych.shared.scheduling.pages import round_up_to_page
from diptych.shared.speculation.kept_tokens import kept_tokens
from diptych.shared.speculation.node_sampling import expand_to_nodes, make_early_bans, with_texts
from diptych.shared.types import (
    BatchResult,
    DraftBatch,
    DraftShape,
    DraftTree,
    ForwardBatch,
    ForwardMode,
    LogitsOutput,
    Req,
    SampleOutput,
    SamplingBatchInfo,
)


class ChainRound:
    """A round of speculation with chains: one step of all running requests.

    A request's chain is its newest token, node 0, and the drafts behind it. The target samples a token behind
    every node, with the parameters and the noise of that position. A draft is accepted if it equals the token
    sampled behind its predecessor, and all drafts before it are accepted. So the output is, token by token,
    that of plain decoding, at any temperature.

    Node n has its KV at position kv_committed_len + n, in slots that the request owns for the round.
    """

    def __init__(self, context_len: int, parts: SchedulerParts) -> None:
        assert parts.drafter is not None
        assert parts.draft_tree is not None
        self.context_len = context_len
        self.parts = parts
        self.drafter = parts.drafter
        self.draft_tree = parts.draft_tree

    # --8<-- [start:speculative-step]
    def run(self, batch: DraftBatch, shape: DraftShape) -> tuple[BatchResult, list[int]]:
        """Run a round: each request's accepted tokens and one more, and the depth of
        its drafts. Commits the KV of accepted tokens and frees the other slots."""
        tree = self._draft(batch, shape)
        depths = tree.depths.amax(dim=1).tolist()  # the next call of the drafter overwrites the tree
        forward_batch = self._verify_batch(batch, tree)
        info = self._node_sampling_info(batch.reqs, tree)
        logits_output, sampled = self._forward_and_sample(forward_batch, info)
        num_nodes = tree.num_draft_tokens
        paths = self._accept(tree, sampled.next_token_ids.view(-1, num_nodes))
        slots = self._keep_slots(batch.reqs, paths)
        # --8<-- [end:speculative-step]

        rows = [i * num_nodes + node for i, path in enumerate(paths) for node in path]
        lens, seq_lens = [len(path) for path in paths], [req.kv_committed_len for req in batch.reqs]
        kept, tokens = kept_tokens(forward_batch, rows, lens, seq_lens, out_cache_loc=torch.cat(slots))
        newest = sampled.next_token_ids[tokens][kept.last_token_rows].clamp(min=0)  # -1: a NaN
        states = logits_output.hidden_states
        self.drafter.extend(batch.reqs, kept, None if states is None else states[tokens], newest)

        ids = sampled.next_token_ids.tolist()
        logprobs = to_token_logprobs(ids, sampled.logprobs)
        starts = range(0, len(ids), num_nodes)
        token_ids = [[ids[start + node] for node in path] for start, path in zip(starts, paths)]
        found = [[logprobs[start + node] for node in path if logprobs] for start, path in zip(starts, paths)]
        return BatchResult(token_ids, found, forward_batch, logits_output), depths

    def _draft(self, batch: DraftBatch, shape: DraftShape) -> DraftTree:
        with self.parts.timeline.span("draft"):
            return self.drafter.draft(batch, shape)

    def _forward_and_sample(
        self, batch: ForwardBatch, info: SamplingBatchInfo
    ) -> tuple[LogitsOutput, SampleOutput]:
        parts = self.parts
        with parts.timeline.forward(batch):
            return parts.model_runner.forward_and_sample(batch, parts.sampler, info, parts.num_token_ids)

    def _verify_batch(self, batch: DraftBatch, tree: DraftTree) -> ForwardBatch:
        """A batch with all nodes as an extension of their request. Causal attention is correct for a
        chain."""
        bs, num_nodes = tree.token_ids.shape
        positions = tree.positions(batch.seq_lens)
        return ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            input_ids=tree.token_ids.flatten(),
            # A node behind the context's end has no position of its own, and its token is never kept.
            positions=positions.clamp(max=self.context_len - 1),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens + num_nodes,
            out_cache_loc=batch.slots[:, :num_nodes].flatten(),
            extend_seq_lens=torch.full_like(batch.seq_lens, num_nodes),
            extend_start_loc=torch.arange(bs, device=batch.seq_lens.device) * num_nodes,
            seq_lens_cpu=tuple(seq_len + num_nodes for seq_len in batch.seq_lens_cpu),
            extend_seq_lens_cpu=(num_nodes,) * bs,
        )

    def _node_sampling_info(self, reqs: list[Req], tree: DraftTree) -> SamplingBatchInfo:
        num_token_ids, device = self.parts.num_token_ids, self.parts.allocator.device
        info = make_sampling_batch_info(reqs, num_token_ids, device, reads_texts=False)
        info = expand_to_nodes(info, tree, make_early_bans(reqs, num_token_ids, device))
        return with_texts(info, reqs, tree, num_token_ids)

    def _accept(self, tree: DraftTree, target_ids: torch.Tensor) -> list[list[int]]:
        """The accepted nodes of each request, node 0 first. target_ids [bs, N]: sampled behind each node."""
        agrees = tree.token_ids[:, 1:] == target_ids[:, :-1]
        nodes = torch.arange(1, tree.num_draft_tokens, device=agrees.device)
        agrees &= nodes < tree.num_nodes[:, None]  # padding is never accepted
        num_accepted = agrees.long().cumprod(dim=1).sum(dim=1)
        return [list(range(1 + num)) for num in num_accepted.tolist()]

    def _keep_slots(self, reqs: list[Req], paths: list[list[int]]) -> list[torch.Tensor]:
        """Commit the KV of accepted nodes, free the slots behind it, and return each request's kept slots."""
        pool, allocator = self.parts.req_to_token_pool, self.parts.allocator
        kept = []
        for req, path in zip(reqs, paths):
            assert req.req_pool_idx is not None
            start, end = req.kv_committed_len, req.kv_committed_len + len(path)
            slots = pool.read(req.req_pool_idx, start, req.kv_allocated_len).to(allocator.device)
            kept.append(slots[: len(path)])
            allocator.free(slots[round_up_to_page(end, allocator.page_size) - start :])
            req.kv_committed_len = req.kv_allocated_len = end
        return kept
