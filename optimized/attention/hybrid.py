"""Two backends as one: the first computes prompts, the second everything that repeats step after step.

Differs from reference: nothing but who computes. Prompts are bound by arithmetic, decoding by reading memory,
so the best kernel for the one is seldom the best for the other. Decoding, and verifying drafts, is also what
CUDA graphs hold: only the second backend need support them. Loses nothing but a call a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shared import registry
from shared.interfaces import attention as interface
from shared.interfaces.memory_pool import ReqToTokenPool, TokenToKVPool
from shared.types import ForwardBatch
from shared.types.attention import AttentionLayer


@dataclass(frozen=True, eq=False)
class HybridPlan:
    forward_batch: ForwardBatch
    backend: interface.AttentionBackend
    plan: Any


class HybridAttention(interface.AttentionBackend):
    """Supports, of each kind of batch, what the backend for it does. `prefill` and `decode` are names of the
    registry; `hybrid_of` makes a class of two."""

    prefill: str
    decode: str

    def __init__(self, req_to_token_pool: ReqToTokenPool, kv_pool: TokenToKVPool) -> None:
        self.prefill_backend, self.decode_backend = self._backends(req_to_token_pool, kv_pool)
        self.supports_cuda_graph = self.decode_backend.supports_cuda_graph
        self.takes_bounds = self.decode_backend.takes_bounds

    def plan(self, forward_batch: ForwardBatch) -> HybridPlan:
        backend = self._backend_for(forward_batch)
        return HybridPlan(forward_batch, backend, backend.plan(forward_batch))

    def run(
        self,
        q: torch.Tensor,
        layer: AttentionLayer,
        plan: HybridPlan,
        *,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return plan.backend.run(q, layer, plan.plan, k=k, v=v)

    def plan_for_graph(self, forward_batch: ForwardBatch, max_seq_len: int) -> HybridPlan:
        backend = self._backend_for(forward_batch)
        return HybridPlan(forward_batch, backend, backend.plan_for_graph(forward_batch, max_seq_len))

    def replan(self, plan: HybridPlan, forward_batch: ForwardBatch) -> None:
        plan.backend.replan(plan.plan, forward_batch)

    def _backends(
        self, req_to_token_pool: ReqToTokenPool, kv_pool: TokenToKVPool
    ) -> tuple[interface.AttentionBackend, interface.AttentionBackend]:
        """One object for both where both names are the same."""
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
