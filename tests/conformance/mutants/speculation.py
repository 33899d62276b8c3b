"""Planted bugs around draft trees: slots, compaction, ends inside accepted runs, rows, drafter calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

import shared.scheduling.stop_conditions
from reference.scheduler import Scheduler
from reference.speculative.speculator import Speculator
from shared.types import ForwardBatch, LogitsOutput, Req, SampleOutput, ScheduleBatch, TokenLogprob
from tests.conformance.mutants.mutant import Mutant

SHAPES, LIMITS = ("scheduler.speculation",), ("scheduler.speculation_limits",)


def speculating(impl: type[Speculator]) -> Mutant:
    """The scheduler with this beside it."""

    class Speculating(Scheduler):
        def __init__(self, config, model_config, parts):
            super().__init__(config, model_config, parts)
            if self.speculator is not None:
                self.speculator = impl(config, self.context_len, parts)

    assert impl.__doc__, f"{impl.__name__}: say what goes wrong"
    return Mutant("scheduler", impl.__name__, Speculating, SHAPES)


def limited(impl: type[Speculator]) -> Mutant:
    return replace(speculating(impl), first=LIMITS)


@speculating
class KeepsRejectedSlots(Speculator):
    """Rejected slots are not freed."""

    def _keep_slots(self, reqs: list[Req], paths: list[list[int]]) -> list[torch.Tensor]:
        free, self.parts.allocator.free = self.parts.allocator.free, lambda slots: None
        try:
            return super()._keep_slots(reqs, paths)
        finally:
            self.parts.allocator.free = free


@speculating
class FreesTheLastPage(Speculator):
    """The page that holds the last accepted token is freed with the rejected ones."""

    def _keep_slots(self, reqs: list[Req], paths: list[list[int]]) -> list[torch.Tensor]:
        kept = super()._keep_slots(reqs, paths)
        if self.parts.allocator.page_size > 1:
            self.parts.allocator.free(kept[0][-1:])
        return kept


@speculating
class MovesNothing(Speculator):
    """With larger pages, accepted KV stays where it was drafted."""

    def _keep_slots(self, reqs: list[Req], paths: list[list[int]]) -> list[torch.Tensor]:
        return super()._keep_slots(reqs, [list(range(len(path))) for path in paths])


@speculating
class MovesOneByOne(Speculator):
    """Accepted KV is moved token by token, the last first: a source may be a target already."""

    def __init__(self, config, context_len, parts):
        super().__init__(config, context_len, parts)
        self.pool = parts.kv_pool
        self.parts = replace(parts, kv_pool=self)

    def move(self, targets: torch.Tensor, sources: torch.Tensor) -> None:
        for i in reversed(range(len(targets))):
            self.pool.move(targets[i : i + 1], sources[i : i + 1])


@speculating
class RemapsTooLate(Speculator):
    """With pages of one token the row keeps the slots in the order of the nodes."""

    def _keep_slots(self, reqs: list[Req], paths: list[list[int]]) -> list[torch.Tensor]:
        rows = self.parts.req_to_token_pool.req_to_token.clone()
        kept = super()._keep_slots(reqs, paths)
        self.parts.req_to_token_pool.req_to_token.copy_(rows)
        return kept


@speculating
class CommitsTheWholeTree(Speculator):
    """As much KV is committed as there are nodes, whatever was accepted."""

    def _keep_slots(self, reqs: list[Req], paths: list[list[int]]) -> list[torch.Tensor]:
        kept = super()._keep_slots(reqs, paths)
        for req in reqs:
            req.kv_committed_len += 1
        return kept


@speculating
class TellsTheChunksSample(Speculator):
    """After an incomplete prompt the drafter gets the token that was sampled there."""

    def extend(
        self,
        reqs: Sequence[Req],
        forward_batch: ForwardBatch,
        logits_output: LogitsOutput,
        sample_output: SampleOutput,
    ) -> None:
        self.drafter.extend(
            reqs, forward_batch, logits_output.hidden_states, sample_output.next_token_ids.clamp(min=0)
        )


@speculating
class TellsAllHiddenStates(Speculator):
    """The drafter gets the hidden states of the first nodes, not of the accepted ones."""

    def __init__(self, config, context_len, parts):
        super().__init__(config, context_len, parts)
        self.hidden_states = None

    def _keep(self, batch, forward_batch, paths, logits_output, sampled):
        hidden_states = logits_output.hidden_states
        num_nodes = self.shape.num_draft_tokens
        shifted = hidden_states.clone()
        for i, path in enumerate(paths):
            for j, node in enumerate(path):
                shifted[i * num_nodes + node] = hidden_states[i * num_nodes + j]
        return super()._keep(
            batch, forward_batch, paths, logits_output._replace(hidden_states=shifted), sampled
        )


@speculating
class PositionsOfSlots(Speculator):
    """A node's position is its slot's, not its depth's."""

    def _verify_batch(self, batch, tree, positions):
        starts = positions.view(tree.batch_size, -1)[:, :1]
        positions = (starts + torch.arange(tree.num_draft_tokens)).flatten()
        return super()._verify_batch(batch, tree, positions)


