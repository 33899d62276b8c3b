"""Calling conventions: how libraries pass the inputs of an operation and return its results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shared.conformance.kernels.attention_likes import DECODE_LIKE, EXTEND_LIKE, MLA_LIKE
from shared.conformance.kernels.collective_likes import all_reduce_like
from shared.conformance.kernels.draw_likes import SAMPLER_LIKE, VERIFY_LIKE, frequency, walk_results
from shared.conformance.kernels.layer_likes import LAYER_LIKES
from shared.conformance.kernels.problem import Call, Convention, Problem
from shared.conformance.poison import guarded, poisoned

LIKES = {
    like.name: like
    for like in (
        DECODE_LIKE, EXTEND_LIKE, MLA_LIKE, *LAYER_LIKES, SAMPLER_LIKE, VERIFY_LIKE, all_reduce_like()
    )
}  # fmt: skip


def unwritten(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """An output tensor with memory around it that must not be written."""
    return guarded(poisoned(shape, like.dtype, like.device))


def csr_pages(problem: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The page table as FlashInfer has it: indptr [batch + 1], page ids, tokens of each last page."""
    page_size, lens, table = problem["k"].shape[1], problem["lens"], problem["page_table"]
    counts = (lens + page_size - 1) // page_size
    indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    is_live = torch.arange(table.shape[1], device=table.device) < counts[:, None]
    return indptr, table[is_live], (lens - 1) % page_size + 1


def _window(problem: Problem, name: str = "window_left") -> dict[str, Any]:
    """The keyword argument of a sliding window, if the case has one."""
    window = problem.constants["window"]
    if window < 0:
        return {}
    return {name: (window, 0) if name == "window_size" else window}


def decode_torch(p: Problem) -> Call:
    return Call((p["q"], p["k"], p["v"], p["page_table"], p["lens"]), _window(p))


def decode_flash_attn(p: Problem) -> Call:
    kwargs = {
        "cache_seqlens": p["lens"],
        "block_table": p["page_table"],
        "softmax_scale": p.constants["scale"],
        "causal": True,
        **_window(p, "window_size"),
    }
    return Call((p["q"][:, None], p["k"], p["v"]), kwargs, results=lambda out: {"out": out[:, 0]})


def decode_flashinfer(p: Problem) -> Call:
    kwargs = {"sm_scale": p.constants["scale"], **_window(p)}
    return Call((p["q"], (p["k"], p["v"]), *csr_pages(p)), kwargs)


def decode_vllm(p: Problem) -> Call:
    k, v = p["k"], p["v"]
    x = 16 // k.element_size()
    key_cache = k.view(*k.shape[:3], -1, x).permute(0, 2, 3, 1, 4).contiguous()
    value_cache = v.permute(0, 2, 3, 1).contiguous()
    out = unwritten(p["q"].shape, p["q"])
    one = torch.ones((), device=k.device)
    args = (
        out, p["q"], key_cache, value_cache, k.shape[2], p.constants["scale"], p["page_table"], p["lens"],
        k.shape[1], int(p["lens"].max()), None, "auto", one, one,
    )  # fmt: skip
    if p.constants["window"] >= 0:
        raise ValueError("windows are not supported by this convention")
    return Call(args, written=(out,), results=lambda _: {"out": out})


def decode_triton(p: Problem) -> Call:
    """Pages of one token: indices are slots of a flat buffer."""
    page_size, lens = p["k"].shape[1], p["lens"]
    positions = torch.arange(p["page_table"].shape[1] * page_size, device=lens.device)
    slots = p["page_table"][:, positions // page_size] * page_size + positions % page_size
    indices = slots[positions < lens[:, None]]
    indptr = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).to(torch.int32)
    out = unwritten(p["q"].shape, p["q"])
    args = (p["q"], p["k"].flatten(0, 1), p["v"].flatten(0, 1), out, indptr, indices, p.constants["scale"])
    return Call(args, _window(p), written=(out,), results=lambda _: {"out": out})


def extend_torch(p: Problem) -> Call:
    return Call((p["q"], p["k"], p["v"], p["page_table"], p["lens"], p["qo_indptr"]), _window(p))


