"""Plain decoding: one token for each running request in a step. (With drafts several:
reference/speculative/speculative_decoding.py.)"""

from __future__ import annotations

from collections.abc import Sequence

from diptych.reference.schedule_batch import make_forward_batch
from diptych.shared.interfaces import SchedulerParts
from diptych.shared.sampling.logprobs import keep_embeddings, last_hidden_states, to_token_logprobs
from diptych.shared.sampling.sampling_batch import make_sampling_batch_info
from diptych.shared.scheduling.pages import prepare_for_decode
from diptych.shared.types import BatchResult, Req, ScheduleBatch, SpeculationStats, TokenLogprob


class PlainDecoding:
    def __init__(self, parts: SchedulerParts) -> None:
        self.parts = parts

    def num_reserved(self, reqs: Sequence[Req]) -> int:
        return 0  # the prefill adder reserves one more token for each

    def prepare(self, reqs: list[Req]) -> ScheduleBatch | None:
        parts = self.parts
        return prepare_for_decode(reqs, parts.req_to_token_pool, parts.allocator, parts.tree_cache)

    # --8<-- [start:run-batch]
    def run(self, batch: ScheduleBatch, chunked_req: Req | None) -> BatchResult:
        """Run a batch. chunked_req: the request whose prompt continues in the next
        step."""
        parts, device = self.parts, self.parts.allocator.device
        with parts.timeline.span("prepare"):
            forward_batch = make_forward_batch(batch, parts.num_token_ids, device)
            info = make_sampling_batch_info(batch.reqs, parts.num_token_ids, device)
        is_pooling = any(req.is_pooling for req in batch.reqs)
        if parts.drafter is None:  # otherwise hidden states are for the drafter
            parts.model_runner.capture_hidden = () if is_pooling else None
        with parts.timeline.forward(forward_batch):
            logits_output, sample_output = parts.model_runner.forward_and_sample(
                forward_batch, parts.sampler, info, parts.num_token_ids
            )
        with parts.timeline.span("wait for tokens"):
            token_ids = sample_output.next_token_ids.tolist()
        if is_pooling:
            states = last_hidden_states(forward_batch, logits_output)
            keep_embeddings(batch.reqs, chunked_req, states, parts.reward_head)
        logprobs: list[list[TokenLogprob]] = [[] for _ in token_ids]
        if sample_output.logprobs is not None:
            all_logprobs = to_token_logprobs(token_ids, sample_output.logprobs)
            logprobs = [[logprob] for logprob in all_logprobs]
        accepted = [[token_id] for token_id in token_ids]
        return BatchResult(accepted, logprobs, forward_batch, logits_output)
        # --8<-- [end:run-batch]

    def drop(self, req: Req) -> None:
        pass  # nothing to drop: no state is kept between steps

    def stats(self, num_accepted_tokens: int) -> SpeculationStats:
        return SpeculationStats()
