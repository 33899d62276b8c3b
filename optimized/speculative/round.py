"""A round of speculation on the device: where it begins, what it computes, what is kept of it.

Everything is launched and nothing is read: how many tokens the round before gave, and which, is looked up
when the round starts, and what this one gives stays on the device for the next.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from optimized.overlap.future_runs import FutureRuns, count_runs
from optimized.overlap.pipeline import InFlight, Pipeline
from shared.interfaces import SchedulerParts
from shared.speculation.node_sampling import EarlyBans, expand_to_nodes, with_grammars
from shared.types import (
    Accepted,
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


class Starts(NamedTuple):
    """Where a round begins, as far as the CPU knows at its launch."""

    rows: torch.Tensor  # [bs] int64, of req_to_token
    kv_lens: torch.Tensor  # [bs] int64, without what a round in flight will add
    last_starts: torch.Tensor  # [bs] int64: who would start behind this has ended
    places: torch.Tensor  # [bs] int64, of what is in flight; 0: nothing
    is_round: torch.Tensor  # [bs] int64, 1: a round is in flight, and adds KV
    root_ids: torch.Tensor  # [bs] int64, where nothing is in flight
    slots: torch.Tensor  # [bs, n] int64, of the positions from kv_lens on
    bounds: tuple[int, ...]  # at most so much KV


class KeptRows(NamedTuple):
    """Arguments of the drafter's `extend` for a round."""

    forward_batch: ForwardBatch
    hidden_states: torch.Tensor | None
    next_token_ids: torch.Tensor


@dataclass
class RoundInFlight(InFlight):
    shape: DraftShape
    kept: KeptRows | None = field(default=None, init=False)  # for a drafter that is called once it is known

    @property
    def max_kept(self) -> int:
        return max_kept(self.shape)


class Outcome(NamedTuple):
    """Results that are copied to the CPU."""

    numbers: torch.Tensor  # [bs, max_kept + 2] int64: tokens, how many of them count, depth of the tree
    logprobs: LogprobsOutput | None  # of max_kept tokens for each request


def max_kept(shape: DraftShape) -> int:
    """Tokens that a round gives at most."""
    return min(shape.num_steps + 1, shape.num_draft_tokens)


