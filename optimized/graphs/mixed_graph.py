"""Mixed prefill-decode steps as CUDA graphs: the whole model as one graph, attention included.

Differs from reference: buffers (`MixedRows`) hold the request of each row, so one graph of N tokens serves
every mixed step of up to N. Two kernels in each layer extend the prompts and decode the other requests, each
into its rows of one output; padding rows are skipped on the device. In pieces (extend_graph.py) the GPU waits
twice in each layer, for attention and for the next graph, and the CPU launches both. Assumes that attention
accepts ragged batches, and that prompts are few and not very long: only Triton's prefill kernel can be
captured, and FlashAttention 3 is faster for long ones. Other steps run in pieces.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from diptych.optimized.graphs.cuda_graph import CudaGraphs, Cut
from diptych.optimized.graphs.extend_graph import ExtendSteps, Pieces
from diptych.optimized.graphs.token_buffers import Heads, TokenBuffers
from diptych.optimized.mixed_batch import num_decoding
from diptych.shared.interfaces import AttentionBackend, CausalLM, TokenToKVPool
from diptych.shared.types import ForwardBatch, ForwardMode
from diptych.shared.types.attention import AttentionLayer

MAX_PROMPTS = 16
"""The maximum number of prompts of a step. Each adds a tile to the grid, even if it is absent."""
MAX_PROMPT_LEN = 4096
"""The maximum length of such prompts, cached tokens included."""


class MixedAttention(AttentionBackend):
    """Attention of steps with a fixed number of tokens, over the buffers. Every layer writes to the same
    `heads`; its other rows do not change."""

    def __init__(
        self, backend: AttentionBackend, prompts: ForwardBatch, decoding: ForwardBatch, heads: Heads
    ) -> None:
        self.backend = backend
        self.plans = backend.plan_ragged(prompts), backend.plan_ragged(decoding)
        self.heads = heads

    def plan(self, forward_batch: ForwardBatch) -> None:
        """No plan: the plans are those of the buffers."""

    def run(
        self,
        q: torch.Tensor,
        layer: AttentionLayer,
        plan: Any,
        *,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert out is None  # a model gives none
        heads = self.heads[layer.output_dim]
        for own in self.plans:
            self.backend.run(q, layer, own, k=k, v=v, out=heads)
        return heads


class MixedRows:
    """Buffers with the request of each row of a step: start and length of each prompt, and for every row the
    request that decodes there. Length 0: a padding row."""

    def __init__(self, attention: AttentionBackend, tokens: TokenBuffers) -> None:
        self.attention = attention
        self.tokens = tokens
        max_tokens, device = tokens.inputs.shape[1], tokens.inputs.device  # a multiple of 16: alignment
        self._ints = torch.zeros(4 * MAX_PROMPTS + 2 * max_tokens, dtype=torch.int64, device=device)
        self._prompts = self._ints[: 4 * MAX_PROMPTS].view(4, MAX_PROMPTS)
        self._decoding = self._ints[4 * MAX_PROMPTS :].view(2, max_tokens)
        self._ones = torch.ones(max_tokens, dtype=torch.int64, device=device)
        self._numbers = torch.arange(max_tokens, device=device)
        self._attention_of: dict[int, MixedAttention] = {}  # by number of tokens

    def takes(self, batch: ForwardBatch) -> bool:
        if batch.forward_mode is not ForwardMode.MIXED or batch.custom_mask is not None:
            return False
        num_prompts = batch.batch_size - num_decoding(batch)
        if num_prompts == batch.batch_size:
            return False  # without a request, the kernel for decoding waits for none of those ahead
        return (
            num_prompts <= MAX_PROMPTS and max(batch.seq_lens_cpu[:num_prompts], default=0) <= MAX_PROMPT_LEN
        )

    # --8<-- [start:load-mixed-rows]
    def load(self, batch: ForwardBatch) -> None:
        self._ints.zero_()
        n = num_decoding(batch)
        num_prompts, first = batch.batch_size - n, batch.num_tokens - n
        vectors = batch.req_pool_indices, batch.seq_lens, batch.extend_seq_lens, batch.extend_start_loc
        targets = [*self._prompts[:, :num_prompts], *self._decoding[:, first : first + n]]
        sources = [v[:num_prompts] for v in vectors] + [v[num_prompts:] for v in vectors[:2]]
        torch._foreach_copy_(targets, sources)

    # --8<-- [end:load-mixed-rows]

    def attention_of(self, step: ForwardBatch) -> MixedAttention:
        """The attention of a step over fixed buffers; the same object for the same number of tokens."""
        size = step.num_tokens
        if size not in self._attention_of:
            rows, seq_lens, extend_seq_lens, starts = self._prompts
            lens = (size, *[0] * (MAX_PROMPTS - 1))
            prompts = replace(
                step,
                forward_mode=ForwardMode.EXTEND,
                req_pool_indices=rows,
                seq_lens=seq_lens,
                extend_seq_lens=extend_seq_lens,
                extend_start_loc=starts,
                seq_lens_cpu=lens,
                extend_seq_lens_cpu=lens,
            )
            decoding = replace(
                step,
                forward_mode=ForwardMode.DECODE,
                req_pool_indices=self._decoding[0, :size],
                seq_lens=self._decoding[1, :size],
                extend_seq_lens=self._ones[:size],
                extend_start_loc=self._numbers[:size],
                seq_lens_cpu=(1,) * size,
                extend_seq_lens_cpu=(1,) * size,
            )
            heads = self.tokens.heads_of(size)
            self._attention_of[size] = MixedAttention(self.attention, prompts, decoding, heads)
        return self._attention_of[size]


class MixedSteps(ExtendSteps):
    """Mixed steps, over the buffers of prefill steps."""

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        kv_pool: TokenToKVPool,
        tokens: TokenBuffers,
        num_logprob_rows: int,
    ) -> None:
        super().__init__(model, attention, kv_pool, tokens, num_logprob_rows)
        self.rows = MixedRows(attention, tokens)

    def takes(self, batch: ForwardBatch) -> bool:
        return super().takes(batch) and self.rows.takes(batch)

    def attention_of(self, batch: ForwardBatch, size: int) -> MixedAttention:
        self.rows.load(batch)
        return self.rows.attention_of(self.tokens.batch_of(size))

    def capture(self, graphs: CudaGraphs, size: int) -> None:
        attention = self.rows.attention_of(self.tokens.batch_of(size))

        def run(cut: Cut) -> list[torch.Tensor]:
            return self.launch(size, attention, None, self.captured_layers)

        self.captured[size] = Pieces([], *graphs.capture_pieces(run, bool(self.captured)))
