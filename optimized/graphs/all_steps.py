"""All kinds of steps of a model runner, and the capture of their graphs."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from diptych.optimized.graphs.batch_steps import BatchSteps, Results, capture_batch_steps
from diptych.optimized.graphs.cuda_graph import CudaGraphs, Rehearsal, warn_of_launches
from diptych.optimized.graphs.decode_graph import DecodeBuffers, captured_batch_sizes
from diptych.optimized.graphs.extend_graph import ExtendSteps, capture_prefill_steps
from diptych.optimized.graphs.mixed_graph import MixedSteps
from diptych.optimized.graphs.rehearsal import decode_batches, prefill_batches, verify_batches
from diptych.optimized.graphs.steps import Layers, Steps
from diptych.optimized.graphs.token_buffers import TokenBuffers, captured_token_counts
from diptych.optimized.graphs.verify_graph import VerifyBuffers, verify_batch_sizes
from diptych.shared.config import EngineConfig
from diptych.shared.config.speculation_flags import possible_shapes
from diptych.shared.interfaces import AttentionBackend, CausalLM, Sampler, TokenToKVPool
from diptych.shared.interfaces.linear_attention import LinearAttention
from diptych.shared.types import ForwardBatch


class AllSteps:
    def __init__(
        self,
        config: EngineConfig,
        model: CausalLM,
        attention: AttentionBackend,
        kv_pool: TokenToKVPool,
        num_logprob_rows: int,
        linear: LinearAttention | None = None,
    ) -> None:
        self.attention = attention
        self.device = kv_pool.device
        shapes = []
        if config.speculative is not None and attention.accepts_seq_len_upper_bounds:
            shapes = possible_shapes(config)
        max_seq_len = config.context_len or model.config.context_len
        max_seq_len += shapes[0].num_draft_tokens if shapes else 0
        results = Results(check_borrowed=config.check_invariants)

        def over(buffers: DecodeBuffers | VerifyBuffers) -> BatchSteps:
            return BatchSteps(model, attention, kv_pool, buffers, max_seq_len, results, linear)

        self.decode = over(DecodeBuffers(captured_batch_sizes(config), self.device))
        self.verify = [  # for each number of nodes, the most first
            over(VerifyBuffers(verify_batch_sizes(config, n), n, shapes[0].top_k > 1, self.device))
            for n in dict.fromkeys(shape.num_draft_tokens for shape in shapes)
        ]
        self.prefill: list[ExtendSteps] = []
        if linear is not None:
            return  # chunks of prompts are launched: their number is that of CTAs
        tokens = TokenBuffers(captured_token_counts(config, model.config), model, self.device)
        self.prefill = [ExtendSteps(model, attention, kv_pool, tokens, num_logprob_rows)]
        if config.enable_mixed_chunk and attention.supports_ragged_graphs:
            self.prefill.append(MixedSteps(model, attention, kv_pool, tokens, num_logprob_rows))

    @property
    def kinds(self) -> tuple[Steps, ...]:
        """List the kinds in the order in which they are tried: prefill steps take mixed ones too."""
        return self.decode, *self.verify, *self.prefill[::-1]

    def other_batches(self, config: EngineConfig) -> Iterator[ForwardBatch]:
        """Examples of the steps that no graph contains as a whole."""
        num_tokens = max((size for steps in self.prefill for size in steps.tokens.sizes), default=0)
        yield from prefill_batches(config, self.decode.model.config, num_tokens, self.device)
        yield from decode_batches(config, self.decode.max_bs, self.device)
        for steps in self.verify:
            yield from verify_batches(config, steps.max_bs, steps.buffers, self.device)

    def rehearse(self, layers: Layers, sampler: Sampler, num_token_ids: int) -> None:
        """Launch what graphs contain, or would contain, in `compile_ahead`."""
        graphs = Rehearsal()
        capture_batch_steps([*self.verify, self.decode], graphs, layers, sampler, num_token_ids)
        capture_prefill_steps(self.prefill, graphs, layers)
        for batch_steps in (self.decode, *self.verify):
            batch_steps.by_size.clear()
        for extend_steps in self.prefill:
            extend_steps.captured.clear()

    def capture(self, graphs: CudaGraphs, layers: Layers, sampler: Sampler, num_token_ids: int) -> None:
        """Capture all graphs; kinds that cannot be captured are launched kernel by kernel, which is said."""
        if self.attention.supports_cuda_graph:
            capture_batch_steps([*self.verify, self.decode], graphs, layers, sampler, num_token_ids)
        else:
            warn_of_launches("decoding", f"{type(self.attention).__name__} does not run in CUDA graphs")
        capture_prefill_steps(self.prefill, graphs, layers)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


class ReplayCounts:
    """The numbers of replays of a model runner, for tests and measurements."""

    kinds: tuple[Steps, ...]

    @property
    def num_graph_replays(self) -> int:
        """Count the replayed graphs of decode and verify steps."""
        return sum(steps.num_replays for steps in self.kinds if isinstance(steps, BatchSteps))

    @property
    def num_extend_replays(self) -> int:
        """Count the replayed graphs of prefill and mixed steps."""
        return sum(steps.num_replays for steps in self.kinds if isinstance(steps, ExtendSteps))

    @property
    def num_sampler_replays(self) -> int:
        return sum(steps.num_sampler_replays for steps in self.kinds if isinstance(steps, BatchSteps))