def extend_flash_attn(p: Problem) -> Call:
    starts, lens = p["qo_indptr"], p["lens"]
    kwargs = {
        "cu_seqlens_q": starts,
        "cu_seqlens_k": torch.nn.functional.pad(lens.cumsum(0), (1, 0)).to(torch.int32),
        "max_seqlen_q": int(starts.diff().max()),
        "max_seqlen_k": int(lens.max()),
        "softmax_scale": p.constants["scale"],
        "causal": True,
        "block_table": p["page_table"],
        **_window(p, "window_size"),
    }
    return Call((p["q"], p["k"], p["v"]), kwargs)


def extend_flashinfer(p: Problem) -> Call:
    kwargs = {"causal": True, "sm_scale": p.constants["scale"], **_window(p)}
    return Call((p["q"], (p["k"], p["v"]), p["qo_indptr"], *csr_pages(p)), kwargs)


def _latent(p: Problem) -> tuple[torch.Tensor, ...]:
    """q_nope, q_pe, ckv, kpe: parts of q and of the rows."""
    rank, rows = p.constants["rank"], p["k"][:, :, 0]
    return p["q"][..., :rank], p["q"][..., rank:], rows[..., :rank], rows[..., rank:]


def mla_torch(p: Problem) -> Call:
    return Call((*_latent(p), p["page_table"], p["lens"], p.constants["scale"]))


def mla_flashinfer(p: Problem) -> Call:
    indptr, indices, _ = csr_pages(p)
    return Call((*_latent(p), indptr, indices, p["lens"]), {"sm_scale": p.constants["scale"]})


def mla_flash_mla(p: Problem) -> Call:
    kwargs = {"softmax_scale": p.constants["scale"], "causal": True}
    return Call(
        (p["q"][:, None], p["k"], p["page_table"], p["lens"], p.constants["rank"]),
        kwargs,
        results=lambda y: {"out": (y[0] if isinstance(y, tuple) else y)[:, 0]},
    )


def sampler_torch(p: Problem) -> Call:
    args = (p["logits"], p["temperature"], p["top_k"], p["top_p"])
    return Call(args, results=lambda ids: {"frequency": frequency(ids, p["logits"].shape[1])})


def sampler_flashinfer(p: Problem) -> Call:
    probs = (p["logits"] / p["temperature"][:, None]).softmax(-1)
    return Call(
        (probs, p["top_k"], p["top_p"]),
        {"filter_apply_order": "joint"},
        results=lambda ids: {"frequency": frequency(ids, probs.shape[1])},
    )


def verify_chain(p: Problem) -> Call:
    args = (p["draft_probs"], p["draft_token_ids"], p["target_probs"])
    return Call(args, results=lambda ids: walk_results(ids, p["target_probs"].shape[2]))


def norm_torch(p: Problem) -> Call:
    return Call((p["x"], (p["x"].shape[-1],), p["weight"], p.constants["eps"]))


def norm_flashinfer(p: Problem) -> Call:
    return Call((p["x"], p["weight"]), {"eps": p.constants["eps"]})


def norm_out(p: Problem) -> Call:
    out = unwritten(p["x"].shape, p["x"])
    args = (out, p["x"], p["weight"], p.constants["eps"])
    return Call(args, written=(out,), results=lambda _: {"out": out})


def add_norm_torch(p: Problem) -> Call:
    args = (p["x"], p["residual"], p["weight"], p.constants["eps"])
    return Call(args, results=lambda returned: dict(zip(("out", "residual"), returned)))


def add_norm_in_place(p: Problem) -> Call:
    x, residual = guarded(p["x"]), guarded(p["residual"])
    args = (x, residual, p["weight"], p.constants["eps"])
    return Call(args, written=(x, residual), results=lambda _: {"out": x, "residual": residual})


def rope_torch(p: Problem) -> Call:
    cos, sin = p["cos_sin_cache"][p["positions"]].chunk(2, dim=1)
    return Call((p["q"], p["k"], cos, sin), results=lambda returned: dict(zip("qk", returned)))


