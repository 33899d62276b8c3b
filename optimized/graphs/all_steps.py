"""All kinds of steps of a model runner: made, their kernels compiled, their graphs captured."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from diptych.optimized.graphs.batch_steps import BatchSteps, Results, capture_batch_steps
from diptych.optimized.graphs.cuda_graph import CudaGraphs, Rehearsal, warn_of_launches
from diptych.optimized.graphs.decode_graph import DecodeBuffers, captured_batch_sizes
from diptych.optimized.graphs.extend_graph import ExtendSteps, capture_prefill_steps
from diptych.optimized.graphs.mixed_graph import MixedSteps
from diptych.optimized.graphs.rehearsal import (
    attention_of_rehearsal,
    block_batches,
    decode_batches,
    deterministic_batches,
    layers_of_rehearsal,
    prefill_batches,
    sampling_infos,
    verify_batches,
)
from diptych.optimized.graphs.steps import Layers, Steps
from diptych.optimized.graphs.token_buffers import TokenBuffers, captured_token_counts
from diptych.optimized.graphs.verify_graph import MAX_TOKENS, VerifyBuffers, has_windows, verify_batch_sizes
from diptych.optimized.kernels.compile_ahead import compile_ahead
from diptych.shared.config import EngineConfig
from diptych.shared.config.speculation_flags import draft_shape, possible_shapes
from diptych.shared.interfaces import CausalLM, Sampler
from diptych.shared.interfaces.model_runner import ModelRunner
from diptych.shared.types import ForwardBatch


class AllSteps:
    """The steps of one runner. It keeps them; they keep no reference to it."""

    def __init__(self, config: EngineConfig, runner: ModelRunner, num_logprob_rows: int) -> None:
        self.config = config
        self.device = runner.kv_pool.device
        model, attention, kv_pool = runner.model, runner.attention, runner.kv_pool
        linear = runner.linear_attention
        shapes = []
        if config.speculative is not None and attention.accepts_seq_len_upper_bounds:
            shapes = possible_shapes(config)
        max_seq_len = config.context_len or model.config.context_len
        max_seq_len += shapes[0].num_draft_tokens if shapes else 0
        results = Results(check_borrowed=config.check_invariants)

        def over(buffers: DecodeBuffers | VerifyBuffers) -> BatchSteps:
            return BatchSteps(model, attention, kv_pool, buffers, max_seq_len, results, linear)

        has_axes = model.config.rope.mrope_section != ()
        self.decode = over(DecodeBuffers(captured_batch_sizes(config), self.device, has_axes))
        self.verify = [  # for each number of nodes, the most first
            over(VerifyBuffers(verify_batch_sizes(config, n), n, shapes[0].top_k > 1, self.device))
            for n in dict.fromkeys(shape.num_draft_tokens for shape in shapes)
        ]
        self.blocks: list[BatchSteps] = []
        n = config.cuda_graph_block_len
        takes_blocks = linear is None and attention.accepts_seq_len_upper_bounds
        if n is not None and takes_blocks and not has_windows(model.config):
            buffers = VerifyBuffers(verify_batch_sizes(config, n), n, has_mask=True, device=self.device)
            self.blocks = [over(buffers)]
            self.blocks[0].captures_sampler = False  # it gives log-probabilities, which no graph does
        elif n is not None:
            why = (
                "the model has windows" if takes_blocks else f"{type(attention).__name__} takes no tree masks"
            )
            warn_of_launches("block diffusion", why)
        self.prefill: list[ExtendSteps] = []
        if linear is not None or config.dp_attention:
            # Chunks of prompts are launched: their number is that of CTAs, or the ranks have other tokens.
            return
        tokens = TokenBuffers(captured_token_counts(config, model.config), model, self.device)
        self.prefill = [ExtendSteps(model, attention, kv_pool, tokens, num_logprob_rows)]
        if config.enable_mixed_chunk and attention.supports_ragged_graphs:
            self.prefill.append(MixedSteps(model, attention, kv_pool, tokens, num_logprob_rows))

    @property
    def kinds(self) -> tuple[Steps, ...]:
        """List the kinds in the order in which they are tried: prefill steps take mixed ones too."""
        return self.decode, *self.verify, *self.blocks, *self.prefill[::-1]

    def prepare(
        self, runner: ModelRunner, graphs: CudaGraphs | None, sampler: Sampler, num_token_ids: int
    ) -> float:
        """Compile kernels on a GPU, then capture, if there are `graphs`. Returns the seconds of compiling."""
        config, start = self.config, time.perf_counter()
        # Elsewhere the ranks exchange tokens of a batch, which an example does not have.
        is_plain = config.pp == config.ep == 1 and not config.dp_attention
        if self.device.type == "cuda" and not config.skip_warmup and is_plain:
            with compile_ahead():
                self.rehearse(runner, sampler, num_token_ids)
            if graphs is not None:
                graphs.are_rehearsed = True
        seconds = time.perf_counter() - start
        if graphs is not None:
            self.capture(runner, graphs, sampler, num_token_ids)
        return seconds

    @torch.inference_mode()
    def rehearse(self, runner: ModelRunner, sampler: Sampler, num_token_ids: int) -> None:
        """Launch an example of each kernel variant of steps, in `compile_ahead`."""
        config, logits = self.config, None
        with attention_of_rehearsal(runner, *self.kinds), layers_of_rehearsal(runner):
            self._rehearse_graphs(runner.capture_hidden, sampler, num_token_ids)
            for batch in self._other_batches(runner.model):
                logits = runner.forward(batch).next_token_logits
        assert logits is not None
        num_nodes = 1 if config.speculative is None else draft_shape(config).num_draft_tokens
        max_rows = max(
            config.max_running_requests * num_nodes, MAX_TOKENS if config.cuda_graph_block_len else 0
        )
        for info in sampling_infos(max_rows, num_token_ids, self.device):
            rows = logits.new_zeros(len(info.seeds), logits.shape[1])[:, :num_token_ids]
            sampler.sample(rows, info, torch.zeros_like(info.seeds))

    def _rehearse_graphs(self, layers: Layers, sampler: Sampler, num_token_ids: int) -> None:
        """Launch what graphs contain, or would contain."""
        graphs = Rehearsal()
        self._capture_batch_steps(graphs, layers, sampler, num_token_ids)
        capture_prefill_steps(self.prefill, graphs, layers)
        for batch_steps in (self.decode, *self.verify, *self.blocks):
            batch_steps.by_size.clear()
        for extend_steps in self.prefill:
            extend_steps.captured.clear()

    def _capture_batch_steps(
        self, graphs: CudaGraphs, layers: Layers, sampler: Sampler, num_token_ids: int
    ) -> None:
        """The kind with the most tokens first."""
        kinds = [*self.verify, *self.blocks, self.decode]
        capture_batch_steps(kinds, graphs, layers, sampler, num_token_ids)

    def _other_batches(self, model: CausalLM) -> Iterator[ForwardBatch]:
        """Examples of the steps that no graph contains as a whole."""
        num_tokens = max((size for steps in self.prefill for size in steps.tokens.sizes), default=0)
        yield from prefill_batches(self.config, model.config, num_tokens, self.device)
        if self.config.deterministic:
            yield from deterministic_batches(self.config, model, num_tokens, self.device)
        yield from decode_batches(self.config, self.decode.max_bs, self.device)
        for steps in self.verify:
            yield from verify_batches(self.config, steps.max_bs, steps.buffers, self.device)
        if self.config.cuda_graph_block_len is not None and model.config.linear_attention is None:
            num_captured = self.blocks[0].max_bs if self.blocks else 0
            yield from block_batches(self.config, model.config, num_captured, self.device)

    def capture(self, runner: ModelRunner, graphs: CudaGraphs, sampler: Sampler, num_token_ids: int) -> None:
        """Capture all graphs; kinds that cannot be captured are launched kernel by kernel, which is said."""
        layers, attention = runner.capture_hidden, runner.attention
        if attention.supports_cuda_graph:
            self._capture_batch_steps(graphs, layers, sampler, num_token_ids)
        else:
            warn_of_launches("decoding", f"{type(attention).__name__} does not run in CUDA graphs")
        capture_prefill_steps(self.prefill, graphs, layers)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class ReplayCounts:
    """The numbers of replays of a model runner, for tests and measurements."""

    kinds: tuple[Steps, ...] = ()

    @property
    def steps(self) -> int:
        """Count the replayed graphs of decode and verify steps."""
        return sum(steps.num_replays for steps in self.kinds if isinstance(steps, BatchSteps))

    @property
    def prompts(self) -> int:
        """Count the replayed graphs of prefill and mixed steps."""
        return sum(steps.num_replays for steps in self.kinds if isinstance(steps, ExtendSteps))

    @property
    def samplers(self) -> int:
        return sum(steps.num_sampler_replays for steps in self.kinds if isinstance(steps, BatchSteps))
