"""The layers of one stage as a model, which a model runner runs as it runs a whole one: padded, in CUDA
graphs, with its kernels.

What goes in comes from the stage before, through a buffer at a fixed address, which graphs read. What comes
out, where the final norm would be, is for the next stage: the runner captures it (`capture_hidden`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from diptych.optimized.graphs.decode_graph import captured_batch_sizes
from diptych.optimized.graphs.token_buffers import captured_token_counts
from diptych.shared.config import EngineConfig
from diptych.shared.interfaces import CausalLM, Sampler
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.parallel.alone import ALONE
from diptych.shared.types import SampleOutput, SamplingBatchInfo


class Entry:
    """What a stage computes from: the hidden states that were received last, [num_tokens, hidden_size]."""

    def __init__(self, config: EngineConfig, model: CausalLM) -> None:
        sizes = captured_batch_sizes(config) + captured_token_counts(config, model.config)
        like = next(model.parameters())
        self.buffer = like.new_zeros(max(sizes), model.config.hidden_size)
        self._num_filled = 0  # rows of the buffer that may be other than zero
        self._large: torch.Tensor | None = None  # more rows than the buffer has: no graph computes them

    # --8<-- [start:entry-buffer]
    def load(self, x: torch.Tensor) -> None:
        """x is kept until the next call. Rows behind it are zero: padding computes no
        NaN."""
        n = x.shape[0]
        self._large = x if n > self.buffer.shape[0] else None
        if self._large is None:
            self.buffer[:n].copy_(x)
            self.buffer[n : self._num_filled].zero_()
            self._num_filled = n

    def rows(self, num_tokens: int) -> torch.Tensor:
        """A copy, which the first layer may overwrite. Zeros where nothing of this size
        was received."""
        if num_tokens <= self.buffer.shape[0]:
            return self.buffer[:num_tokens].clone()
        if self._large is None:
            return self.buffer.new_zeros(num_tokens, self.buffer.shape[1])
        return self._large

    # --8<-- [end:entry-buffer]


class StageModel(CausalLM):
    """`whole`: a model that has the layers of a stage, and embedding, norm and head where its stage uses
    them. Logits of other stages than the last have one column, which nothing reads."""

    def __init__(self, whole: CausalLM, entry: Entry | None, is_last: bool) -> None:
        """`entry`: None on the first stage."""
        nn.Module.__init__(self)
        self.whole: Any = whole
        self.config = whole.config
        self.tp = getattr(whole, "tp", ALONE)
        self.entry = entry
        self.is_last = is_last
        self.selects_rows = whole.selects_rows
        if not is_last:
            parts: Any = whole
            parts.model.norm = PassOn()

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: BatchAttention,
        captured: dict[int, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        more = {} if self.entry is None else {"input_embeds": self.entry.rows(input_ids.shape[0])}
        hidden_states: torch.Tensor = self.whole(input_ids, positions, attention, captured, **more)
        return hidden_states

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.whole.embed(input_ids)
        return embedded

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if not self.is_last:
            return hidden_states.new_zeros(hidden_states.shape[0], 1, dtype=torch.float32)
        logits: torch.Tensor = self.whole.compute_logits(hidden_states)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.whole.load_weights(weights)


class PassOn(nn.Module):
    """Takes the place of the final norm: the residual stream goes on as it is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def add_and_norm(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return total, total


class NoSampler(Sampler):
    """The sampler of stages that have no logits, for their rehearsal and graphs."""

    def sample(self, logits: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor) -> SampleOutput:
        return SampleOutput(torch.zeros_like(positions))
