"""Two backends as one: one for prefill, another for decoding and for verifying drafts.

Differs from reference: only in which backend computes a request. Prefill is compute bound, decoding bandwidth
bound, so the best kernel of the one is seldom the best of the other. In a mixed batch each backend gets its
requests and writes their rows of one output. CUDA graphs hold decoding and verification: only the second
backend need support them. Loses one call per layer, with a mixed batch two.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from diptych.optimized.mixed_batch import num_decoding, split_mixed
from diptych.shared import registry
from diptych.shared.interfaces import attention as interface
from diptych.shared.interfaces.memory_pool import ReqToTokenPool, TokenToKVPool
from diptych.shared.modeling.forward import attention_output
from diptych.shared.types import ForwardBatch, ForwardMode
from diptych.shared.types.attention import AttentionLayer


class Part(NamedTuple):
    """Consecutive requests of a batch, and their backend."""

    num_tokens: int
    backend: interface.AttentionBackend
    plan: Any


@dataclass(frozen=True, eq=False)
class HybridPlan:
    forward_batch: ForwardBatch
    parts: tuple[Part, ...]


class HybridAttention(interface.AttentionBackend):
    """Supports for each kind of batch what its backend supports. `prefill` and `decode` are names of the
    registry; `hybrid_of` makes a class of two."""

    prefill: str
    decode: str

    def __init__(self, req_to_token_pool: ReqToTokenPool, kv_pool: TokenToKVPool) -> None:
        self.prefill_backend, self.decode_backend = self._backends(req_to_token_pool, kv_pool)
        self.supports_cuda_graph = self.decode_backend.supports_cuda_graph
        self.runs_before_capture = self.decode_backend.runs_before_capture
        self.accepts_seq_len_upper_bounds = self.decode_backend.accepts_seq_len_upper_bounds
        self.supports_ragged_graphs = self.decode_backend.supports_ragged_graphs

    def check_layer(self, layer: AttentionLayer) -> None:
        self.prefill_backend.check_layer(layer)
        self.decode_backend.check_layer(layer)

    def beside(self) -> HybridAttention:
        """With backends beside those of this one, which may have been chosen after it was made."""
        other, pair = copy.copy(self), (self.prefill_backend, self.decode_backend)
        made = {backend: backend.beside() for backend in pair}
        other.prefill_backend, other.decode_backend = (made[backend] for backend in pair)
        return other

    def plan(self, forward_batch: ForwardBatch) -> HybridPlan:
        num_last = self._num_decoding(forward_batch)
        if num_last == 0:
            return self._whole(forward_batch, self._backend_for(forward_batch))
        prompts, decoding = split_mixed(forward_batch, num_last)
        if prompts.batch_size == 0:
            return self._whole(decoding, self.decode_backend)
        pairs = (prompts, self.prefill_backend), (decoding, self.decode_backend)
        parts = tuple(Part(batch.num_tokens, backend, backend.plan(batch)) for batch, backend in pairs)
        return HybridPlan(forward_batch, parts)

    def run(
        self,
        q: torch.Tensor,
        layer: AttentionLayer,
        plan: HybridPlan,
        *,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if len(plan.parts) == 1:
            return plan.parts[0].backend.run(q, layer, plan.parts[0].plan, k=k, v=v, out=out)
        output = attention_output(q, layer, out)
        start = 0
        for part in plan.parts:
            rows = slice(start, start + part.num_tokens)
            k_part, v_part = (None if x is None else x[rows] for x in (k, v))
            part.backend.run(q[rows], layer, part.plan, k=k_part, v=v_part, out=output[rows])
            start += part.num_tokens
        return output

    def plan_for_graph(self, forward_batch: ForwardBatch, max_seq_len: int) -> HybridPlan:
        backend = self._backend_for(forward_batch)
        plan = backend.plan_for_graph(forward_batch, max_seq_len)
        return HybridPlan(forward_batch, (Part(forward_batch.num_tokens, backend, plan),))

    def replan(self, plan: HybridPlan, forward_batch: ForwardBatch) -> None:
        [part] = plan.parts
        part.backend.replan(part.plan, forward_batch)

    def plan_ragged(self, forward_batch: ForwardBatch) -> HybridPlan:
        """The decode backend plans prompts too, because prompts beside decoding requests are short."""
        backend = self.decode_backend
        plan = backend.plan_ragged(forward_batch)
        return HybridPlan(forward_batch, (Part(forward_batch.num_tokens, backend, plan),))

    def _whole(self, forward_batch: ForwardBatch, backend: interface.AttentionBackend) -> HybridPlan:
        return HybridPlan(
            forward_batch, (Part(forward_batch.num_tokens, backend, backend.plan(forward_batch)),)
        )

    def _num_decoding(self, forward_batch: ForwardBatch) -> int:
        """The number of last requests of a mixed batch for the second backend."""
        is_mixed = forward_batch.forward_mode is ForwardMode.MIXED and forward_batch.custom_mask is None
        # One object may hold one plan only.
        if not is_mixed or self.prefill_backend is self.decode_backend:
            return 0
        return num_decoding(forward_batch)

    def _backends(
        self, req_to_token_pool: ReqToTokenPool, kv_pool: TokenToKVPool
    ) -> tuple[interface.AttentionBackend, interface.AttentionBackend]:
        """The two backends; one object if both names are the same."""
        made = {
            name: registry.load("attention", name)(req_to_token_pool, kv_pool)
            for name in (self.prefill, self.decode)
        }
        return made[self.prefill], made[self.decode]

    def _backend_for(self, forward_batch: ForwardBatch) -> interface.AttentionBackend:
        return self.prefill_backend if forward_batch.forward_mode.is_prefill else self.decode_backend


def hybrid_of(prefill: str, decode: str) -> type[HybridAttention]:
    """A class of two names of the registry."""
    name = f"HybridAttention[{prefill}+{decode}]"
    return type(name, (HybridAttention,), {"prefill": prefill, "decode": decode, "__module__": __name__})