def rope_in_place(p: Problem) -> Call:
    q, k = (guarded(p[name].flatten(1)) for name in "qk")
    head_dim = p["q"].shape[2]
    args = (p["positions"], q, k, head_dim, p["cos_sin_cache"], True)
    return Call(
        args,
        written=(q, k),
        results=lambda _: {"q": q.view(len(q), -1, head_dim), "k": k.view(len(k), -1, head_dim)},
    )


def rope_flash_attn(p: Problem) -> Call:
    """One tensor a call: q and k as heads of one."""
    cos, sin = (x.contiguous() for x in p["cos_sin_cache"][p["positions"]].chunk(2, dim=1))
    num_heads = p["q"].shape[1]
    qk = torch.cat((p["q"], p["k"]), dim=1)[None]
    return Call(
        (qk, cos, sin),
        {"interleaved": False},
        results=lambda y: {"q": y[0, :, :num_heads], "k": y[0, :, num_heads:]},
    )


def silu_torch(p: Problem) -> Call:
    return Call((p["x"],))


def silu_out(p: Problem) -> Call:
    out = unwritten((len(p["x"]), p["x"].shape[1] // 2), p["x"])
    return Call((out, p["x"]), written=(out,), results=lambda _: {"out": out})


def moe_args(p: Problem) -> Call:
    return Call((p["x"], p["w13"], p["w2"], p["topk_weights"], p["topk_ids"]))


def gemm_torch(p: Problem) -> Call:
    return Call((p["a"], p["b"].T, p["scale_a"], p["scale_b"].T, p.constants["dtype"]))


def reduce_with(form: str) -> Callable[[Problem], Call]:
    """The call of a function over ranks: each rank's tensors go to its process."""
    return lambda p: Call((p["x"], form, p.constants["layout"], p.constants["late"]))


_PAGES = "k, v [num_pages, page_size, num_kv_heads, head_dim]"
_Q = "q [num_tokens, num_qo_heads, head_dim]"
_CSR = "indptr int32 [batch + 1], indices int32 [live pages], last_page_len int32 [batch]"

CONVENTIONS: dict[str, tuple[Convention, ...]] = {
    "attention.decode": (
        Convention("torch", "f(q, k, v, page_table, lens, window_left=W) -> out",
                   f"{_Q}, {_PAGES}, page_table int32 [batch, max_pages], lens int32 [batch]; scores times "
                   "head_dim ** -0.5", decode_torch, ("q",), takes_scale=False),
        Convention("flash-attn", "flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=, block_table=, "
                   "softmax_scale=, causal=True, window_size=(W, 0)) -> out",
                   f"q, out [batch, 1, num_qo_heads, head_dim], {_PAGES}, block_table int32 "
                   "[batch, max_pages]", decode_flash_attn, ("q",)),
        Convention("flashinfer", "f(q, (k_cache, v_cache), indptr, indices, last_page_len, sm_scale=, "
                   "window_left=W) -> out", f"{_Q}, layout NHD: {_PAGES}; {_CSR}", decode_flashinfer, ("q",)),
        Convention("vllm", "paged_attention_v1(out, query, key_cache, value_cache, num_kv_heads, scale, "
                   "block_tables, seq_lens, block_size, max_seq_len, alibi_slopes, kv_cache_dtype, k_scale, "
                   "v_scale)",
                   "key_cache [num_blocks, num_kv_heads, head_dim / x, block_size, x] with 16 bytes in x "
                   "elements, value_cache [num_blocks, num_kv_heads, head_dim, block_size]", decode_vllm,
                   ("q",)),
        Convention("triton", "f(q, k_buffer, v_buffer, out, kv_indptr, kv_indices, sm_scale, window_left=W)",
                   f"{_Q}, k_buffer, v_buffer [num_slots, num_kv_heads, head_dim], kv_indptr int32 "
                   "[batch + 1], kv_indices int32 [live tokens]: slots", decode_triton, ("q",)),
    ),
    "attention.extend": (
        Convention("torch", "f(q, k, v, page_table, lens, qo_indptr, window_left=W) -> out",
                   f"{_Q}, {_PAGES}, page_table int32 [batch, max_pages], lens int32 [batch] with the new "
                   "tokens, qo_indptr int32 [batch + 1]", extend_torch, ("q",), takes_scale=False),
        Convention("flash-attn", "flash_attn_varlen_func(q, k, v, cu_seqlens_q=, cu_seqlens_k=, "
                   "max_seqlen_q=, max_seqlen_k=, softmax_scale=, causal=True, block_table=, "
                   "window_size=(W, 0)) -> out",
                   f"{_Q}, {_PAGES}, block_table int32 [batch, max_pages]", extend_flash_attn, ("q",)),
        Convention("flashinfer", "f(q, (k_cache, v_cache), qo_indptr, indptr, indices, last_page_len, "
                   "causal=True, sm_scale=, window_left=W) -> out", f"{_Q}, layout NHD: {_PAGES}; {_CSR}",
                   extend_flashinfer, ("q",)),
    ),
    "mla.decode": (
        Convention("torch", "f(q_nope, q_pe, ckv, kpe, page_table, lens, sm_scale) -> out",
                   "q_nope, out [batch, num_qo_heads, rank], q_pe [batch, num_qo_heads, rope_dim], ckv "
                   "[num_pages, page_size, rank], kpe [num_pages, page_size, rope_dim], page_table int32 "
                   "[batch, max_pages], lens int32 [batch]", mla_torch, ("q",)),
        Convention("flashinfer", "f(q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, kv_len_arr, "
                   "sm_scale=) -> out", "as torch, with kv_indptr int32 [batch + 1], kv_indices int32 [live "
                   "pages], kv_len_arr int32 [batch]", mla_flashinfer, ("q",)),
        Convention("flash-mla", "f(q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale=, "
                   "causal=True) -> out or (out, lse)",
                   "q [batch, 1, num_qo_heads, rank + rope_dim], k_cache [num_blocks, page_size, 1, rank + "
                   "rope_dim], out [batch, 1, num_qo_heads, rank]",
                   mla_flash_mla),
    ),
    "rms_norm": (
        Convention("torch", "rms_norm(input, normalized_shape, weight, eps) -> out",
                   "input, out [num_tokens, size], weight [size]", norm_torch, ("x",)),
        Convention("flashinfer", "rmsnorm(input, weight, eps=) -> out",
                   "input, out [num_tokens, size], weight [size]", norm_flashinfer, ("x",)),
        Convention("vllm", "rms_norm(out, input, weight, epsilon)",
                   "out, input [num_tokens, size], weight [size]", norm_out),
    ),
    "add_rms_norm": (
        Convention("torch", "f(x, residual, weight, eps) -> (out, x + residual)",
                   "x, residual [num_tokens, size], weight [size]; nothing is modified", add_norm_torch,
                   ("x",)),
        Convention("flashinfer", "fused_add_rmsnorm(input, residual, weight, eps)",
                   "input becomes the norm, residual the sum, in place", add_norm_in_place),
        Convention("vllm", "fused_add_rms_norm(input, residual, weight, epsilon)",
                   "input becomes the norm, residual the sum, in place", add_norm_in_place),
    ),
    "rope": (
        Convention("torch", "f(q, k, cos, sin) -> (q, k)",
                   "q, k [num_tokens, num_heads, head_dim], cos, sin float32 [num_tokens, rotary_dim / 2]; "
                   "nothing is modified", rope_torch, ("q", "k")),
        Convention("flashinfer", "apply_rope_with_cos_sin_cache_inplace(positions, query, key, head_size, "
                   "cos_sin_cache, is_neox=True)", "query, key [num_tokens, num_heads * head_dim], in place; "
                   "cos_sin_cache float32 [max_positions, rotary_dim]", rope_in_place),
        Convention("vllm", "rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox)",
                   "query, key [num_tokens, num_heads * head_dim], in place; cos_sin_cache float32 "
                   "[max_positions, rotary_dim]", rope_in_place),
        Convention("flash-attn", "apply_rotary_emb(x, cos, sin, interleaved=False) -> out",
                   "x, out [1, num_tokens, num_heads, head_dim], cos, sin float32 [num_tokens, "
                   "rotary_dim / 2]", rope_flash_attn),
    ),
    "silu_and_mul": (
        Convention("torch", "f(x) -> out", "x [num_tokens, 2 * size], out [num_tokens, size]", silu_torch,
                   ("x",)),
        Convention("flashinfer", "silu_and_mul(input) -> out",
                   "input [num_tokens, 2 * size], out [num_tokens, size]", silu_torch),
        Convention("vllm", "silu_and_mul(out, x)", "out [num_tokens, size], x [num_tokens, 2 * size]",
                   silu_out),
    ),
    "moe": (
        Convention("torch", "f(x, w13, w2, topk_weights, topk_ids) -> out",
                   "x [num_tokens, hidden], w13 [num_experts, 2 * intermediate, hidden], w2 [num_experts, "
                   "hidden, intermediate], topk_weights float32, topk_ids int32 [num_tokens, top_k]",
                   moe_args, ("x",)),
        Convention("vllm", "fused_experts(hidden_states, w1, w2, topk_weights, topk_ids) -> out",
                   "as torch: w1 [num_experts, 2 * intermediate, hidden], w2 [num_experts, hidden, "
                   "intermediate]", moe_args),
    ),
    "w8a8": (
        Convention("torch", "f(a, b, scale_a, scale_b, out_dtype) -> out",
                   "a int8 [num_tokens, size], b int8 [size, out], columns dense, scale_a float32 "
                   "[num_tokens, 1], scale_b float32 [1, out]", gemm_torch),
        Convention("vllm", "cutlass_scaled_mm(a, b, scale_a, scale_b, out_dtype) -> out",
                   "a int8 [num_tokens, size], b int8 [size, out], columns dense, scale_a float32 "
                   "[num_tokens, 1], scale_b float32 [1, out]", gemm_torch),
    ),
    "sampler": (
        Convention("torch", "f(logits, temperature, top_k, top_p) -> ids",
                   "logits float32 [num_rows, vocab_size], temperature, top_p float32, top_k int32, ids "
                   "[num_rows]; top_k is vocab_size where there is none", sampler_torch),
        Convention("flashinfer", "top_k_top_p_sampling_from_probs(probs, top_k, top_p, "
                   "filter_apply_order='joint') -> ids", "probs float32 [num_rows, vocab_size], top_k int32, "
                   "top_p float32, ids [num_rows]", sampler_flashinfer),
    ),
    "verify": (
        Convention("torch", "f(draft_probs, draft_token_ids, target_probs) -> output_token_ids",
                   "draft_probs float32 [num_rows, n, vocab_size], draft_token_ids int32 [num_rows, n], "
                   "target_probs float32 [num_rows, n + 1, vocab_size], output_token_ids [num_rows, n + 1], "
                   "-1 after the last token", verify_chain),
        Convention("flashinfer", "chain_speculative_sampling(draft_probs, draft_token_ids, target_probs) -> "
                   "(output_token_ids, ...)", "as torch; the other results are not checked", verify_chain),
    ),
    "all_reduce": (
        Convention("torch", "all_reduce(tensor, group=)",
                   "tensor [num_tokens, size] becomes the sum, in place; every rank is a process with one "
                   "tensor", reduce_with("torch")),
        Convention("torch-functional", "all_reduce(tensor, 'sum', group) -> out",
                   "tensor, out [num_tokens, size]; the tensor is not modified",
                   reduce_with("torch-functional")),
        Convention("vllm", "tensor_model_parallel_all_reduce(input_) -> out",
                   "input_, out [num_tokens, size]; the group is the default one of torch.distributed; the "
                   "input is not modified", reduce_with("vllm")),
    ),
}  # fmt: skip


def operation_of(name: str) -> str:
    """The full name of an operation. `mla` is short for `mla.decode`, the only one of its group. Raises
    `ValueError` for an unknown or ambiguous name."""
    matching = [full for full in LIKES if name == full or name in full.split(".")]
    if len(matching) != 1:
        raise ValueError(f"--like {name}: it can be {', '.join(matching or LIKES)}")
    return matching[0]


def convention_of(like: str, library: str) -> Convention:
    for convention in CONVENTIONS[like]:
        if convention.library == library:
            return convention
    known = ", ".join(each.library for each in CONVENTIONS[like])
    raise ValueError(f"--convention {library}: {like} has the conventions {known}")
