"""Contract of linear attention: a state of fixed size for each request, in place of KV for each token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from diptych.shared.config.model import LinearAttentionConfig
from diptych.shared.types import ForwardBatch, ForwardMode


@dataclass
class StateStore:
    """An order to copy the state of a row into a checkpoint, when its request has come to a position."""

    checkpoint: int  # a row of the pool
    position: int  # number of tokens that the wanted state has seen
    every: int = 0  # then again so many tokens later, over the last copy; 0: once
    stored: int | None = None  # the position of the copy that is there
    is_sent: bool = False  # to another engine: not for the prefix cache


class StatePool:
    """For each row of req_to_token, and in each layer of linear attention, the last inputs of the convolution
    and the recurrent state. A row belongs to the request that has the row of req_to_token; row 0 to padding.
    Behind them are rows for checkpoints: copies of states that outlive their requests.

    `loads` and `stores` are orders for the next steps of a row. The plan of a step takes them with `begin`,
    so copies and steps come in one order on the stream of the model.

    With `num_nodes` there are verify steps, which leave states as they were: what the recurrence reads of
    their nodes is held, and the next step of the row begins with the accepted ones. So a rejected draft has
    never been in a state.
    """

    def __init__(
        self,
        num_rows: int,
        num_layers: int,
        config: LinearAttentionConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        num_checkpoints: int = 0,
        num_nodes: int = 0,
    ) -> None:
        """`num_rows`: of req_to_token, without row 0. `dtype`: of the inputs; states are float32 at least.
        `num_nodes`: the most that a verify step has of a request; 0: there are none."""
        self.config = config
        self.checkpoints = range(num_rows + 1, num_rows + 1 + num_checkpoints)
        rows = num_layers, self.checkpoints.stop
        wide = torch.promote_types(dtype, torch.float32)
        inputs = config.conv_kernel - 1, config.num_channels
        state = config.num_v_heads, config.k_head_dim, config.v_head_dim
        self.inputs = torch.zeros(*rows, *inputs, dtype=dtype, device=device)
        self.recurrent = torch.zeros(*rows, *state, dtype=wide, device=device)
        self.num_nodes = num_nodes
        nodes, gates = (num_layers, num_rows + 1, num_nodes), config.num_v_heads * (config.num_decays + 1)
        self.held_inputs = torch.zeros(*nodes, config.num_channels, dtype=dtype, device=device)
        self.held_gates = torch.zeros(*nodes, gates, dtype=wide, device=device)  # g, beta
        self.num_seen = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)  # tokens in the states
        self.loads: dict[int, int] = {}  # row -> the checkpoint that it goes on from
        self.stores: dict[int, list[StateStore]] = {}  # of a row

    # --8<-- [start:state-pool-begin]
    def begin(self, row: int, start: int, end: int) -> list[tuple[int, int]]:
        """The request of `row` computes its tokens [start, end) in this step. Loads the
        state that it goes on from, and returns the stores: (tokens of this step before
        the copy, checkpoint)."""
        checkpoint = self.loads.pop(row, None)
        if self.num_nodes and (checkpoint is not None or start == 0):
            self.num_seen[row] = start  # whatever an earlier request has left
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

    # --8<-- [start:state-pool-accepted]
    def num_accepted(self, batch: ForwardBatch) -> torch.Tensor:
        """[batch_size] int64: how many of the nodes that each row holds come before the
        tokens of this step. Called once a step, after `begin`. Without synchronising:
        the CPU need not know how many drafts of the last step were accepted."""
        rows, starts = batch.req_pool_indices, batch.seq_lens - batch.extend_seq_lens
        num_accepted = starts - self.num_seen[rows]
        is_verify = batch.forward_mode is ForwardMode.TARGET_VERIFY
        self.num_seen[rows] = starts if is_verify else batch.seq_lens
        return num_accepted.clamp(0, self.num_nodes)  # padding may have any
        # --8<-- [end:state-pool-accepted]

    @property
    def num_bytes_per_state(self) -> int:
        return self.inputs[:, 0].nbytes + self.recurrent[:, 0].nbytes

    def has_come(self, row: int, num_tokens: int) -> None:
        """The row has the state of so many tokens, which another engine has computed. Before `plan` of the
        request's first step."""
        self.num_seen[row] = num_tokens  # whatever an earlier request has left

    @staticmethod
    def bytes_per_row(
        num_layers: int, config: LinearAttentionConfig, dtype: torch.dtype, num_nodes: int = 0
    ) -> int:
        """Memory of a state, and of `num_nodes` held nodes."""
        wide = torch.promote_types(dtype, torch.float32)
        inputs = (config.conv_kernel - 1 + num_nodes) * config.num_channels * dtype.itemsize
        state = config.num_v_heads * config.k_head_dim * config.v_head_dim * wide.itemsize
        gates = num_nodes * config.num_v_heads * (config.num_decays + 1) * wide.itemsize
        return num_layers * (inputs + state + gates)


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

    in float32 at least. With `channel_decay` (KDA: Kimi Linear, arXiv 2510.26692) g has a number for each row
    of S, and not one for all. The state before a request's first token is zero, whatever its row holds. After
    `run` the row of each request in the batch holds its state and its last conv_kernel - 1 inputs, and each
    checkpoint of `StatePool.begin` those of its position; no other row has changed, except row 0, which
    belongs to padding. Rows of other requests are not read: they may hold NaN.

    In a TARGET_VERIFY step the tokens are nodes of a chain of drafts. Their outputs are those of any tokens,
    but after `run` the row holds the state before the first of them, and their u, g and beta are held. The
    next step of the request, of one token or another TARGET_VERIFY one, begins at a position that says how
    many of them were accepted (`StatePool.num_accepted`): these come before its tokens, and nothing is kept
    of the others.

    Drafts, CUDA graphs and decays of channels are optional. An object without `supports_drafts` gets no
    TARGET_VERIFY step, one without `supports_channel_decay` no config with `channel_decay`. One
    with `supports_cuda_graph` gives, by `plan_for_graph`, a plan whose `run` may be captured once and
    replayed for other steps of the same form, each after a `replan`.
    """

    supports_cuda_graph: bool = False
    supports_drafts: bool = False
    supports_channel_decay: bool = False
    is_deterministic: bool = False
    """The bits of an output and of a state depend on the request's tokens up to there alone: not on other
    requests, or on how its tokens, accepted drafts among them, are divided into steps."""

    @abstractmethod
    def __init__(self, pool: StatePool) -> None: ...

    @abstractmethod
    def plan(self, forward_batch: ForwardBatch) -> Any:
        """Everything that depends on the batch but not on the layer. Meaningful to `run` of the same object,
        until the next `plan`. A request's tokens follow those that its row has seen: they begin at position
        seq_lens - extend_seq_lens. Calls `StatePool.begin` for the row of each request, once; except in a
        TARGET_VERIFY step, which has no orders, and whose lengths on the CPU may be upper bounds."""

    def plan_for_graph(self, forward_batch: ForwardBatch) -> Any:
        """A plan for capturing steps of the form of a DECODE batch or of a TARGET_VERIFY one, called outside
        the capture. It stays valid beside any other plan of the same object, as long as the caller keeps it.
        Until the first `replan` all requests are padding. `run` with it never synchronises, and launches the
        same kernels at each replay."""
        raise ValueError(f"{type(self).__name__} does not run in CUDA graphs")

    def replan(self, plan: Any, forward_batch: ForwardBatch) -> None:
        """Brings a `plan_for_graph` up to date, before each replay and on its stream, without synchronising
        where `rows_cpu` is known. `forward_batch`: of the plan's form, with at most as many requests. The
        others of the plan are padding behind them: their tokens may hold anything, and their row is 0. Calls
        `StatePool.begin` as `plan` does. Overwrites what the last replay read, in stream order."""
        raise ValueError(f"{type(self).__name__} does not run in CUDA graphs")

    @abstractmethod
    def run(
        self, u: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, layer: LinearLayer, plan: Any
    ) -> torch.Tensor:
        """u [num_tokens, num_channels]; g (at most 0), beta [num_tokens, num_v_heads] float32; with
        `channel_decay` g [num_tokens, num_v_heads, k_head_dim] -> o [num_tokens, num_v_heads, v_head_dim] of
        u's dtype. Mutates the pool alone."""

    def for_batch(self, forward_batch: ForwardBatch) -> BatchLinearAttention:
        """What a model takes: this object, and its plan."""
        return BatchLinearAttention(self, self.plan(forward_batch))


@dataclass(frozen=True, eq=False)
class BatchLinearAttention:
    """What a model needs to compute linear attention during one step."""

    backend: LinearAttention
    plan: Any
