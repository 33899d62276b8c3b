"""Contract of the model runner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from diptych.shared.config import EngineConfig
from diptych.shared.interfaces.attention import AttentionBackend, BatchAttention
from diptych.shared.interfaces.host_pool import HostPool
from diptych.shared.interfaces.linear_attention import LinearAttention
from diptych.shared.interfaces.lora import LoraPool
from diptych.shared.interfaces.memory_pool import TokenToKVPool
from diptych.shared.interfaces.model import CausalLM
from diptych.shared.interfaces.sampler import Sampler
from diptych.shared.types import ForwardBatch, LogitsOutput, SampleOutput, SamplingBatchInfo


class RunModel(Protocol):
    """Runs a model: the hidden states after the final norm, of attention.rows or of all tokens, and those of
    `layers`, as in `ModelRunner.capture_hidden`."""

    def __call__(
        self, model: CausalLM, batch: ForwardBatch, attention: BatchAttention, layers: tuple[int, ...] | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...


@dataclass(frozen=True)
class RunnerFeatures:
    """What optional features of an engine add to a model runner: attributes of the same names."""

    capture_hidden: tuple[int, ...] | None = None  # at first
    lora: LoraPool | None = None
    host_pool: HostPool | None = None
    expert_manager: Any = None  # a `diptych.shared.parallel.expert_manager.ExpertManager`
    linear_attention: LinearAttention | None = None  # of a model that has layers of it
    run_model: RunModel | None = field(default=None, repr=False)  # None: that of the runner
    host_states: HostPool | None = field(default=None, repr=False)  # of linear attention


NO_FEATURES = RunnerFeatures()


class ModelRunner(ABC):
    """Runs one ForwardBatch: plans attention, runs the model, computes the logits of the step.

    `is_watched`: a recorder has hooks on the model's modules, or wraps `forward` or `sampler.sample`. While
    it is True, every step calls them; no graph is replayed in their place.

    `capture_hidden`: the layers whose inputs the drafter reads; may be set between any two steps. While it is
    not None, `LogitsOutput.hidden_states` holds, for every token of the step, the residual streams that go
    into these layers, side by side in this order, [num_tokens, len(capture_hidden) * hidden_size]; for (),
    the hidden states after the final norm [num_tokens, hidden_size]. They are valid as long as the logits.

    `lora`: the pool of adapters of the model, if there is one. Each batch but an IDLE one is given to its
    `prepare` before the forward pass. `host_pool`, `host_states`, `expert_manager`: likewise; their
    `before_pass` is called. `linear_attention`: planned for each batch after that, for a model that has
    layers of it. `run_model`: called for each batch that no graph replays.
    """

    model: CausalLM
    run_model: RunModel
    is_watched: bool = False
    accepts_seq_len_upper_bounds: bool = False  # that of its attention backend
    capture_hidden: tuple[int, ...] | None = None
    lora: LoraPool | None = None
    host_pool: HostPool | None = None
    host_states: HostPool | None = None
    expert_manager: Any = None
    linear_attention: LinearAttention | None = None
    compile_seconds: float = 0.0
    """of `prepare`: for compiling kernels before they are needed"""

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        kv_pool: TokenToKVPool,
        features: RunnerFeatures = NO_FEATURES,
    ) -> None:
        self.model = model
        self.attention = attention
        self.kv_pool = kv_pool
        self.accepts_seq_len_upper_bounds = attention.accepts_seq_len_upper_bounds
        self.capture_hidden = features.capture_hidden
        self.lora = features.lora
        self.host_pool = features.host_pool
        self.host_states = features.host_states
        self.expert_manager = features.expert_manager
        self.linear_attention = features.linear_attention
        if features.run_model is not None:
            self.run_model = features.run_model

    max_replayed_bs = 0
    """Most requests of a decode step that CUDA graphs replay, sampler included; known after `prepare`."""

    @abstractmethod
    def forward(self, forward_batch: ForwardBatch) -> LogitsOutput:
        """Logits of each request's last token (TARGET_VERIFY: of every token), and prompt log-probabilities
        for `input_logprob_rows`: raw log softmax over the first `num_token_ids` logits of the batch, no
        temperature. Writes the step's KV and nothing else, except that the dummy page may hold anything
        afterwards. Logits are float32 on the model's device; an IDLE batch gives zero rows. They are valid
        until the next call of `forward`, `forward_and_sample` or the drafter: copy them to keep them."""

    def prepare(  # noqa: B027 - there may be nothing to prepare
        self, config: EngineConfig, sampler: Sampler, num_token_ids: int
    ) -> None:
        """Called at most once, after the pools are made and before the first batch: the time to warm up and
        to capture CUDA graphs. With `config.cuda_graph_block_len`, passes of block diffusion with blocks of
        this length may be captured too. Results do not depend on it. May write the dummy page, and nothing
        else."""

    @abstractmethod
    def forward_and_sample(
        self, forward_batch: ForwardBatch, sampler: Sampler, info: SamplingBatchInfo, num_token_ids: int
    ) -> tuple[LogitsOutput, SampleOutput]:
        """`forward`, then `sampler.sample` of its logits (TARGET_VERIFY: of every node's), cut to the first
        `num_token_ids` columns: those beyond are padding rows of the head. One call, so that a graph may
        compute both; the results are the same. The sampled tokens are never overwritten."""

    @torch.inference_mode()
    def decode_steps(
        self,
        forward_batch: ForwardBatch,
        slots: torch.Tensor,
        sampler: Sampler,
        info: SamplingBatchInfo,
        num_token_ids: int,
        around: Callable[[ForwardBatch], AbstractContextManager[Any]] = nullcontext,
    ) -> torch.Tensor:
        """Several steps of a DECODE batch, each from the tokens that the step before it sampled: their ids
        [num_steps, bs] int64, on the model's device. slots [num_steps, bs] int64: where each step writes KV;
        those of the first are the batch's own. The CPU waits for no step. A row that gave no token (-1, after
        NaN) goes on from token 0, and what it gives has no meaning. `around`: entered for each step."""
        # --8<-- [start:decode-steps]
        token_ids: list[torch.Tensor] = []
        for out_cache_loc in slots:
            if token_ids:
                places = forward_batch.rope_positions
                forward_batch = replace(
                    forward_batch,
                    input_ids=token_ids[-1].clamp(min=0),
                    positions=forward_batch.positions + 1,
                    rope_positions=None if places is None else places + 1,
                    seq_lens=forward_batch.seq_lens + 1,
                    seq_lens_cpu=tuple(seq_len + 1 for seq_len in forward_batch.seq_lens_cpu),
                    out_cache_loc=out_cache_loc,
                )
            with around(forward_batch):  # and keep no logits: the next step overwrites them
                sampled = self.forward_and_sample(forward_batch, sampler, info, num_token_ids)[1]
            token_ids.append(sampled.next_token_ids)
        return torch.stack(token_ids)
        # --8<-- [end:decode-steps]
