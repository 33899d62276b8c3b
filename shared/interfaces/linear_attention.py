"""Contract of linear attention: a state of fixed size for each request, in place of KV for each token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from diptych.shared.config.model import LinearAttentionConfig
from diptych.shared.types import ForwardBatch


@dataclass
class StateStore:
    """An order to copy the state of a row into a checkpoint, when its request has come to a position."""

    checkpoint: int  # a row of the pool
    position: int  # number of tokens that the wanted state has seen
    every: int = 0  # then again so many tokens later, over the last copy; 0: once
    stored: int | None = None  # the position of the copy that is there


class StatePool:
    """For each row of req_to_token, and in each layer of linear attention, the last inputs of the convolution
    and the recurrent state. A row belongs to the request that has the row of req_to_token; row 0 to padding.
    Behind them are rows for checkpoints: copies of states that outlive their requests.

    `loads` and `stores` are orders for the next steps of a row. The plan of a step takes them with `begin`,
    so copies and steps come in one order on the stream of the model.
    """

    def __init__(
        self,
        num_rows: int,
        num_layers: int,
        config: LinearAttentionConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        num_checkpoints: int = 0,
    ) -> None:
        """`num_rows`: of req_to_token, without row 0. `dtype`: of the inputs; states are float32 at least."""
        self.checkpoints = range(num_rows + 1, num_rows + 1 + num_checkpoints)
        rows = num_layers, self.checkpoints.stop
        wide = torch.promote_types(dtype, torch.float32)
        inputs = config.conv_kernel - 1, config.num_channels
        state = config.num_v_heads, config.k_head_dim, config.v_head_dim
        self.inputs = torch.zeros(*rows, *inputs, dtype=dtype, device=device)
        self.recurrent = torch.zeros(*rows, *state, dtype=wide, device=device)
        self.loads: dict[int, int] = {}  # row -> the checkpoint that it goes on from
        self.stores: dict[int, list[StateStore]] = {}  # of a row

    # --8<-- [start:state-pool-begin]
    def begin(self, row: int, start: int, end: int) -> list[tuple[int, int]]:
        """The request of `row` computes its tokens [start, end) in this step. Loads the
        state that it goes on from, and returns the stores: (tokens of this step before
        the copy, checkpoint)."""
        checkpoint = self.loads.pop(row, None)
        if checkpoint is not None:
            self.inputs[:, row] = self.inputs[:, checkpoint]
            self.recurrent[:, row] = self.recurrent[:, checkpoint]
        copies = []
        for store in self.stores.get(row, ()):
            if start < store.position <= end:
                copies.append((store.position - start, store.checkpoint))
                store.stored = store.position
                store.position += store.every
        return copies
        # --8<-- [end:state-pool-begin]

    @staticmethod
    def bytes_per_row(num_layers: int, config: LinearAttentionConfig, dtype: torch.dtype) -> int:
        wide = torch.promote_types(dtype, torch.float32)
        inputs = (config.conv_kernel - 1) * config.num_channels * dtype.itemsize
        state = config.num_v_heads * config.k_head_dim * config.v_head_dim * wide.itemsize
        return num_layers * (inputs + state)


@dataclass(frozen=True, eq=False)
class LinearLayer:
    """A layer, as the recurrence needs it."""

    layer_id: int  # its place in the pool of states
    config: LinearAttentionConfig
    conv_weight: torch.Tensor  # [num_channels, conv_kernel]; the last tap is that of the token itself


class LinearAttention(ABC):
    """Gated DeltaNet over the states of requests: `plan` once a step, `run` once a layer. (Yang et al.,
    arXiv 2412.06464.)

    Of a request, token t of `u` [num_tokens, num_channels] holds q, k and v of all heads before the
    convolution. With the inputs of earlier steps before them, and zeros before position 0:

    c[t] = silu(sum over taps j of conv_weight[:, j] * u[t - conv_kernel + 1 + j]); then (q, k, v) = c[t],
    each head of q and k divided by sqrt(its sum of squares + 1e-6), and q by sqrt(k_head_dim). Value head h
    reads key head h // (num_v_heads // num_k_heads). With the state S [k_head_dim, v_head_dim] of each value
    head:

    S = exp(g[t]) * S;  d = beta[t] * (v - Sᵀk);  S = S + k dᵀ;  o[t] = Sᵀq

    in float32 at least. The state before a request's first token is zero, whatever its row holds. After `run`
    the row of each request in the batch holds its state and its last conv_kernel - 1 inputs, and each
    checkpoint of `StatePool.begin` those of its position; no other row has changed, except row 0, which
    belongs to padding. Rows of other requests are not read: they may hold NaN.

    CUDA graphs are optional. An object with `supports_cuda_graph` gives, by `plan_for_graph`, a plan whose
    `run` may be captured once and replayed for other decode steps, each after a `replan`.
    """

    supports_cuda_graph: bool = False

    @abstractmethod
    def __init__(self, pool: StatePool) -> None: ...

    @abstractmethod
    def plan(self, forward_batch: ForwardBatch) -> Any:
        """Everything that depends on the batch but not on the layer. Meaningful to `run` of the same object,
        until the next `plan`. A request's tokens follow those that its row has seen: they begin at position
        seq_lens - extend_seq_lens. Calls `StatePool.begin` for the row of each request, once."""

    def plan_for_graph(self, num_requests: int) -> Any:
        """A plan for capturing decode steps of so many requests, called outside the capture. It stays valid
        beside any other plan of the same object, as long as the caller keeps it. Until the first `replan` all
        requests are padding. `run` with it never synchronises, and launches the same kernels at each replay.
        """
        raise ValueError(f"{type(self).__name__} does not run in CUDA graphs")

    def replan(self, plan: Any, forward_batch: ForwardBatch) -> None:
        """Brings a `plan_for_graph` up to date, before each replay and on its stream, without synchronising
        where `rows_cpu` is known. `forward_batch`: a DECODE batch of at most so many requests. The others of
        the plan are padding behind them: their tokens may hold anything, and their row is 0. Calls
        `StatePool.begin` as `plan` does. Overwrites what the last replay read, in stream order."""
        raise ValueError(f"{type(self).__name__} does not run in CUDA graphs")

    @abstractmethod
    def run(
        self, u: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, layer: LinearLayer, plan: Any
    ) -> torch.Tensor:
        """u [num_tokens, num_channels]; g (at most 0), beta [num_tokens, num_v_heads] float32 -> o
        [num_tokens, num_v_heads, v_head_dim] of u's dtype. Mutates the pool alone."""

    def for_batch(self, forward_batch: ForwardBatch) -> BatchLinearAttention:
        """What a model takes: this object, and its plan."""
        return BatchLinearAttention(self, self.plan(forward_batch))


@dataclass(frozen=True, eq=False)
class BatchLinearAttention:
    """What a model needs to compute linear attention during one step."""

    backend: LinearAttention
    plan: Any
