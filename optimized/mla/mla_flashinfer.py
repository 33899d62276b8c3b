"""Latent attention by FlashInfer's wrapper, absorbed, over the pool's rows.

Differs from reference: one wrapper computes decoding and prompts, in the absorbed form. It is planned on the
CPU, from the batch's lengths, when the first layer runs. Assumes a CUDA GPU, 16 bits, rows of 512 + 64, and
nvcc. Loses for long prompts, which are not expanded, and without CUDA graphs. Off a GPU the
tests check what the wrapper is given, with a stand-in of its signature.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch

from diptych.optimized.mla.mla_triton import absorb, project_values
from diptych.shared.interfaces.memory_pool import ReqToTokenPool, TokenToKVPool
from diptych.shared.interfaces.mla_attention import MLAAttentionBackend
from diptych.shared.modeling.forward import attention_output
from diptych.shared.to_device import to_device
from diptych.shared.types import ForwardBatch
from diptych.shared.types.attention import AttentionLayer, MLALayer

DTYPES = (torch.float16, torch.bfloat16)
ROW = 512, 64
WORKSPACE_BYTES = 128 * 2**20


@dataclass
class FlashInferMLAPlan:
    forward_batch: ForwardBatch
    slots: torch.Tensor  # int32, of all keys, request after request
    is_planned: bool = False  # by the first layer, which knows heads and scale


class FlashInferMLA(MLAAttentionBackend):
    """Supports float16 and bfloat16, kv_lora_rank 512 and qk_rope_head_dim 64, causal."""

    def __init__(self, req_to_token_pool: ReqToTokenPool, kv_pool: TokenToKVPool) -> None:
        self.check_device(kv_pool.device)
        rank = kv_pool.v_buffer(0).shape[-1]
        rope = kv_pool.k_buffer(0).shape[-1] - rank
        _refuse_unless(kv_pool.dtype in DTYPES, f"dtype {kv_pool.dtype}", "float16 and bfloat16")
        _refuse_unless(rank == ROW[0], f"kv_lora_rank {rank}", f"{ROW[0]}")
        _refuse_unless(rope == ROW[1], f"qk_rope_head_dim {rope}", f"{ROW[1]}")
        self.req_to_token_pool = req_to_token_pool
        self.kv_pool = kv_pool
        self._wrapper = self._new_wrapper()

    @staticmethod
    def check_device(device: torch.device) -> None:
        """Raise `ValueError` for a device that these kernels do not support."""
        _refuse_unless(device.type == "cuda", f"device {device.type}", "cuda")

    def plan(self, forward_batch: ForwardBatch) -> FlashInferMLAPlan:
        batch, device = forward_batch, self.kv_pool.device
        _refuse_unless(batch.custom_mask is None, "custom_mask", "causal batches")
        _refuse_unless(batch.tree_mask is None, "tree_mask", "causal batches")
        num_keys = sum(batch.seq_lens_cpu)
        starts = to_device(_indptr(batch.seq_lens_cpu), torch.int64, device)
        requests = torch.arange(batch.batch_size, device=device)
        requests = requests.repeat_interleave(batch.seq_lens, output_size=num_keys)
        positions = torch.arange(num_keys, device=device) - starts[requests]
        rows = batch.req_pool_indices[requests]
        return FlashInferMLAPlan(batch, self.req_to_token_pool.req_to_token[rows, positions])

    def run(
        self,
        q: torch.Tensor,
        layer: AttentionLayer,
        plan: FlashInferMLAPlan,
        *,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        _refuse_unless(q.dtype in DTYPES, f"dtype {q.dtype}", "float16 and bfloat16")
        mla, output = cast(MLALayer, layer), attention_output(q, layer, out)
        if q.shape[0] == 0:
            return output
        if not plan.is_planned:
            self._plan_wrapper(plan, mla, q.dtype)
            plan.is_planned = True
        q_latent, q_rope = absorb(q, mla).split(ROW, dim=-1)
        # Slots are pages of one token, whatever the pool's page size is.
        c, k_rope = self.kv_pool.k_buffer(layer.layer_id).split(ROW, dim=-1)
        latent = self._wrapper.run(q_latent, q_rope, c, k_rope)
        return project_values(latent, mla, out=output)

    def _plan_wrapper(self, plan: FlashInferMLAPlan, layer: MLALayer, dtype: torch.dtype) -> None:
        batch = plan.forward_batch
        self._wrapper.plan(
            torch.tensor(_indptr(batch.extend_seq_lens_cpu), dtype=torch.int32),
            torch.tensor(_indptr(batch.seq_lens_cpu), dtype=torch.int32),
            plan.slots,
            torch.tensor(batch.seq_lens_cpu, dtype=torch.int32),
            layer.num_qo_heads,
            *ROW,
            1,  # page_size
            max(batch.extend_seq_lens_cpu) > 1,  # causal
            layer.scale,
            dtype,
            self.kv_pool.dtype,
        )

    def _new_wrapper(self) -> Any:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.int8, device=self.kv_pool.device)
        return BatchMLAPagedAttentionWrapper(workspace)


def _indptr(lens: tuple[int, ...]) -> list[int]:
    return [sum(lens[:i]) for i in range(len(lens) + 1)]


def _refuse_unless(is_supported: bool, what: str, supported: str) -> None:
    if not is_supported:
        raise ValueError(f"{what}: not supported; FlashInferMLA supports {supported}")
