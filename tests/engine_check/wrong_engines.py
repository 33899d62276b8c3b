"""Attention backends with one fault each, as user-provided components; a runner of the deterministic mode."""

from __future__ import annotations

import torch

from diptych.reference.attention import RequestPlan, TorchAttention
from diptych.reference.modes.deterministic import DeterministicModelRunner
from diptych.shared.types import ForwardBatch, LogitsOutput
from diptych.shared.types.attention import AttentionLayer


class ScaleOff(TorchAttention):
    """The scale of scores is 2 % too large."""

    def _run_request(self, q: torch.Tensor, layer: AttentionLayer, request: RequestPlan) -> torch.Tensor:
        return super()._run_request(q * 1.02, layer, request)


class FewBitKeys(TorchAttention):
    """K is rounded to 3 bits of mantissa when it is read."""

    def _keys_and_values(
        self, layer: AttentionLayer, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = super()._keys_and_values(layer, slots)
        return k.to(torch.float8_e4m3fn).to(k.dtype), v


class BiasedOutput(TorchAttention):
    """The output is 0.9 % too large."""

    def _run_request(self, q: torch.Tensor, layer: AttentionLayer, request: RequestPlan) -> torch.Tensor:
        return super()._run_request(q, layer, request) * 1.009


class Neighbours(TorchAttention):
    """In a batch of several requests, each output has a little of the batch's mean."""

    def run(self, q: torch.Tensor, layer: AttentionLayer, plan: list[RequestPlan], **more) -> torch.Tensor:
        output = super().run(q, layer, plan, **more)
        return output + 0.02 * output.mean(0, keepdim=True) if len(plan) > 1 else output


class LostPrefix(TorchAttention):
    """Queries behind a cached prefix do not see its first key."""

    def plan(self, forward_batch: ForwardBatch) -> list[RequestPlan]:
        plans = super().plan(forward_batch)
        found = []
        for i, each in enumerate(plans):
            num_queries = forward_batch.extend_seq_lens_cpu[i]
            cached = forward_batch.seq_lens_cpu[i] - num_queries
            visible = each.visible.clone()
            if forward_batch.forward_mode.is_prefill and cached:
                visible[:, 0] = False
            found.append(each._replace(visible=visible))
        return found


class NotANumber(TorchAttention):
    """One element of a long text's output is NaN."""

    def _run_request(self, q: torch.Tensor, layer: AttentionLayer, request: RequestPlan) -> torch.Tensor:
        output = super()._run_request(q, layer, request).clone()
        if len(request.slots) > 40:
            output[-1, 0, 0] = float("nan")
        return output


class SlightNeighbours(DeterministicModelRunner):
    """In a batch of several requests, logits have a last digit of the others: only equal bits show it."""

    def forward(self, forward_batch: ForwardBatch) -> LogitsOutput:
        found = super().forward(forward_batch)
        logits = found.next_token_logits
        return found._replace(next_token_logits=logits + 1e-7 * logits.mean(0)) if len(logits) > 1 else found
