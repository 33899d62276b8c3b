"""Contract of an attention backend."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from diptych.shared.interfaces.linear_attention import BatchLinearAttention
from diptych.shared.interfaces.memory_pool import ReqToTokenPool, TokenToKVPool
from diptych.shared.types import ForwardBatch
from diptych.shared.types.attention import AttentionLayer


class AttentionBackend(ABC):
    """Attention of a step's tokens over the paged KV pool: `plan` once a step, `run` once a layer.

    Token t of request i sits at position p = seq_lens[i] - extend_seq_lens[i] + (its index in the
    request). It sees the KV of positions j of its own request, read from slot
    req_to_token[req_pool_indices[i], j], where

    - there is no mask: j <= p (causal);
    - `custom_mask` or `tree_mask` is given: the mask's row of the token is True at column j, or, of a
      tree_mask [bs, n, m], at column j - (seq_lens[i] - m) where that is not negative;
    - the layer has a sliding window w >= 0: also j >= p - w;
    - the layer has an attention_chunk c > 0: also j >= p // c * c. Chunks begin at multiples of c, wherever
      the cached prefix ends.

    A tree_mask is of draft trees, where siblings have slots between a token and its ancestors. There windows
    and chunks count along the branch: in these two rules a column's j is the number of columns in front of it
    that the token sees, and p is the j of the last column that it sees.

    A token always sees at least itself in a causal batch. A masked token that sees nothing gets zeros.

    score = scale * q·k, then logit_cap * tanh(score / logit_cap) when logit_cap > 0, softmax over the
    visible positions and, when the layer has `sinks`, one more column of that logit without a value;
    accumulated in float32 at least. Query head h reads KV head h // (num_qo_heads // num_kv_heads).

    In an FP8 pool K and V are what the pool holds, times the layer's kv_scales.

    The new tokens' K and V are in the pool before `run` is called. What slots hold that are not a live
    token's (padding, the dummy page, the rest of a last page) is undefined, NaN included.

    Every backend takes float16 and bfloat16, head_dim 64 and 128, 1, 2, 4 and 8 query heads a KV head, and
    any page size, causal, with scale head_dim ** -0.5 and without extras. What else it cannot do (dtype,
    head_dim, num_qo_heads, scale, sliding_window, attention_chunk, logit_cap, sinks, custom_mask, tree_mask,
    kv_cache_dtype of an FP8 pool) it refuses by a `ValueError` that names that and what it supports: from the
    constructor, `plan` or `run`, as soon as it knows.

    CUDA graphs are optional. A backend with `supports_cuda_graph` gives, by `plan_for_graph`, a plan whose
    `run` may be captured once and replayed for other batches of the same shapes, each after a `replan`.
    """

    supports_cuda_graph: bool = False
    runs_before_capture: bool = False
    """A `plan_for_graph` is complete once `run` was called with it for each layer, outside of a capture."""
    accepts_seq_len_upper_bounds: bool = False
    """In TARGET_VERIFY batches without a custom_mask, `seq_lens_cpu` may be upper bounds: lengths are
    read from the tensors."""
    supports_ragged_graphs: bool = False
    """There is a `plan_ragged`."""
    is_deterministic: bool = False
    """Of causal batches, the bits of a row depend on its query and on the keys that it sees alone: not on
    other rows, on slots, or on how the tokens of a request are divided into steps."""

    @abstractmethod
    def __init__(self, req_to_token_pool: ReqToTokenPool, kv_pool: TokenToKVPool) -> None: ...

    def check_layer(self, layer: AttentionLayer) -> None:
        """Raise the `ValueError` that `run` would raise for a layer, whatever the batch. An engine asks for
        each layer of its model when it starts. Here: nothing is refused."""
        return

    def beside(self) -> AttentionBackend:
        """Another backend over the same pools, which computes as this one does: each keeps a plan of its own.
        Here it is a copy that shares what this one has: override it where plans are in shared memory."""
        return copy.copy(self)

    @abstractmethod
    def plan(self, forward_batch: ForwardBatch) -> Any:
        """Everything that depends on the batch but not on the layer. The result is only meaningful to
        `run` of the same object, and only until the next `plan`. Reads req_to_token; mutates nothing."""

    @abstractmethod
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
        """q [num_tokens, num_qo_heads, head_dim] -> output of the same shape and dtype.

        k, v [num_tokens, num_kv_heads, head_dim], when given, are what the pool already holds at
        out_cache_loc: a backend may read them instead, except where an FP8 pool has rounded them. Query
        heads that the KV heads do not divide are a `ValueError`.

        `out`, when given, is written whole and returned: contiguous, of q's shape, dtype and device, else a
        `ValueError`. It may be some rows of a larger tensor, whose others stay as they are. It shares no
        memory with what is read, q, k and v included. Without it the output is a tensor of its own, which
        later runs leave alone. Nothing else is mutated.
        """

    def plan_for_graph(self, forward_batch: ForwardBatch, max_seq_len: int) -> Any:
        """A plan for capturing, called outside the capture. It stays valid beside any other plan of the same
        object, as long as the caller keeps it.

        The tensors of `forward_batch` are buffers that keep their addresses: before each replay they hold
        another batch of the same forward_mode, batch_size, num_tokens and extend_seq_lens. Their values now,
        and `seq_lens_cpu`, are those of some valid batch and mean nothing later; no request will be longer
        than `max_seq_len`. `run` with this plan allocates at most from the current memory pool, never
        synchronises, and launches the same kernels whatever the buffers hold.
        """
        raise ValueError(f"{type(self).__name__} does not run in CUDA graphs")

    def replan(self, plan: Any, forward_batch: ForwardBatch) -> None:
        """Brings a `plan_for_graph` up to date, before each replay and on its stream, without synchronising.
        `forward_batch` is the one that it was made with, or one of the same shapes over the same buffers:
        they, and its `seq_lens_cpu`, now describe the step to come. Overwrites what the last replay read, and
        that may still be in flight: what goes to the device goes there in stream order."""
        raise ValueError(f"{type(self).__name__} does not run in CUDA graphs")

    def plan_ragged(self, forward_batch: ForwardBatch) -> Any:
        """A plan for capturing, as `plan_for_graph` gives one, of an EXTEND or DECODE batch that need not be
        of the same shape again: before each replay its buffers hold any batch of that mode, of no more
        requests and tokens. All lengths are read from the tensors, so there is nothing to `replan`.

        An entry without new tokens, or a decoding one of seq_len 0, is no request: it is not read further.
        Decoding requests are neighbours. `run` needs `out`, whose padding rows it does not write."""
        raise ValueError(f"{type(self).__name__} does not run ragged batches in CUDA graphs")


@dataclass(frozen=True, eq=False)
class BatchAttention:
    """What a model needs to compute attention during one step: the backend, the step's plan, and the slots
    of the new KV. A model stores K and V, then runs the backend."""

    backend: AttentionBackend
    plan: Any
    kv_pool: TokenToKVPool
    out_cache_loc: torch.Tensor  # [num_tokens] int64
    rows: torch.Tensor | None = None  # int64, the tokens whose hidden states are needed; None: all
    linear: BatchLinearAttention | None = None  # of models with layers of linear attention
    layer_inputs: torch.Tensor | None = None  # [num_layers, num_tokens, size]: of Gemma-4
