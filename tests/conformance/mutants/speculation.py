"""Planted bugs around draft trees: slots, compaction, ends inside accepted runs, rows, drafter calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

import diptych.shared.scheduling.lifecycle
from diptych.reference.scheduler import Scheduler
from diptych.reference.speculative.speculative_decoding import SpeculativeDecoding
from diptych.reference.speculative.tree import TreeRound
from diptych.shared.scheduling.lifecycle import Lifecycle
from diptych.shared.types import BatchResult, FinishReason, Req, ScheduleBatch, TokenLogprob
from tests.conformance.mutants.mutant import mutant_of, plant
from tests.conformance.mutants.scheduling import lifecycle_of_scheduler
from tests.planted import Bug


def speculating(impl: type[SpeculativeDecoding] | type[TreeRound]) -> Bug:
    """The scheduler with this decode strategy, or with the correct one and this round."""

    class Speculating(Scheduler):
        def __init__(self, config, model_config, parts):
            super().__init__(config, model_config, parts)
            if parts.drafter is None:
                return
            if issubclass(impl, SpeculativeDecoding):
                self.requests.features.remove(self.decoding)
                self.decoding = impl(config, self.requests.context_len, parts)
                self.requests.features.append(self.decoding)
            else:
                self.decoding.round = impl(self.requests.context_len, parts)

    return plant("scheduler", Speculating, impl)


@speculating
class KeepsRejectedSlots(TreeRound):
    """Rejected slots are not freed."""

    def _keep_slots(self, reqs: list[Req], paths: list[list[int]]) -> list[torch.Tensor]:
        free, self.parts.allocator.free = self.parts.allocator.free, lambda slots: None
        try:
            return super()._keep_slots(reqs, paths)
        finally:
            self.parts.allocator.free = free


@speculating
class FreesTheLastPage(TreeRound):
    """The page that holds the last accepted token is freed with the rejected ones."""

    def _keep_slots(self, reqs: list[Req], paths: list[list[int]]) -> list[torch.Tensor]:
        kept = super()._keep_slots(reqs, paths)
        if self.parts.allocator.page_size > 1:
            self.parts.allocator.free(kept[0][-1:])
        return kept


@speculating
class MovesOneByOne(TreeRound):
    """Accepted KV is moved token by token, the last first: a source may be a target already."""

    def __init__(self, context_len, parts):
        super().__init__(context_len, parts)
        self.pool = parts.kv_pool
        self.parts = replace(parts, kv_pool=self)

    def move(self, targets: torch.Tensor, sources: torch.Tensor) -> None:
        for i in reversed(range(len(targets))):
            self.pool.move(targets[i : i + 1], sources[i : i + 1])


@speculating
class TellsTheChunksSample(SpeculativeDecoding):
    """After an incomplete prompt the drafter gets the token that was sampled there."""

    def _extend(self, reqs: Sequence[Req], result: BatchResult, chunked_req: Req | None) -> None:
        super()._extend(reqs, result, None)


@speculating
class EvictsInVain(SpeculativeDecoding):
    """The prefix cache is emptied for drafts that do not fit even then."""

    def can_speculate(self, reqs: Sequence[Req]) -> bool:
        can = super().can_speculate(reqs)
        if not can:
            self.parts.tree_cache.evict(self.num_slots * len(reqs))
        return can


@speculating
class SamplesWithTheRootsCounts(TreeRound):
    """Penalties at a node do not know the drafts on the way to it."""

    def _node_sampling_info(self, reqs, tree):
        info = super()._node_sampling_info(reqs, tree)
        if info.output_counts is None:
            return info
        num = tree.num_draft_tokens
        return replace(info, output_counts=info.output_counts[::num].repeat_interleave(num, dim=0))


@speculating
class NoRowIsLongEnough(SpeculativeDecoding):
    """Slots are written into the row as if it were as long as the context and no longer."""

    def _prepare_round(self, reqs: list[Req]) -> ScheduleBatch:
        for req in reqs:
            assert req.kv_committed_len + self.num_slots <= self.round.context_len
        return super()._prepare_round(reqs)


of_scheduler = mutant_of("scheduler")


@lifecycle_of_scheduler
class KeepsTokensBehindTheEnd(Lifecycle):
    """What was accepted behind a stop token is output too."""

    def append_tokens(self, req: Req, token_ids: list[int], logprobs: list[TokenLogprob]) -> None:
        check = diptych.shared.scheduling.lifecycle.check_finished

        def keeps_all(req, *args):
            check(req, *args)
            if req.finished_len is not None:
                req.finished_len = len(req.output_ids)

        diptych.shared.scheduling.lifecycle.check_finished = keeps_all
        try:
            super().append_tokens(req, token_ids, logprobs)
        finally:
            diptych.shared.scheduling.lifecycle.check_finished = check


@lifecycle_of_scheduler
class KeepsLogprobsBehindTheEnd(Lifecycle):
    """A log-probability of a dropped token stays."""

    def finish(self, req: Req, reason: FinishReason) -> None:
        req.output_logprobs += req.output_logprobs[-1:]
        super().finish(req, reason)


@of_scheduler
class RetractsForDrafts(Scheduler):
    """Without room for drafts a request is retracted."""

    def get_batch_decode(self):
        running = self.requests.running
        if self.parts.drafter is not None:
            while len(running) > 1 and not self.decoding.can_speculate(running):
                self.requests.retract(running[-1])
        return super().get_batch_decode()
