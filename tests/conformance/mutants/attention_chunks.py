"""Planted bugs in chunked local attention, and in what a backend refuses."""

from __future__ import annotations

from dataclasses import replace

import torch

from diptych.reference.attention import RequestPlan, TorchAttention
from tests.conformance.mutants.mutant import bugs_in, mutant_of


@mutant_of("attention")
class ChunksFromThePrefix(TorchAttention):
    """Chunks are counted from the end of the cached prefix, not from position 0."""

    def run(self, q, layer, plan, **more):
        if layer.attention_chunk > 0:
            plan = [self.masked(request, layer.attention_chunk) for request in plan]
        return super().run(q, replace(layer, attention_chunk=0), plan, **more)

    def masked(self, request: RequestPlan, chunk: int) -> RequestPlan:
        num_queries, num_keys = request.visible.shape
        positions = torch.arange(num_keys, device=request.visible.device) - (num_keys - num_queries)
        is_same = positions[-num_queries:, None] // chunk == positions // chunk
        return request._replace(visible=request.visible & is_same)


@mutant_of("attention")
class RefusesWhenItRuns(TorchAttention):
    """Layers with sinks are refused in the first step, when the engine has started."""

    def run(self, q, layer, plan, **more):
        if layer.sinks is not None:
            raise ValueError("sinks are not supported: this backend supports layers without them")
        return super().run(q, layer, plan, **more)


@mutant_of("attention")
class ChunksAsWindows(TorchAttention):
    """A chunk of c is taken for a window of c tokens."""

    def run(self, q, layer, plan, **more):
        if layer.attention_chunk > 0:
            layer = replace(layer, attention_chunk=0, sliding_window=layer.attention_chunk - 1)
        return super().run(q, layer, plan, **more)


@mutant_of("attention")
class BranchesCountSlots(TorchAttention):
    """In trees, chunks and windows count slots: those of siblings lie between a node and its ancestors."""

    def plan(self, forward_batch):
        return [request._replace(key_positions=None) for request in super().plan(forward_batch)]


bug = bugs_in("attention", "reference.attention:TorchAttention")
# fmt: off
bug("AnyNumberOfHeads", "Query heads that the KV heads do not divide are cut off.",
    ("shared.modeling.forward", "if layer.num_qo_heads % layer.num_kv_heads != 0:",
     "if layer.num_kv_heads < 1:"))
