"""Prefill steps in pieces: the layers between two attention calls are replayed from a CUDA graph.

Differs from reference: for few tokens, launching the ten kernels of a layer takes the CPU longer than running
them takes the GPU. So a step is padded to one of a list of sizes. For each size the model is captured as one
graph up to the first attention, one from there to the next, and so on to the end. Attention is planned and
launched for the batch without its padding and writes to where the next graph reads, so any backend and any
lengths work. The model is unchanged: the attention backend that it gets ends one graph and begins the next.
Without graphs (a flag, a CPU, recording hooks) the same padded tokens go through the same kernels, so results
are bit-identical. Assumes that a row's result does not depend on other rows. Loses where the GPU takes longer
than the CPU, because it computes the padding too: steps above the largest size run without graphs. Mixed
steps are replayed whole where attention can be captured for them (mixed_graph.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tqdm.auto import tqdm

from diptych.optimized.graphs.cuda_graph import CudaGraphs, Cut, warn_of_launches
from diptych.optimized.graphs.mixed_graph import MixedRows
from diptych.shared.config import EngineConfig, ModelConfig
from diptych.shared.interfaces import AttentionBackend, CausalLM, TokenToKVPool
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.modeling.forward import run_model
from diptych.shared.types import ForwardBatch, ForwardMode
from diptych.shared.types.attention import AttentionLayer

MAX_LAYER_FLOPS = 260e9
"""FLOPs of the GEMMs of one layer. Above it, a GPU computes a layer for longer than its kernels take to
launch (measured on an H200: docs/lab/prefill.md)."""
MAX_MIXED_TOKENS = 1024
"""With mixed steps, up to this number of tokens is captured regardless of FLOPs, because chunks are then
small."""


def captured_token_counts(config: EngineConfig, model: ModelConfig) -> tuple[int, ...]:
    """The captured numbers of tokens, ascending; at most one exceeds the largest step."""
    limit = config.cuda_graph_max_tokens
    if limit is None:
        limit = int(MAX_LAYER_FLOPS / flops_per_token(model))
        if config.enable_mixed_chunk:
            limit = max(limit, MAX_MIXED_TOKENS)
    most = config.chunked_prefill_size  # including the tokens of decoding requests
    if most is None:
        most = max(config.max_prefill_tokens, config.context_len or model.context_len)
        most += config.max_running_requests * config.enable_mixed_chunk
    # Below 256 tokens a GEMM is bound by reading weights, so padding is nearly free.
    steps = [16, 32, 64, 128, 192, 256, 384, 512, 768]
    steps += [start + i * start // 4 for start in (1024, 2048, 4096, 8192) for i in range(4)]
    sizes = [size for size in steps if size <= limit]
    if most <= limit:
        sizes = [size for size in sizes if size < most] + [most]
    return tuple(sizes[: bisect_left(sizes, most) + 1])


def flops_per_token(model: ModelConfig) -> int:
    """FLOPs of the GEMMs of the costliest kind of layer."""
    q, kv = model.num_qo_heads * model.head_dim, model.num_kv_heads * model.head_dim
    mlp = model.intermediate_size
    if model.moe is not None:
        mlp = model.moe.num_experts_per_tok * model.moe.intermediate_size + model.moe.shared_intermediate_size
    return 2 * model.hidden_size * (2 * q + 2 * kv + 3 * mlp)


@dataclass
class Piece:
    """A graph, and the attention call that is launched after it, over memory that the graph writes."""

    replay: Callable[[], None]
    layer: AttentionLayer
    q: torch.Tensor
    k: torch.Tensor | None
    v: torch.Tensor | None


@dataclass
class Pieces:
    """All pieces for one number of tokens."""

    up_to_attention: list[Piece]  # none: attention is in the graph
    replay_rest: Callable[[], None]
    outputs: list[torch.Tensor]  # borrowed buffers: valid until any other graph is replayed

    # --8<-- [start:replay-pieces]
    def __call__(self, attention: AttentionBackend, plan: Any) -> list[torch.Tensor]:
        for piece in self.up_to_attention:
            piece.replay()
            attention.run(piece.q, piece.layer, plan, k=piece.k, v=piece.v)
        self.replay_rest()
        return self.outputs

    # --8<-- [end:replay-pieces]


class RealRows(AttentionBackend):
    """Attention of a padded step: the backend computes the first tokens; the padding rows of `heads` do not
    change."""

    def __init__(self, backend: AttentionBackend, num_tokens: int, heads: torch.Tensor) -> None:
        self.backend = backend
        self.num_tokens = num_tokens
        self.heads = heads  # [size, num_qo_heads, v_head_dim], the same memory for all layers
        self.real = heads[:num_tokens]

    def plan(self, forward_batch: ForwardBatch) -> Any:
        return self.backend.plan(forward_batch)

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
        n = self.num_tokens
        k, v = (None if x is None else x[:n] for x in (k, v))
        output = self.backend.run(q[:n], layer, plan, k=k, v=v, out=self.real)
        assert output is self.real, f"{type(self.backend).__name__} did not write to out"
        return self.heads


class CutHere(AttentionBackend):
    """Replaces attention while a model is captured: one piece ends here, the next reads `heads`."""

    def __init__(self, cut: Cut, heads: torch.Tensor) -> None:
        self.cut = cut
        self.heads = heads
        self.pieces: list[Piece] = []

    def plan(self, forward_batch: ForwardBatch) -> None:
        """No plan: it is made for each replayed batch."""

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
        assert out is None
        replay, tensors = self.cut([x for x in (q, k, v) if x is not None])
        self.pieces.append(Piece(replay, layer, *tensors, *[None] * (3 - len(tensors))))
        return self.heads


class ExtendSteps:
    """Runs prefill steps, padded to one of `sizes` tokens, over its own buffers. A padding token has position
    0 and writes to the dummy page."""

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        kv_pool: TokenToKVPool,
        sizes: tuple[int, ...],
        is_mixed: bool = False,
    ) -> None:
        self.model = model
        self.attention = attention
        self.kv_pool = kv_pool
        self.sizes = sizes
        self.num_replays = 0  # of steps of any kind
        largest = -(-sizes[-1] // 16) * 16 if sizes else 0  # every row starts as aligned as the first
        self._inputs = torch.zeros(3, largest, dtype=torch.int64, device=kv_pool.device)
        config = model.config
        like = next(model.parameters())
        self._heads = like.new_zeros(largest, config.num_qo_heads, config.v_head_dim)
        self._batches: dict[int, ForwardBatch] = {}  # by size
        self._pieces: dict[int, Pieces] = {}
        self._whole: dict[int, Pieces] = {}
        self._mixed: MixedRows | None = None  # where steps are mixed and attention takes them as graphs
        if is_mixed and attention.supports_ragged_graphs:
            self._mixed = MixedRows(attention, self._heads)
        self._captured_layers: tuple[int, ...] | None = None  # whose inputs the pieces give

    def takes(self, batch: ForwardBatch) -> bool:
        return (
            batch.forward_mode.is_prefill
            and batch.custom_mask is None
            and bool(self.sizes)
            and batch.num_tokens <= self.sizes[-1]
        )

    def run(
        self, batch: ForwardBatch, layers: tuple[int, ...] | None, replay: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run a step: the output of `run_model`, valid until the next step of any kind. `replay`: replay
        graphs if possible."""
        n = batch.num_tokens
        size = self.sizes[bisect_left(self.sizes, n)]
        self._load(batch, size)
        # Attention does not write padding rows, so all are equal, and an MoE routes them to the same few
        # experts.
        self._heads[n:size].zero_()
        attention: AttentionBackend
        if self._mixed is not None and self._mixed.takes(batch):
            self._mixed.load(batch)
            attention, captured = self._mixed.attention_of(self._batch_of(size)), self._whole
        else:
            attention, captured = RealRows(self.attention, n, self._heads[:size]), self._pieces
        plan = attention.plan(batch)
        if replay and size in captured and layers == self._captured_layers:
            outputs = captured[size](attention, plan)
            self.num_replays += 1
        else:
            outputs = self._run_model(size, attention, plan, layers)
        return outputs[0][:n], outputs[1][:n] if len(outputs) > 1 else None

    def _load(self, batch: ForwardBatch, size: int) -> None:
        n = batch.num_tokens
        for row, values in zip(self._inputs, (batch.input_ids, batch.positions, batch.out_cache_loc)):
            row[:n].copy_(values)
        self._inputs[:, n:size].zero_()

    @torch.inference_mode()
    def capture_all(self, graphs: CudaGraphs, layers: tuple[int, ...] | None) -> None:
        """Capture all sizes, largest first, because smaller ones reuse the memory."""
        self._captured_layers = layers
        for size in tqdm(
            self.sizes[::-1], desc="capture CUDA graphs of prompts", unit="size", leave=False, delay=1.0
        ):
            try:
                self._pieces[size] = self._capture(graphs, size)
                if self._mixed is not None:
                    self._whole[size] = self._capture_whole(graphs, size, self._mixed)
            except RuntimeError as error:
                if "synchroniz" not in str(error):
                    raise
                warn_of_launches("prefill", "the model makes the CPU wait for the GPU")
                return

    def _capture(self, graphs: CudaGraphs, size: int) -> Pieces:
        self._inputs.zero_()
        last: list[CutHere] = []

        def run(cut: Cut) -> list[torch.Tensor]:
            last[:] = [CutHere(cut, self._heads[:size])]
            return self._run_model(size, last[0], None, self._captured_layers)

        replay_rest, outputs = graphs.capture_pieces(run)
        return Pieces(last[0].pieces, replay_rest, outputs)

    def _capture_whole(self, graphs: CudaGraphs, size: int, mixed: MixedRows) -> Pieces:
        attention = mixed.attention_of(self._batch_of(size))

        def run(cut: Cut) -> list[torch.Tensor]:
            return self._run_model(size, attention, None, self._captured_layers)

        return Pieces([], *graphs.capture_pieces(run))

    def _run_model(
        self, size: int, attention: AttentionBackend, plan: Any, layers: tuple[int, ...] | None
    ) -> list[torch.Tensor]:
        """Hidden states, and the captured ones if requested."""
        batch = self._batch_of(size)
        handle = BatchAttention(attention, plan, self.kv_pool, batch.out_cache_loc)
        hidden_states, captured = run_model(self.model, batch, handle, layers)
        return [hidden_states] if captured is None else [hidden_states, captured]

    def _batch_of(self, size: int) -> ForwardBatch:
        """The first tokens of the buffers as a batch of one request, for the model only."""
        if size not in self._batches:
            input_ids, positions, out_cache_loc = self._inputs[:, :size]
            zero = torch.zeros(1, dtype=torch.int64, device=self._inputs.device)
            lens = zero + size
            self._batches[size] = ForwardBatch(
                ForwardMode.EXTEND, input_ids, positions, zero, lens, out_cache_loc, lens, zero,
                (size,), (size,),
            )  # fmt: skip
        return self._batches[size]
