"""Plain decoding: one token for each running request in a step, launched before the CPU has the previous
step's tokens.

Differs from reference: `run` launches a batch and returns; `finish` is called when its results have arrived.
A request decodes from a token that exists on the device only (optimized/overlap/future_map.py). Assumes that
the end of a request by its length is known ahead. Loses the sampler's overlap where a grammar needs the
previous token (see `Pipeline.sample`), and one row of work for a request that a stop token ends. (Drafts:
optimized/speculative/speculative_decoding.py.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from diptych.optimized.overlap.in_flight import BatchInFlight, InFlight, Pipeline
from diptych.optimized.schedule_batch import prepare_for_decode
from diptych.shared.config import EngineConfig, ModelConfig
from diptych.shared.config.parallel import DECIDES_BEHIND_EACH_STEP
from diptych.shared.interfaces import SchedulerFeature, SchedulerParts
from diptych.shared.loading.quantize import num_weight_bytes
from diptych.shared.loading.weight_names import expected_shapes
from diptych.shared.sampling.logprobs import keep_embeddings, to_token_logprobs
from diptych.shared.scheduling.pages import num_decode_steps
from diptych.shared.types import (
    BatchResult,
    LogitsOutput,
    Req,
    SampleOutput,
    ScheduleBatch,
    SpeculationStats,
)

MOST_BYTES_OF_SHORT_STEPS = 2.5e9
"""Of weights. A GPU reads them in less time than the CPU takes for a decision and a launch."""
STEPS_TOGETHER, TOKENS_TOGETHER = 4, 64
"""Most of a launch, by default."""


def has_short_steps(config: EngineConfig, model_config: ModelConfig, device: torch.device) -> bool:
    """Whether decode steps that CUDA graphs replay would wait for the CPU, and may be launched together
    though no flag says so."""
    if device.type != "cuda" or config.num_continuous_decode_steps is not None:
        return False
    if any(getattr(config, name) not in works for name, works in DECIDES_BEHIND_EACH_STEP):
        return False
    if model_config.linear_attention is not None:  # states are kept at every 256th token, between launches
        return False
    dtype = model_config.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    num_bytes = num_weight_bytes(expected_shapes(model_config), model_config.quantization, dtype)
    return num_bytes <= MOST_BYTES_OF_SHORT_STEPS


class PlainDecoding(SchedulerFeature):
    def __init__(self, parts: SchedulerParts) -> None:
        self.parts = parts
        self.pipeline = Pipeline(parts)

    def num_ahead(self, running: Sequence[Req]) -> int:
        """Batches that may be in flight when the next one is formed."""
        return 1

    def prepare(self, reqs: list[Req], most_steps: int | None = None) -> ScheduleBatch | None:
        """Slots for a decode step of all these requests, or for several steps. None: there is no memory for
        it."""
        num_steps, parts = 1, self.parts
        is_behind_prompt = bool(self.pipeline) and self.pipeline.batches[-1].batch.num_extend_reqs > 0
        if most_steps is not None and most_steps > 1 and not is_behind_prompt:
            coming = self.pipeline.nums_in_flight(reqs)
            num_steps = num_decode_steps(reqs, most_steps, parts.tree_cache, parts.allocator, coming)
        return prepare_for_decode(reqs, parts, num_steps)

    def run(self, batch: ScheduleBatch, chunked_req: Req | None) -> None:
        """Launch a batch. chunked_req: the request whose prompt continues in the next
        step."""
        self.pipeline.launch(batch, chunked_req)

    def finish(self, launched: InFlight, outputs: Any) -> BatchResult:
        """The results of a batch whose outputs have arrived, also of requests that have
        left it."""
        assert isinstance(launched, BatchInFlight)
        if launched.batch.num_steps > 1:
            return BatchResult(outputs.t().tolist(), [[] for _ in launched.batch.reqs])
        logits_output: LogitsOutput = outputs[0]
        sample_output: SampleOutput = outputs[1]
        assert sample_output.next_token_ids.shape == (launched.forward_batch.batch_size,)
        token_ids = sample_output.next_token_ids.tolist()
        launched.distribute_input_logprobs(logits_output.input_logprobs)
        if logits_output.hidden_states is not None:
            reqs, head = launched.batch.reqs, self.parts.reward_head
            keep_embeddings(reqs, launched.chunked_req, logits_output.hidden_states, head)
        logprobs = to_token_logprobs(token_ids, sample_output.logprobs)
        result = BatchResult(
            [[token_id] for token_id in token_ids],
            [logprobs[row : row + 1] for row in range(len(token_ids))],
        )
        chunked_req = launched.chunked_req
        if chunked_req is not None and chunked_req in launched.batch.reqs:  # its token has no meaning
            result.token_ids[launched.batch.reqs.index(chunked_req)].clear()
        return result

    def has_left(self, req: Req) -> None:
        self.pipeline.drop(req)

    def stats(self, num_accepted_tokens: int) -> SpeculationStats:
        return SpeculationStats()
