"""vLLM's functions for a GPU, with stand-ins for its kernels: their arguments and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.kernels.conventions import LIKES
from tests.kernel_check.library_runs import run_function
from tests.kernel_check.right import (
    RIGHT,
    add_norm_in_place,
    extend,
    flash_mla,
    moe,
    norm_vllm,
    rope_in_place,
    silu_vllm,
    w8a8,
)
from tests.kernel_check.vllm_gpu_functions import gpu_functions


def with_window(q: Any, k: Any, v: Any, starts: Any, lens: Any, table: Any, scale: float, window: Any) -> Any:
    """By the reference of decode, a token at a time: `extend` of `right` has no window."""
    if window[0] < 0:
        return extend(q, k, v, table, lens, starts, scale)
    return RIGHT["attention.decode", "torch"](q, k, v, table, lens, window[0], scale)


def flash_attn(q: Any, k: Any, v: Any, longest_q: int, starts: Any, longest_k: int, *, seqused_k: Any,
               softmax_scale: float, causal: bool, window_size: list[int], block_table: Any,
               fa_version: int) -> Any:  # fmt: skip
    assert (causal, fa_version, longest_k) == (True, 3, int(seqused_k.max()))
    assert q.dtype != torch.float32
    return with_window(q, k, v, starts, seqused_k, block_table, softmax_scale, window_size)


def unified(q: Any, k: Any, v: Any, out: Any, starts: Any, longest_q: int, lens: Any, longest_k: int,
            scale: float, causal: bool, window: Any, table: Any, *_: Any) -> None:  # fmt: skip
    assert q.dtype == torch.float32
    out.copy_(with_window(q, k, v, starts, lens, table, scale, window))


def limit_rows(logits: Any, k: Any, p: Any) -> Any:
    ordered, ids = logits.sort(-1, descending=True)
    before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
    kept = torch.ones_like(logits, dtype=torch.bool)
    if k is not None:
        kept &= torch.arange(logits.shape[1], device=logits.device) < k[:, None]
    if p is not None:
        kept &= before < p[:, None]
    return logits.scatter(1, ids, ordered.masked_fill(~kept, -torch.inf))


def dense_decode_fwd(q: Any, k: Any, dims: int, lens: Any, table: Any, scale: float, causal: bool,
                     metadata: None, num_splits: None, out: None) -> Any:  # fmt: skip
    """It has no defaults, as the operator of vLLM 0.26.0."""
    return flash_mla(q, k, table, lens, dims, softmax_scale=scale, causal=causal)


STAND_INS = {
    "vllm_flash_attn:flash_attn_varlen_func": flash_attn,
    "v1.attention.ops.triton_unified_attention:unified_attention": unified,
    "model_executor.layers.fused_moe.fused_moe:fused_experts": moe,
    "v1.sample.ops.topk_topp_triton:apply_top_k_top_p_triton": limit_rows,
    "v1.sample.ops.topk_topp_sampler:random_sample": lambda probs, _: torch.multinomial(probs, 1)[:, 0],
    "_C.cutlass_scaled_mm": lambda out, a, b, x, y, bias: out.copy_(w8a8(a, b, x, y, out.dtype)),
    "_flashmla_C.dense_decode_fwd": dense_decode_fwd,
    "_C.rms_norm": norm_vllm,
    "_C.fused_add_rms_norm": add_norm_in_place,
    "_C.rotary_embedding": rope_in_place,
    "_C.silu_and_mul": silu_vllm,
}
FUNCTIONS = gpu_functions(STAND_INS.__getitem__)
REFUSED = {"sampler": 3, "mla.decode": 9}


@pytest.mark.parametrize(("like", "form"), FUNCTIONS)
def test_right_kernels_have_no_alarm(like: str, form: str) -> None:
    checks, refused, alarms = run_function(LIKES[like], form, FUNCTIONS[like, form], 0)
    assert alarms == []
    assert checks > refused
    if not like.startswith("attention"):
        assert refused == REFUSED.get(like, 0)


def test_dead_slots_and_other_pages_hold_zeros() -> None:
    device = check_device()
    seen: list[torch.Tensor] = []

    def attend(q: Any, k: Any, v: Any, out: Any, *_: Any) -> None:
        seen.extend((k, v))

    named = {**STAND_INS, "v1.attention.ops.triton_unified_attention:unified_attention": attend}
    decode = gpu_functions(named.__getitem__)["attention.decode", "flash-attn"]
    cache = torch.full((3, 16, 1, 64), torch.nan, device=device)
    cache[2], cache[0, 0] = 2, 1
    decode(torch.zeros(1, 1, 1, 64, device=device), cache, cache,
           cache_seqlens=torch.tensor([17], dtype=torch.int32, device=device),
           block_table=torch.tensor([[2, 0]], dtype=torch.int32, device=device), softmax_scale=1.0,
           causal=True)  # fmt: skip
    for each in seen:
        assert each.sum((1, 2, 3)).tolist() == [64, 0, 2 * 16 * 64]