@limited
class PositionsBehindTheEnd(Speculator):
    """Nodes behind the end of the context get positions that the model does not have."""

    def __init__(self, config, context_len, parts):
        super().__init__(config, context_len + 1000, parts)


@limited
class EvictsInVain(Speculator):
    """The prefix cache is emptied for drafts that do not fit even then."""

    def can_prepare(self, reqs: Sequence[Req]) -> bool:
        can = super().can_prepare(reqs)
        if not can:
            self.parts.tree_cache.evict(self.num_slots * len(reqs))
        return can


@speculating
class SamplesWithTheRootsCounts(Speculator):
    """Penalties at a node do not know the drafts on the way to it."""

    def _node_sampling_info(self, reqs, tree):
        info = super()._node_sampling_info(reqs, tree)
        if info.output_counts is None:
            return info
        num = tree.num_draft_tokens
        return replace(info, output_counts=info.output_counts[::num].repeat_interleave(num, dim=0))


@limited
class NoRowIsLongEnough(Speculator):
    """Slots are written into the row as if it were as long as the context and no longer."""

    def prepare(self, reqs: list[Req]) -> ScheduleBatch:
        for req in reqs:
            assert req.kv_committed_len + self.num_slots <= self.context_len
        return super().prepare(reqs)


def of_scheduler(impl: type[Scheduler]) -> Mutant:
    assert impl.__doc__, f"{impl.__name__}: say what goes wrong"
    return Mutant("scheduler", impl.__name__, impl, LIMITS)


@of_scheduler
class KeepsTokensBehindTheEnd(Scheduler):
    """What was accepted behind a stop token is output too."""

    def _append_tokens(self, req: Req, token_ids: list[int], logprobs: list[TokenLogprob]) -> None:
        check = shared.scheduling.stop_conditions.check_finished

        def keeps_all(req, *args):
            check(req, *args)
            if req.finished_len is not None:
                req.finished_len = len(req.output_ids)

        shared.scheduling.stop_conditions.check_finished = keeps_all
        try:
            super()._append_tokens(req, token_ids, logprobs)
        finally:
            shared.scheduling.stop_conditions.check_finished = check


@of_scheduler
class KeepsLogprobsBehindTheEnd(Scheduler):
    """Log-probabilities of dropped tokens stay."""

    def _append_tokens(self, req: Req, token_ids: list[int], logprobs: list[TokenLogprob]) -> None:
        finish = self._finish

        def finish_with_all(req, reason, num_new_tokens=0):
            if req.sampling_params.return_logprob:
                req.output_logprobs += logprobs[num_new_tokens:]
            finish(req, reason, num_new_tokens)

        self._finish = finish_with_all
        try:
            super()._append_tokens(req, token_ids, logprobs)
        finally:
            self._finish = finish


@of_scheduler
class RetractsForDrafts(Scheduler):
    """Without room for drafts a request is retracted."""

    def _get_batch_decode(self):
        if self.speculator is not None and len(self.running) > 1:
            while len(self.running) > 1 and not self.speculator.can_prepare(self.running):
                self._retract(self.running[-1])
        return super()._get_batch_decode()


@of_scheduler
class NeverForgets(Scheduler):
    """The drafter is not called at a request's end."""

    def __init__(self, config, model_config, parts):
        super().__init__(config, model_config, parts)
        if parts.drafter is not None:
            parts.drafter.forget = lambda req: None