class Rounds:
    """Their pieces, in the order in which they are launched."""

    def __init__(
        self, context_len: int, parts: SchedulerParts, pipeline: Pipeline, num_slots: int, longest_run: int
    ) -> None:
        assert parts.drafter is not None
        assert parts.draft_tree is not None
        self.context_len = context_len
        self.parts = parts
        self.drafter = parts.drafter
        self.draft_tree = parts.draft_tree
        self.pipeline = pipeline
        self.num_slots = num_slots
        self.device = parts.allocator.device
        self.runs_ahead = self.drafter.runs_ahead and parts.model_runner.accepts_seq_len_upper_bounds
        self.runs = FutureRuns(len(pipeline.future_map.token_ids), longest_run, self.device)
        self.numbers = torch.arange(num_slots, device=self.device)
        self._lens: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}  # see `_lens_of`
        self._last_info: tuple[SamplingBatchInfo, int, SamplingBatchInfo] | None = None  # of nodes, the last

    # --8<-- [start:speculative-round]
    def run(
        self, launched: RoundInFlight, starts: Starts, info: SamplingBatchInfo, bans: EarlyBans | None
    ) -> Outcome:
        """Launches everything, reads nothing."""
        reqs, shape = launched.batch.reqs, launched.shape
        runs, run_lens = self.runs.look_up(starts.places)
        draft_batch = self._draft_batch(reqs, starts, run_lens)
        with self.parts.timeline.span("draft"):
            tree = self.drafter.draft(draft_batch, shape)
        positions = tree.positions(draft_batch.seq_lens)  # siblings share one, though their slots do not
        forward_batch = self._verify_batch(draft_batch, tree, positions, shape)
        count_runs(info, runs)
        if bans is not None:
            bans = bans._replace(num_left=bans.num_left - run_lens)
        info = self._node_sampling_info(reqs, info, tree, bans)
        with self.parts.timeline.forward(forward_batch):
            logits_output, sampled = self.parts.model_runner.forward_and_sample(
                forward_batch, self.parts.sampler, info, self.parts.num_token_ids
            )
        target_ids = sampled.next_token_ids.view(tree.batch_size, tree.num_draft_tokens)
        accepted = self.draft_tree.accept(tree, target_ids, launched.max_kept - 1)
        return self._keep(launched, draft_batch, tree, accepted, logits_output, sampled)

    # --8<-- [end:speculative-round]

    # --8<-- [start:where-a-round-begins]
    def _draft_batch(self, reqs: list[Req], starts: Starts, run_lens: torch.Tensor) -> DraftBatch:
        """A request that has ended by its length would begin too far: behind its last position there are
        slots to write to, and its results are not read."""
        num_new = torch.minimum(starts.is_round * run_lens, starts.last_starts - starts.kv_lens)
        newest = self.pipeline.future_map.token_ids[starts.places]
        columns = num_new[:, None] + self.numbers
        return DraftBatch(
            reqs=reqs,
            root_ids=torch.where(starts.places > 0, newest, starts.root_ids),
            req_pool_indices=starts.rows,
            seq_lens=starts.kv_lens + num_new,
            seq_lens_cpu=starts.bounds,
            slots=starts.slots.gather(1, columns),
        )

    # --8<-- [end:where-a-round-begins]

    def _node_sampling_info(
        self, reqs: list[Req], info: SamplingBatchInfo, tree: DraftTree, bans: EarlyBans | None
    ) -> SamplingBatchInfo:
        """Those of the round before where that was given the same and nothing depends on the text."""
        num_nodes = tree.num_draft_tokens
        if self._last_info is not None and self._last_info[0] is info and self._last_info[1] == num_nodes:
            return self._last_info[2]
        nodes = with_grammars(expand_to_nodes(info, tree, bans), reqs, tree, self.parts.num_token_ids)
        depends = bans is not None or info.output_counts is not None or info.vocab_mask is not None
        self._last_info = None if depends else (info, num_nodes, nodes)
        return nodes

    def _verify_batch(
        self, batch: DraftBatch, tree: DraftTree, positions: torch.Tensor, shape: DraftShape
    ) -> ForwardBatch:
        num_nodes = tree.num_draft_tokens
        forward_batch = self._regular_batch(batch, tree.token_ids, positions, ForwardMode.TARGET_VERIFY)
        if shape.top_k == 1:
            return forward_batch  # a chain is causal as it is
        if self.parts.model_runner.accepts_seq_len_upper_bounds:
            return replace(forward_batch, tree_mask=tree.visible)
        num_entries = num_nodes * sum(forward_batch.seq_lens_cpu)
        return replace(
            forward_batch, custom_mask=self.draft_tree.custom_mask(tree, forward_batch.seq_lens, num_entries)
        )

    def _regular_batch(
        self, batch: DraftBatch, token_ids: torch.Tensor, positions: torch.Tensor, mode: ForwardMode
    ) -> ForwardBatch:
        """As many tokens of each request, in its next slots. token_ids [bs, n]."""
        bs, n = token_ids.shape
        extend_seq_lens, extend_start_loc = self._lens_of(bs, n)
        return ForwardBatch(
            forward_mode=mode,
            input_ids=token_ids.flatten(),
            # What is behind the context's end has no position of its own, and is never kept.
            positions=positions.clamp(max=self.context_len - 1),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens + n,
            out_cache_loc=batch.slots[:, :n].flatten(),
            extend_seq_lens=extend_seq_lens,
            extend_start_loc=extend_start_loc,
            seq_lens_cpu=tuple(seq_len + n for seq_len in batch.seq_lens_cpu),
            extend_seq_lens_cpu=(n,) * bs,
        )

    def _lens_of(self, bs: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a batch with n tokens of each request: how many, and where they begin. Read-only."""
        if (bs, n) not in self._lens:
            num_each = torch.full((bs,), n, dtype=torch.int64, device=self.device)
            self._lens[bs, n] = num_each, torch.arange(bs, device=self.device) * n
        return self._lens[bs, n]

    def _keep(
        self,
        launched: RoundInFlight,
        batch: DraftBatch,
        tree: DraftTree,
        accepted: Accepted,
        logits_output: LogitsOutput,
        sampled: SampleOutput,
    ) -> Outcome:
        """Accepted KV becomes the row's next; the next round and the drafter get it."""
        width, num_nodes = launched.max_kept, tree.num_draft_tokens
        depths = tree.depths.amax(dim=1)  # now: the tree is valid until the drafter is called again
        num_kept = accepted.num_accepted + 1
        nodes = accepted.node_indices.clamp(min=0)  # behind the path: the root once more
        is_behind = accepted.node_indices < 0
        if launched.shape.top_k > 1:
            self._keep_slots(batch.slots[:, :num_nodes], nodes[:, 1:], is_behind[:, 1:])
        self.runs.store(launched.first_place, accepted.token_ids, num_kept)
        newest = accepted.token_ids.gather(1, accepted.num_accepted[:, None]).flatten()
        self.pipeline.future_map.store(launched.first_place, newest)

        _, first = self._lens_of(tree.batch_size, num_nodes)
        rows = (first[:, None] + nodes).flatten()
        token_ids = tree.token_ids.gather(1, nodes).masked_fill(is_behind, 0)
        positions = batch.seq_lens[:, None] + self.numbers[:width]
        kept_batch = self._regular_batch(batch, token_ids, positions.flatten(), ForwardMode.EXTEND)
        hidden_states = logits_output.hidden_states
        kept = KeptRows(
            replace(kept_batch, num_kept=num_kept),
            None if hidden_states is None else hidden_states[rows],
            newest.clamp(min=0),
        )
        if self.runs_ahead:
            self.drafter.extend(batch.reqs, *kept)
        else:
            launched.kept = kept
        numbers = torch.cat([accepted.token_ids, num_kept[:, None], depths[:, None]], dim=1)
        logprobs = sampled.logprobs
        if logprobs is not None:
            logprobs = LogprobsOutput(*(values[rows] for values in logprobs))
        return Outcome(numbers, logprobs)

    # --8<-- [start:move-accepted-kv]
    def _keep_slots(self, slots: torch.Tensor, nodes: torch.Tensor, is_behind: torch.Tensor) -> None:
        """KV of accepted drafts [bs, max_kept - 1] goes to the first slots, as if there were always as many:
        behind a path each slot is moved to itself. (The root is in the first slot already.)"""
        assert self.parts.kv_pool is not None
        targets = slots[:, 1 : nodes.shape[1] + 1]
        sources = slots.gather(1, nodes)
        sources = torch.where(is_behind, targets, sources)
        self.parts.kv_pool.move(targets.flatten(), sources.flatten())

    # --8<-- [end:move-accepted-kv]
