"""The captured numbers of tokens of prefill steps, and their input buffers."""

from __future__ import annotations

from bisect import bisect_left

import torch

from diptych.shared.config import EngineConfig, ModelConfig
from diptych.shared.interfaces import CausalLM
from diptych.shared.types import ForwardBatch, ForwardMode

Heads = dict[int, torch.Tensor]
"""What attention writes, [num_tokens, num_qo_heads, size], by the size of a head."""

MAX_LAYER_FLOPS = 400e9
"""FLOPs of the GEMMs of one layer. Above it, a GPU computes a layer for longer than most CPUs take to launch
its kernels (measured beside H200s: docs/lab/prefill.md)."""
MAX_MIXED_TOKENS = 1024
"""With mixed steps, up to this number of tokens is captured regardless of FLOPs, because chunks are then
small."""


def captured_token_counts(config: EngineConfig, model: ModelConfig) -> tuple[int, ...]:
    """The captured numbers of tokens, ascending; none exceeds the largest step."""
    limit = config.cuda_graph_max_tokens
    if limit is None:
        limit = int(MAX_LAYER_FLOPS / flops_per_token(model))
        if config.enable_mixed_chunk:
            limit = max(limit, MAX_MIXED_TOKENS)
    if config.two_batch_tokens is not None:  # from there on passes are cut into halves
        limit = min(limit, config.two_batch_tokens - 1)
    most = config.chunked_prefill_size  # including the tokens of decoding requests
    if most is None:
        most = max(config.max_prefill_tokens, config.context_len or model.context_len)
        most += config.max_running_requests * config.enable_mixed_chunk
    # Below 256 tokens a GEMM is bound by reading weights, so padding is nearly free.
    steps = [16, 32, 64, 128, 192, 256, 384, 512, 640, 768, 896]
    steps += [start + i * start // 4 for start in (1024, 2048, 4096, 8192) for i in range(4)]
    sizes = [size for size in steps if size <= limit]
    if most <= limit:
        sizes = [size for size in sizes if size < most] + [most]
    return tuple(sizes)


def flops_per_token(model: ModelConfig) -> int:
    """FLOPs of the GEMMs of the costliest kind of layer."""
    layers = [model.of_layer(layer_id) for layer_id in range(model.num_hidden_layers)]
    heads = max((layer.num_qo_heads + layer.num_kv_heads) * layer.head_dim for layer in layers)
    mlp = max(layer.intermediate_size for layer in layers)
    if model.moe is not None:
        mlp = mlp if model.moe.beside_mlp else model.moe.shared_intermediate_size
        mlp += model.moe.num_experts_per_tok * model.moe.intermediate_size
    return 2 * model.hidden_size * (2 * heads + 3 * mlp)


class TokenBuffers:
    """The tensors of prefill steps of `sizes` tokens. A padding token has position 0 and writes to the dummy
    page. Attention of every layer writes to the same `heads`, where layers are alike."""

    def __init__(self, sizes: tuple[int, ...], model: CausalLM, device: torch.device) -> None:
        self.sizes = sizes
        largest = -(-sizes[-1] // 16) * 16 if sizes else 0  # every row starts as aligned as the first
        self.inputs = torch.zeros(3, largest, dtype=torch.int64, device=device)
        like, config = next(model.parameters()), model.config
        dims = {config.of_layer(layer_id).v_head_dim for layer_id in range(config.num_hidden_layers)}
        self.heads = {dim: like.new_zeros(largest, config.num_qo_heads, dim) for dim in sorted(dims)}
        self._batches: dict[int, ForwardBatch] = {}  # by size

    def size_for(self, num_tokens: int) -> int | None:
        """The smallest size that is large enough."""
        place = bisect_left(self.sizes, num_tokens)
        return self.sizes[place] if place < len(self.sizes) else None

    def load(self, batch: ForwardBatch, size: int) -> None:
        n = batch.num_tokens
        for row, values in zip(self.inputs, (batch.input_ids, batch.model_positions, batch.out_cache_loc)):
            row[:n].copy_(values)
        self.inputs[:, n:size].zero_()
        # Attention does not write padding rows, so all are equal, and an MoE routes them to the same few
        # experts.
        for heads in self.heads.values():
            heads[n:size].zero_()

    def heads_of(self, size: int) -> Heads:
        """The first rows of `heads`."""
        return {dim: heads[:size] for dim, heads in self.heads.items()}

    def batch_of(self, size: int) -> ForwardBatch:
        """The first tokens of the buffers as a batch of one request, for the model only."""
        if size not in self._batches:
            input_ids, positions, out_cache_loc = self.inputs[:, :size]
            zero = torch.zeros(1, dtype=torch.int64, device=self.inputs.device)
            lens = zero + size
            self._batches[size] = ForwardBatch(
                ForwardMode.EXTEND, input_ids, positions, zero, lens, out_cache_loc, lens, zero,
                (size,), (size,),
            )  # fmt: skip
        return self._batches[size]
