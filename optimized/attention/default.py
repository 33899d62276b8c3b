"""The default attention backends, chosen by measurements on each GPU architecture.

Differs from reference: it chooses and computes nothing. Assumes that the backend measured as fastest
(docs/lab/attention.md) is fastest on other GPUs of the architecture. Chooses by the pool's dtype and
head_dim, and for each batch by its tokens per request. Loses for workloads unlike the measured ones; name a
backend for them.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import Any, NamedTuple

import torch

from diptych.optimized.attention.hybrid import HybridAttention, HybridPlan
from diptych.shared.interfaces import attention as interface
from diptych.shared.interfaces.memory_pool import ReqToTokenPool, TokenToKVPool
from diptych.shared.types import ForwardBatch
from diptych.shared.types.attention import FP8_TYPES, AttentionLayer

MIN_TOKENS_PER_REQUEST = 64
"""The mean number of new tokens per request from which the prefill backend is used. Smaller batches are more
like decoding: FlashAttention 3 fills a tile of 128 rows with one request's tokens of one query head, and
reads its keys once for each query head. (Measured: 32 tokens are slower, 128 faster.)"""


class Choice(NamedTuple):
    prefill: str
    decode: str
    reason: str

    def __str__(self) -> str:
        names = self.prefill if self.prefill == self.decode else f"{self.prefill}+{self.decode}"
        return f"{names}: {self.reason}"


def can_compile() -> bool:
    """Whether FlashInfer finds nvcc, or brings its kernels compiled."""
    return can_run_nvcc() or importlib.util.find_spec("flashinfer_jit_cache") is not None


def can_run_nvcc() -> bool:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return shutil.which("nvcc") is not None or os.path.exists(os.path.join(home, "bin", "nvcc"))


def _is_refused(layer: AttentionLayer) -> bool:
    """Whether FlashInfer's backends refuse the layer."""
    return layer.sinks is not None or layer.attention_chunk > 0


class DefaultAttention(HybridAttention):
    """The default backend. It supports every layer that TritonAttention supports, which computes the layers
    that the other backend refuses."""

    @staticmethod
    def choose(device: torch.device, dtype: torch.dtype = torch.bfloat16, head_dim: int = 128) -> Choice:
        """Choose the backends for a KV pool on a device."""
        if device.type != "cuda":
            return Choice("triton", "triton", "no CUDA GPU: Triton's interpreter")
        if importlib.util.find_spec("flashinfer") is None:
            return Choice("triton", "triton", "FlashInfer is not installed: pip install flashinfer-python")
        if not can_compile():
            return Choice("triton", "triton", "no nvcc, which compiles FlashInfer's kernels")
        if dtype in FP8_TYPES:
            return Choice("triton", "triton", "FlashAttention 3 takes no FP8 KV; others are not measured")
        if dtype not in (torch.float16, torch.bfloat16) or head_dim not in (64, 128, 256):
            return Choice("triton", "triton", f"FlashInfer has no kernels for {dtype}, head_dim {head_dim}")
        major, minor = torch.cuda.get_device_capability(device)
        if major == 9:
            return Choice("fa3", "triton", "the fastest of each, as measured on an H200")
        return Choice(
            "flashinfer", "triton", f"not measured on sm_{major}{minor}: as on Hopper GPUs, less fa3"
        )

    def __init__(self, req_to_token_pool: ReqToTokenPool, kv_pool: TokenToKVPool) -> None:
        self.choice = self.choose(kv_pool.device, kv_pool.dtype, kv_pool.largest_heads[1])
        self.prefill, self.decode = self.choice.prefill, self.choice.decode
        self.missing: list[Any] = []  # modules of FlashInfer, a `flashinfer_build.Module` each
        super().__init__(req_to_token_pool, kv_pool)

    def check_layer(self, layer: AttentionLayer) -> None:
        """Layers whose module of FlashInfer is not compiled are not waited for: then no layer uses it, until
        the next start. Within a run attention does not change, so that a prompt's bits do not depend on the
        time."""
        self.decode_backend.check_layer(layer)  # which computes the layers that the other one refuses
        module_of = getattr(self.prefill_backend, "prefill_module", None)
        if module_of is None or _is_refused(layer):
            return
        module = module_of(layer)
        if module not in self.missing and not module.is_built:
            self.missing.append(module)

    def prepare(self) -> None:
        """Compile missing modules in the background, and do without them."""
        if self.missing:
            from diptych.optimized.attention.flashinfer_build import build_in_background

            if can_run_nvcc():
                build_in_background(self.missing)
            self.choice = Choice(self.decode, self.decode, "FlashInfer's module is not compiled")
            self.prefill, self.prefill_backend = self.decode, self.decode_backend

    def _backend_for(self, forward_batch: ForwardBatch) -> interface.AttentionBackend:
        if forward_batch.num_tokens < MIN_TOKENS_PER_REQUEST * forward_batch.batch_size:
            return self.decode_backend
        return super()._backend_for(forward_batch)

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
        if _is_refused(layer) and plan.parts[0].backend is not self.decode_backend:
            decode_plan = self.decode_backend.plan(plan.forward_batch)
            return self.decode_backend.run(q, layer, decode_plan, k=k, v=v, out=out)
        return super().run(q, layer, plan, k=k, v=v, out=out)
