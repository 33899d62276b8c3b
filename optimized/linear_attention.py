"""Linear attention in Triton: a request of one new token is a step of the recurrence, prompts go in chunks.

Differs from reference: the convolution of all tokens is one launch. A state is read and written once a step.
Prompts are GEMMs over chunks of 64 tokens (kernels/recurrence/delta_chunks.py). Chunks end at
multiples of 64 from position 0, so a prompt that goes on from a checkpoint has the chunks of one that began
at 0. The plan of a step is one copy of integers, and decode steps run in CUDA graphs. It loses for prompts
of a few tokens: a chunk is padded to 64.
"""

from __future__ import annotations

import torch

from diptych.optimized.kernels.recurrence.convolve import convolve
from diptych.optimized.kernels.recurrence.delta_chunks import delta_chunks
from diptych.optimized.kernels.recurrence.delta_rule import delta_rule
from diptych.optimized.kernels.recurrence.step_tables import (
    LinearSteps,
    Tokens,
    decode_tables,
    load_tables,
    make_steps,
)
from diptych.shared.interfaces import linear_attention as interface
from diptych.shared.interfaces.linear_attention import LinearLayer, StatePool
from diptych.shared.types import ForwardBatch


class LinearAttention(interface.LinearAttention):
    supports_cuda_graph = True

    def __init__(self, pool: StatePool) -> None:
        self.pool = pool

    def plan(self, forward_batch: ForwardBatch) -> LinearSteps:
        return make_steps(self._begin(forward_batch), self.pool.inputs.device)

    def plan_for_graph(self, num_requests: int) -> LinearSteps:
        return decode_tables(num_requests, self.pool.inputs.device)

    def replan(self, plan: LinearSteps, forward_batch: ForwardBatch) -> None:
        load_tables(plan, self._begin(forward_batch))

    def _begin(self, batch: ForwardBatch) -> list[Tokens]:
        rows = batch.rows_cpu or batch.req_pool_indices.tolist()
        return [
            Tokens(row, end - num_new, end, self.pool.begin(row, end - num_new, end))
            for row, end, num_new in zip(rows, batch.seq_lens_cpu, batch.extend_seq_lens_cpu)
        ]

    def run(
        self, u: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, layer: LinearLayer, plan: LinearSteps
    ) -> torch.Tensor:
        # --8<-- [start:linear-attention-run]
        config, states = layer.config, self.pool.recurrent[layer.layer_id]
        g, beta = g.contiguous(), beta.contiguous()
        c = convolve(u, self.pool.inputs[layer.layer_id], layer.conv_weight, plan)
        o = u.new_empty(len(u), config.num_v_heads, config.v_head_dim)
        delta_rule(c, g, beta, o, states, config, plan)
        delta_chunks(c, g, beta, o, states, config, plan)
        return o
        # --8<-- [end:linear-attention-run]
