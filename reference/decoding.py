"""Plain decoding: one token for each running request in a step. (With drafts several:
reference/speculative/speculative_decoding.py.)"""

from __future__ import annotations

from diptych.reference.schedule_batch import make_forward_batch, prepare_for_decode
from diptych.shared.interfaces import SchedulerParts
from diptych.shared.sampling.logprobs import (
    collect_input_logprobs,
    keep_embeddings,
    last_hidden_states,
    to_token_logprobs,
)
from diptych.shared.sampling.sampling_batch import make_sampling_batch_info
from diptych.shared.scheduling.pages import num_decode_steps
from diptych.shared.types import (
    BatchResult,
    ForwardBatch,
    Req,
    SamplingBatchInfo,
    ScheduleBatch,
    SpeculationStats,
    TokenLogprob,
)


class PlainDecoding:
    def __init__(self, parts: SchedulerParts) -> None:
        self.parts = parts

    def prepare(self, reqs: list[Req], most_steps: int | None = None) -> ScheduleBatch | None:
        """Slots for a decode step of all these requests, or for several steps. None: there is no memory for
        it."""
        num_steps, parts = 1, self.parts
        if most_steps is not None and most_steps > 1:
            num_steps = num_decode_steps(reqs, most_steps, parts.tree_cache, parts.allocator)
        return prepare_for_decode(reqs, parts, num_steps)

    def run(self, batch: ScheduleBatch, chunked_req: Req | None) -> BatchResult:
        """Run a batch. chunked_req: the request whose prompt continues in the next step."""
        parts, device = self.parts, self.parts.allocator.device
        extending, decoding = batch.reqs[: batch.num_extend_reqs], batch.reqs[batch.num_extend_reqs :]
        with parts.timeline.span("prepare"):
            newest_ids = [req.output_ids[-1] for req in decoding]
            forward_batch = make_forward_batch(batch, newest_ids, parts.num_token_ids, device)
            info = make_sampling_batch_info(batch.reqs, parts.num_token_ids, device)
        is_pooling = any(req.is_pooling for req in batch.reqs)
        if parts.drafter is None:  # otherwise hidden states are for the drafter
            parts.model_runner.capture_hidden = () if is_pooling else None
        if batch.num_steps > 1:
            return self._run_steps(batch, forward_batch, info)
        with parts.timeline.forward(forward_batch):
            logits_output, sample_output = parts.model_runner.forward_and_sample(
                forward_batch, parts.sampler, info, parts.num_token_ids
            )
        with parts.timeline.span("wait for tokens"):
            token_ids = sample_output.next_token_ids.tolist()
        if any(req.next_input_logprob is not None for req in extending):
            collect_input_logprobs(extending, forward_batch, logits_output.input_logprobs)
        if is_pooling:
            states = last_hidden_states(forward_batch, logits_output)
            keep_embeddings(batch.reqs, chunked_req, states, parts.reward_head)
        logprobs: list[TokenLogprob] = []
        if sample_output.logprobs is not None:
            logprobs = to_token_logprobs(token_ids, sample_output.logprobs)
        return BatchResult(
            [[token_id] for token_id in token_ids],
            [logprobs[row : row + 1] for row in range(len(token_ids))],
            forward_batch,
            logits_output,
        )

    def _run_steps(
        self, batch: ScheduleBatch, forward_batch: ForwardBatch, info: SamplingBatchInfo
    ) -> BatchResult:
        parts, slots = self.parts, batch.slots_of_steps.to(self.parts.allocator.device)
        token_ids = parts.model_runner.decode_steps(
            forward_batch, slots, parts.sampler, info, parts.num_token_ids, parts.timeline.forward
        )
        with parts.timeline.span("wait for tokens"):
            return BatchResult(token_ids.t().tolist(), [[] for _ in batch.reqs])

    def stats(self, num_accepted_tokens: int) -> SpeculationStats:
        return SpeculationStats()
