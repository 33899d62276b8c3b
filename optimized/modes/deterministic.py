"""Deterministic mode: the bits of an answer depend on the request alone.

Differs from reference: tokens are computed together, by kernels whose rows do not depend on each other. Each
sum has one order: GEMMs go through all columns (fixed_order_gemm.py), attention through the keys by position
(fixed_split_attention.py), linear attention goes token by token (delta_tokens.py), experts have one size of
tile. Norms, activations and the sum over experts already work row by row. Loses split-K, GEMVs, fused norms,
and the chunks of linear attention. Graphs, chunks and cache hits stay as they are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from diptych.optimized.kernels.recurrence.convolve import keep_inputs
from diptych.optimized.kernels.recurrence.delta_tokens import delta_tokens
from diptych.optimized.kernels.recurrence.step_tables import LinearSteps
from diptych.optimized.linear_attention import LinearAttention
from diptych.optimized.model_runner import ModelRunner
from diptych.optimized.sampler import Sampler
from diptych.shared.interfaces import AttentionBackend, CausalLM, TokenToKVPool
from diptych.shared.interfaces.linear_attention import LinearLayer
from diptych.shared.interfaces.model_runner import NO_FEATURES, RunnerFeatures
from diptych.shared.types import ForwardBatch, LogitsOutput, SampleOutput, SamplingBatchInfo


class DeterministicModelRunner(ModelRunner):
    num_logprob_rows = 1  # log-probabilities of a prompt: torch may sum several rows in another order

    # --8<-- [start:deterministic-model]
    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        kv_pool: TokenToKVPool,
        features: RunnerFeatures = NO_FEATURES,
    ) -> None:
        super().__init__(model, attention, kv_pool, features)
        module: Any
        for module in model.modules():
            if hasattr(module, "is_deterministic"):
                module.is_deterministic = True
        # --8<-- [end:deterministic-model]

    def forward(self, forward_batch: ForwardBatch) -> LogitsOutput:
        """Raises `ValueError` for a mask, whose order of keys is not that of positions."""
        if forward_batch.custom_mask is not None or forward_batch.tree_mask is not None:
            raise ValueError("a mask is not supported: deterministic=True supports causal attention")
        return super().forward(forward_batch)


class DeterministicSampler(Sampler):
    """A sampler whose log-probabilities do not depend on the batch. In the other sampler they do in the last
    bit, because greedy rows and rows with sampling or filters use kernels with different orders of summation.
    Here every batch runs both. Tokens never depend on the batch."""

    def sample(self, logits: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor) -> SampleOutput:
        if info.return_logprob:
            info = replace(info, is_all_greedy=False, needs_filter=True)
        return super().sample(logits, info, positions)


class DeterministicLinearAttention(LinearAttention):
    """Token by token in every kind of step, by one kernel."""

    is_deterministic = True

    def run(
        self, u: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, layer: LinearLayer, plan: LinearSteps
    ) -> torch.Tensor:
        config, rows = layer.config, self._rows(layer)
        g, beta = g.contiguous(), beta.contiguous()
        o = u.new_empty(len(u), config.num_v_heads, config.v_head_dim)
        delta_tokens(u, g, beta, o, rows, layer, plan, plan.num_single, plan.single)
        num_long = plan.num_requests - plan.num_single
        delta_tokens(u, g, beta, o, rows, layer, plan, num_long, plan.long)
        keep_inputs(u, g, beta, rows, plan)
        return o
