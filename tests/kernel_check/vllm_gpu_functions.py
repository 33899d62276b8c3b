"""vLLM's kernels for CUDA GPUs as functions, for `library_runs`: those that vLLM 0.26 takes on a Hopper GPU.

Its float32 attention and experts multiply in TF32, since their Triton kernels leave the precision to Triton.
This asks Triton for IEEE products, so that these kernels are checked in float32 too.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch


def gpu_functions(
    named: Callable[[str], Callable[..., Any]] | None = None,
) -> dict[tuple[str, str], Callable[..., Any]]:
    """(operation, convention) -> the function. `named("module:name")` is a function of vLLM, and
    `named("name")` an operator of its libraries."""
    named = named or _named
    flash_attn, unified = (
        named("vllm_flash_attn:flash_attn_varlen_func"),
        named("v1.attention.ops.triton_unified_attention:unified_attention"),
    )
    experts = named("model_executor.layers.fused_moe.fused_moe:fused_experts")
    limit_rows = named("v1.sample.ops.topk_topp_triton:apply_top_k_top_p_triton")
    random_sample = named("v1.sample.ops.topk_topp_sampler:random_sample")
    scaled_mm, flash_mla = named("_C.cutlass_scaled_mm"), named("_flashmla_C.dense_decode_fwd")

    def attend(q: Any, k: Any, v: Any, table: Any, lens: Any, starts: Any, scale: float,
               window: Sequence[int]) -> Any:  # fmt: skip
        """Hopper's FlashAttention; a Triton kernel in float32, as vLLM chooses."""
        check_attention(q, k)
        k, v = live(k, table, lens), live(v, table, lens)
        longest = int(starts.diff().max()), int(lens.max())
        if q.dtype == torch.float32:
            out = torch.empty_like(q)
            unified(q, k, v, out, starts, longest[0], lens, longest[1], scale, True, tuple(window), table,
                    0.0, None, None, None)  # fmt: skip
            return out
        return flash_attn(q, k, v, longest[0], starts, longest[1], seqused_k=lens, softmax_scale=scale,
                          causal=True, window_size=list(window), block_table=table, fa_version=3)  # fmt: skip

    def decode(q: Any, k: Any, v: Any, *, cache_seqlens: Any, block_table: Any, softmax_scale: float,
               causal: bool, window_size: Sequence[int] = (-1, -1)) -> Any:  # fmt: skip
        starts = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
        out = attend(q[:, 0], k, v, block_table, cache_seqlens, starts, softmax_scale, window_size)
        return out[:, None]

    def extend(q: Any, k: Any, v: Any, *, cu_seqlens_q: Any, cu_seqlens_k: Any, block_table: Any,
               softmax_scale: float, window_size: Sequence[int] = (-1, -1), **_: Any) -> Any:  # fmt: skip
        lens = cu_seqlens_k.diff()
        return attend(q, k, v, block_table, lens, cu_seqlens_q, softmax_scale, window_size)

    def latent(q: Any, k: Any, table: Any, lens: Any, head_dim_v: int, *, softmax_scale: float,
               causal: bool) -> Any:  # fmt: skip
        if q.dtype == torch.float32 or k.shape[1] != 64 or (q.shape[3], head_dim_v) != (576, 512):
            raise ValueError(f"unsupported: {q.dtype}, page size {k.shape[1]}, {q.shape[3]} dims")
        k = live(k, table, lens)
        return flash_mla(q, k, head_dim_v, lens, table, softmax_scale, causal, *[None] * 3)[0]

    def scaled(a: Any, b: Any, scale_a: Any, scale_b: Any, dtype: torch.dtype) -> Any:
        if b.shape[0] % 16 or b.shape[1] % 16:
            raise ValueError(f"unsupported: {tuple(b.shape)}, no multiples of 16")
        out = torch.empty(len(a), b.shape[1], dtype=dtype, device=a.device)
        scaled_mm(out, a, b, scale_a, scale_b, None)
        return out

    def sample(logits: Any, temperature: Any, top_k: Any, top_p: Any) -> Any:
        """vLLM's top-p counts the tokens of the top-k alone, which is another distribution."""
        is_limited, has_top_p = top_k < logits.shape[1], top_p < 1
        if bool((is_limited & has_top_p).any()):
            raise ValueError("unsupported: top-p of the whole distribution beside a top-k")
        k = top_k if bool(is_limited.any()) else None
        p = top_p if bool(has_top_p.any()) else None
        rows = limit_rows(logits / temperature[:, None], k, p)
        return random_sample(rows.softmax(-1), {})

    return {
        ("rms_norm", "vllm"): named("_C.rms_norm"),
        ("add_rms_norm", "vllm"): named("_C.fused_add_rms_norm"),
        ("rope", "vllm"): named("_C.rotary_embedding"),
        ("silu_and_mul", "vllm"): named("_C.silu_and_mul"),
        ("attention.decode", "flash-attn"): decode,
        ("attention.extend", "flash-attn"): extend,
        ("mla.decode", "flash-mla"): latent,
        ("moe", "vllm"): experts,
        ("w8a8", "vllm"): scaled,
        ("sampler", "torch"): sample,
    }


def live(cache: torch.Tensor, table: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
    """A copy with zeros in the slots without a token, as in vLLM's cache: a kernel may multiply them by 0."""
    page_size = cache.shape[1]
    at = torch.arange(table.shape[1] * page_size, device=cache.device)
    slots = (table[:, at // page_size] * page_size + at % page_size)[at < lens[:, None]].long()
    copy = torch.zeros_like(cache)
    copy.flatten(0, 1)[slots] = cache.flatten(0, 1)[slots]
    return copy


def check_attention(q: torch.Tensor, k: torch.Tensor) -> None:
    """Rows of q begin at multiples of 16 bytes, and pages have multiples of 16 tokens, as vLLM demands."""
    page_size, head_dim = k.shape[1], k.shape[3]
    is_aligned = q.stride(-1) == 1 and not any(
        each * q.element_size() % 16 for each in (q.storage_offset(), *q.stride()[:-1])
    )
    if page_size % 16 or head_dim % 8 or not is_aligned:
        raise ValueError(f"unsupported: page size {page_size}, head_dim {head_dim}, strides {q.stride()}")


def _named(name: str) -> Callable[..., Any]:
    """It is loaded when it is first called: one that is missing fails alone."""
    return lambda *args, **kwargs: _loaded(name)(*args, **kwargs)


@cache
def _loaded(name: str) -> Callable[..., Any]:
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    module, _, function = name.partition(":")
    if function:
        return getattr(importlib.import_module(f"vllm.{module}"), function)  # type: ignore[no-any-return]
    library, _, operator = name.partition(".")
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    file = {"_C": "_C_stable_libtorch"}.get(library, library)
    torch.ops.load_library(Path(spec.origin).with_name(f"{file}.abi3.so"))
    return getattr(getattr(torch.ops, library), operator)  # type: ignore[no-any-return]
