"""Speculation with chains: draft tokens, verify them in one forward pass, keep the accepted ones.

Differs from reference: a round is launched without reading results. The number and ids of the previous
round's tokens are looked up on the device when the round starts, and its own results stay there for the next
round. So every round keeps the same number of rows, the accepted ones first, then padding. Assumes upper
bounds of the lengths on the CPU. Loses the work of rows whose request has ended.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from diptych.optimized.overlap.future_runs import FutureRuns, count_runs
from diptych.optimized.overlap.in_flight import Pipeline
from diptych.optimized.speculative.node_sampler import NodeSampler
from diptych.optimized.speculative.round import KeptRows, Outcome, RoundInFlight
from diptych.optimized.speculative.round_batch import RoundBatches
from diptych.shared.interfaces import SchedulerParts
from diptych.shared.speculation.node_sampling import EarlyBans
from diptych.shared.types import (
    DraftBatch,
    DraftShape,
    DraftTree,
    ForwardBatch,
    ForwardMode,
    LogitsOutput,
    LogprobsOutput,
    Req,
    SampleOutput,
    SamplingBatchInfo,
)


class ChainRound:
    """Node n of a request has its KV in slot n behind the KV that the request has when the round starts."""

    def __init__(
        self, context_len: int, parts: SchedulerParts, pipeline: Pipeline, num_slots: int, longest_run: int
    ) -> None:
        assert parts.drafter is not None
        assert parts.draft_tree is not None
        self.parts = parts
        self.drafter = parts.drafter
        self.draft_tree = parts.draft_tree
        self.runs_ahead = self.drafter.runs_ahead and parts.model_runner.accepts_seq_len_upper_bounds
        device = parts.allocator.device
        self.pipeline = pipeline
        self.runs = FutureRuns(len(pipeline.future_map.token_ids), longest_run, device)
        self.batches = RoundBatches(context_len, num_slots, device)
        self.node_sampler = NodeSampler(parts, pipeline)

    # --8<-- [start:speculative-step]
    def run(self, batch: RoundInFlight, shape: DraftShape) -> Outcome:
        """Launch a round; its outcome is not known when this returns."""
        reqs, starts, info, bans = batch.batch.reqs, batch.starts, batch.info, batch.bans
        runs, run_lens = self.runs.look_up(starts.places)
        newest = self.pipeline.future_map.token_ids[starts.places]
        draft_batch = self.batches.draft_batch(reqs, starts, run_lens, newest)
        tree = self._draft(draft_batch, shape)
        depths = tree.depths.amax(dim=1)  # the next call of the drafter overwrites the tree
        forward_batch = self._verify_batch(draft_batch, tree)
        count_runs(info, runs)
        if bans is not None:
            bans = bans._replace(num_left=bans.num_left - run_lens)
        logits_output, sampled = self._forward_and_sample(forward_batch, reqs, info, tree, bans)
        target_ids = sampled.next_token_ids.view(-1, tree.num_draft_tokens)
        accepted = self.draft_tree.accept(tree, target_ids, batch.max_kept - 1)
        # --8<-- [end:speculative-step]
        num_kept = accepted.num_accepted + 1
        is_behind = accepted.node_indices < 0
        nodes = accepted.node_indices.clamp(min=0)  # behind the path: the root again
        self._keep_slots(draft_batch, tree, nodes, is_behind)
        self.runs.store(batch.first_place, accepted.token_ids, num_kept)
        newest = accepted.token_ids.gather(1, accepted.num_accepted[:, None]).flatten()
        self.pipeline.future_map.store(batch.first_place, newest)

        rows = self.batches.rows_of(tree, nodes)
        token_ids = tree.token_ids.gather(1, nodes).masked_fill(is_behind, 0)
        kept_batch = replace(self.batches.kept_batch(draft_batch, token_ids), num_kept=num_kept)
        states = logits_output.hidden_states
        kept = KeptRows(kept_batch, None if states is None else states[rows], newest.clamp(min=0))
        if self.runs_ahead:
            self.drafter.extend(reqs, *kept)
        else:
            batch.kept = kept
        numbers = torch.cat([accepted.token_ids, num_kept[:, None], depths[:, None]], dim=1)
        found = sampled.logprobs
        return Outcome(numbers, found and LogprobsOutput(*(values[rows] for values in found)))

    def _draft(self, batch: DraftBatch, shape: DraftShape) -> DraftTree:
        with self.parts.timeline.span("draft"):
            return self.drafter.draft(batch, shape)

    def _forward_and_sample(
        self,
        batch: ForwardBatch,
        reqs: list[Req],
        info: SamplingBatchInfo,
        tree: DraftTree,
        bans: EarlyBans | None,
    ) -> tuple[LogitsOutput, SampleOutput]:
        with self.parts.timeline.forward(batch):
            return self.node_sampler.run(reqs, batch, info, tree, bans)

    def _verify_batch(self, batch: DraftBatch, tree: DraftTree) -> ForwardBatch:
        """A batch with all nodes as an extension of their request. Causal attention is correct for a
        chain."""
        positions = tree.positions(batch.seq_lens)  # siblings share one, though their slots do not
        return self.batches.regular(batch, tree.token_ids, positions, ForwardMode.TARGET_VERIFY)

    def _keep_slots(
        self, batch: DraftBatch, tree: DraftTree, nodes: torch.Tensor, is_behind: torch.Tensor
    ) -> None:
        """The slots of accepted nodes. These are the first nodes of a chain, so their KV stays; later slots
        are overwritten."""
