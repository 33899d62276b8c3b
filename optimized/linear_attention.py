"""Linear attention in Triton: a request of one new token is a step of the recurrence, prompts go in chunks.

Differs from reference: a step of single tokens is one launch, of which the models' own gates and norm are a
part (`run_gated`). The convolution of all tokens is one launch. A state is read and written once a step.
Prompts are GEMMs over chunks of 64 tokens (kernels/recurrence/delta_chunks.py). Chunks end at
multiples of 64 from position 0, so a prompt that goes on from a checkpoint has the chunks of one that began
at 0. The plan of a step is one copy of integers, and decode and verify steps run in CUDA graphs. How many
drafts were accepted is known on the device alone. It loses for prompts of a few tokens: a chunk is padded
to 64.
"""

from __future__ import annotations

import torch

from diptych.optimized.kernels.recurrence.convolve import convolve, keep_inputs
from diptych.optimized.kernels.recurrence.decode_step import Gates, decode_step, is_decode_step
from diptych.optimized.kernels.recurrence.delta_chunks import delta_chunks
from diptych.optimized.kernels.recurrence.delta_tokens import delta_tokens
from diptych.optimized.kernels.recurrence.step_tables import (
    LayerRows,
    LinearSteps,
    Tokens,
    decode_tables,
    load_rows,
    load_tables,
    make_steps,
    verify_tables,
)
from diptych.shared.interfaces import linear_attention as interface
from diptych.shared.interfaces.linear_attention import LinearLayer, StatePool
from diptych.shared.types import ForwardBatch, ForwardMode


class LinearAttention(interface.LinearAttention):
    supports_cuda_graph = True
    supports_drafts = True
    supports_channel_decay = True

    def __init__(self, pool: StatePool) -> None:
        self.pool = pool
        num_heads = pool.inputs.shape[1] * pool.config.num_k_heads
        self.arrived = torch.zeros(num_heads, dtype=torch.int32, device=pool.inputs.device)

    def plan(self, forward_batch: ForwardBatch) -> LinearSteps:
        if forward_batch.forward_mode is ForwardMode.TARGET_VERIFY:
            steps = self.plan_for_graph(forward_batch)
            self.replan(steps, forward_batch)
            return steps
        steps = make_steps(self._begin(forward_batch), self.pool.inputs.device)
        self._load_accepted(steps, forward_batch)
        return steps

    def plan_for_graph(self, forward_batch: ForwardBatch) -> LinearSteps:
        size, device = forward_batch.batch_size, self.pool.inputs.device
        if forward_batch.forward_mode is ForwardMode.TARGET_VERIFY:
            return verify_tables(size, forward_batch.extend_seq_lens_cpu[0], device)
        return decode_tables(size, device)

    def replan(self, plan: LinearSteps, forward_batch: ForwardBatch) -> None:
        if plan.num_nodes:
            load_rows(plan, forward_batch.req_pool_indices)
        else:
            load_tables(plan, self._begin(forward_batch))
        self._load_accepted(plan, forward_batch)

    def _load_accepted(self, plan: LinearSteps, forward_batch: ForwardBatch) -> None:
        if self.pool.num_nodes:
            plan.accepted[: forward_batch.batch_size] = self.pool.num_accepted(forward_batch)
            plan.accepted[forward_batch.batch_size :] = 0

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
        config, rows = layer.config, self._rows(layer)
        g, beta = g.contiguous(), beta.contiguous()
        if is_decode_step(rows, plan):
            return decode_step(u, g.flatten(1), beta, None, rows, self.arrived, layer, plan)
        o = u.new_empty(len(u), config.num_v_heads, config.v_head_dim)
        delta_tokens(u, g, beta, o, rows, layer, plan, plan.num_single, plan.single)
        if plan.num_single < plan.num_requests:
            c = convolve(u, rows, layer.conv_weight, plan)
            delta_chunks(c, g, beta, o, rows.states, config, plan)
        keep_inputs(u, g, beta, rows, plan)
        return o
        # --8<-- [end:linear-attention-run]

    def run_gated(
        self,
        u: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        gates: Gates,
        layer: LinearLayer,
        plan: LinearSteps,
    ) -> torch.Tensor | None:
        """Do what stands before and behind `run`, too, if the step is one launch; else None."""
        rows = self._rows(layer)
        if self.is_deterministic or not is_decode_step(rows, plan):
            return None
        return decode_step(u, a, b, gates, rows, self.arrived, layer, plan).flatten(1)

    def _rows(self, layer: LinearLayer) -> LayerRows:
        pool, i = self.pool, layer.layer_id
        return LayerRows(pool.inputs[i], pool.recurrent[i], pool.held_inputs[i], pool.held_gates[i])
