"""Plain decoding: one token for each running request in a step, launched before the CPU has the previous
step's tokens.

Differs from reference: `run` launches a batch and returns; `finish` is called when its results have arrived.
A request decodes from a token that exists on the device only (optimized/overlap/future_map.py). Assumes that
the end of a request by its length is known ahead. Loses the sampler's overlap where a grammar needs the
previous token (see `Pipeline.sample`), and one row of work for a request that a stop token ends. (Drafts:
optimized/speculative/speculative_decoding.py.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from diptych.optimized.overlap.in_flight import BatchInFlight, InFlight, Pipeline
from diptych.shared.interfaces import SchedulerParts
from diptych.shared.sampling.logprobs import keep_embeddings, to_token_logprobs
from diptych.shared.scheduling.pages import prepare_for_decode
from diptych.shared.types import (
    LogitsOutput,
    Req,
    SampleOutput,
    ScheduleBatch,
    SpeculationStats,
    TokenLogprob,
)

Tokens = tuple[Req, list[int], list[TokenLogprob]]
"""The tokens that a batch gives a request, and their log-probabilities if requested."""


class PlainDecoding:
    def __init__(self, parts: SchedulerParts) -> None:
        self.parts = parts
        self.pipeline = Pipeline(parts)

    def num_ahead(self, running: Sequence[Req]) -> int:
        """Batches that may be in flight when the next one is formed."""
        return 1

    def num_reserved(self, reqs: Sequence[Req]) -> int:
        return 0  # the prefill adder reserves one more token for each

    def prepare(self, reqs: list[Req]) -> ScheduleBatch | None:
        parts = self.parts
        return prepare_for_decode(reqs, parts.req_to_token_pool, parts.allocator, parts.tree_cache)

    # --8<-- [start:run-batch]
    def run(self, batch: ScheduleBatch, chunked_req: Req | None) -> None:
        """Run a batch. chunked_req: the request whose prompt continues in the next step."""
        self.pipeline.launch(batch, chunked_req)

    def finish(self, launched: InFlight, result: Any) -> Iterator[Tokens]:
        """The results of each request in order, also of those that have left the batch.
        A request may leave it while earlier ones are processed."""
        assert isinstance(launched, BatchInFlight)
        logits_output: LogitsOutput = result[0]
        sample_output: SampleOutput = result[1]
        assert sample_output.next_token_ids.shape == (launched.forward_batch.batch_size,)
        next_token_ids = sample_output.next_token_ids.tolist()
        logprobs = to_token_logprobs(next_token_ids, sample_output.logprobs)
        launched.distribute_input_logprobs(logits_output.input_logprobs)
        if logits_output.hidden_states is not None:
            reqs, head = launched.batch.reqs, self.parts.reward_head
            keep_embeddings(reqs, launched.chunked_req, logits_output.hidden_states, head)
        for row, req in enumerate(launched.batch.reqs):
            if req is not launched.chunked_req:  # in a chunked prompt: the sampled token has no meaning
                yield req, next_token_ids[row : row + 1], logprobs[row : row + 1]
                # --8<-- [end:run-batch]

    def drop(self, req: Req) -> None:
        self.pipeline.drop(req)

    def stats(self, num_accepted_tokens: int) -> SpeculationStats:
        return SpeculationStats()
