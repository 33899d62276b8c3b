"""Calling conventions: how libraries pass the inputs of an operation and return its results."""

from __future__ import annotations

from diptych.shared.tools.conformance.kernels import calls
from diptych.shared.tools.conformance.kernels.attention_likes import DECODE_LIKE, EXTEND_LIKE, MLA_LIKE
from diptych.shared.tools.conformance.kernels.collective_likes import all_reduce_like
from diptych.shared.tools.conformance.kernels.gemm_like import GEMM_LIKE
from diptych.shared.tools.conformance.kernels.layer_likes import LAYER_LIKES
from diptych.shared.tools.conformance.kernels.problem import Convention
from diptych.shared.tools.conformance.kernels.sampler_like import SAMPLER_LIKE
from diptych.shared.tools.conformance.kernels.verify_like import VERIFY_LIKE

LIKES = {
    like.name: like
    for like in (
        DECODE_LIKE, EXTEND_LIKE, MLA_LIKE, GEMM_LIKE, *LAYER_LIKES, SAMPLER_LIKE, VERIFY_LIKE,
        all_reduce_like(),
    )
}  # fmt: skip

_PAGES = "k, v [num_pages, page_size, num_kv_heads, head_dim]"
_Q = "q [num_tokens, num_qo_heads, head_dim]"
_JOINT = "top-k and top-p apply to the same distribution (joint); the token that crosses top_p is kept"
_CSR = "indptr int32 [batch + 1], indices int32 [live pages], last_page_len int32 [batch]"

CONVENTIONS: dict[str, tuple[Convention, ...]] = {
    "attention.decode": (
        Convention("torch", "f(q, k, v, page_table, lens, window_left=W) -> out",
                   f"{_Q}, {_PAGES}, page_table int32 [batch, max_pages], lens int32 [batch]; scores times "
                   "head_dim ** -0.5", calls.decode_torch, ("q",), takes_scale=False),
        Convention("flash-attn", "flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=, block_table=, "
                   "softmax_scale=, causal=True, window_size=(W, 0)) -> out",
                   f"q, out [batch, 1, num_qo_heads, head_dim], {_PAGES}, block_table int32 "
                   "[batch, max_pages]", calls.decode_flash_attn, ("q",)),
        Convention("flashinfer", "f(q, (k_cache, v_cache), indptr, indices, last_page_len, sm_scale=, "
                   "window_left=W) -> out", f"{_Q}, layout NHD: {_PAGES}; {_CSR}",
                   calls.decode_flashinfer, ("q",)),
        Convention("vllm", "paged_attention_v1(out, query, key_cache, value_cache, num_kv_heads, scale, "
                   "block_tables, seq_lens, block_size, max_seq_len, alibi_slopes, kv_cache_dtype, k_scale, "
                   "v_scale)",
                   "key_cache [num_blocks, num_kv_heads, head_dim / x, block_size, x] with 16 bytes in x "
                   "elements, value_cache [num_blocks, num_kv_heads, head_dim, block_size]",
                   calls.decode_vllm,
                   ("q",)),
        Convention("triton", "f(q, k_buffer, v_buffer, out, kv_indptr, kv_indices, sm_scale, window_left=W)",
                   f"{_Q}, k_buffer, v_buffer [num_slots, num_kv_heads, head_dim], kv_indptr int32 "
                   "[batch + 1], kv_indices int32 [live tokens]: slots", calls.decode_triton, ("q",)),
    ),
    "attention.extend": (
        Convention("torch", "f(q, k, v, page_table, lens, qo_indptr, window_left=W) -> out",
                   f"{_Q}, {_PAGES}, page_table int32 [batch, max_pages], lens int32 [batch] with the new "
                   "tokens, qo_indptr int32 [batch + 1]", calls.extend_torch, ("q",), takes_scale=False),
        Convention("flash-attn", "flash_attn_varlen_func(q, k, v, cu_seqlens_q=, cu_seqlens_k=, "
                   "max_seqlen_q=, max_seqlen_k=, softmax_scale=, causal=True, block_table=, "
                   "window_size=(W, 0)) -> out",
                   f"{_Q}, {_PAGES}, block_table int32 [batch, max_pages]", calls.extend_flash_attn, ("q",)),
        Convention("flashinfer", "f(q, (k_cache, v_cache), qo_indptr, indptr, indices, last_page_len, "
                   "causal=True, sm_scale=, window_left=W) -> out", f"{_Q}, layout NHD: {_PAGES}; {_CSR}",
                   calls.extend_flashinfer, ("q",)),
    ),
    "mla.decode": (
        Convention("torch", "f(q_nope, q_pe, ckv, kpe, page_table, lens, sm_scale) -> out",
                   "q_nope, out [batch, num_qo_heads, rank], q_pe [batch, num_qo_heads, rope_dim], ckv "
                   "[num_pages, page_size, rank], kpe [num_pages, page_size, rope_dim], page_table int32 "
                   "[batch, max_pages], lens int32 [batch]", calls.mla_torch, ("q", "ckv", "kpe")),
        Convention("flashinfer", "f(q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, kv_len_arr, "
                   "sm_scale=) -> out", "as torch, with kv_indptr int32 [batch + 1], kv_indices int32 [live "
                   "pages], kv_len_arr int32 [batch]", calls.mla_flashinfer, ("q", "ckv", "kpe")),
        Convention("flash-mla", "f(q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale=, "
                   "causal=True) -> out or (out, lse)",
                   "q [batch, 1, num_qo_heads, rank + rope_dim], k_cache [num_blocks, page_size, 1, rank + "
                   "rope_dim], out [batch, 1, num_qo_heads, rank]",
                   calls.mla_flash_mla),
    ),
    "gemm": (
        Convention("torch", "f(a, b) -> out", "a [num_tokens, size], b [out, size], out = a @ b.T "
                   "[num_tokens, out]", calls.gemm, ("a",)),
    ),
    "rms_norm": (
        Convention("torch", "rms_norm(input, normalized_shape, weight, eps) -> out",
                   "input, out [num_tokens, size], weight [size]", calls.norm_torch, ("x",)),
        Convention("flashinfer", "rmsnorm(input, weight, eps=) -> out",
                   "input, out [num_tokens, size], weight [size]", calls.norm_flashinfer, ("x",)),
        Convention("vllm", "rms_norm(out, input, weight, epsilon)",
                   "out, input [num_tokens, size], weight [size]", calls.norm_out),
    ),
    "add_rms_norm": (
        Convention("torch", "f(x, residual, weight, eps) -> (out, x + residual)",
                   "x, residual [num_tokens, size], weight [size]; nothing is modified", calls.add_norm_torch,
                   ("x",)),
        Convention("flashinfer", "fused_add_rmsnorm(input, residual, weight, eps)",
                   "input becomes the norm, residual the sum, in place", calls.add_norm_in_place),
        Convention("vllm", "fused_add_rms_norm(input, residual, weight, epsilon)",
                   "input becomes the norm, residual the sum, in place", calls.add_norm_in_place),
    ),
    "rope": (
        Convention("torch", "f(q, k, cos, sin) -> (q, k)",
                   "q, k [num_tokens, num_heads, head_dim], cos, sin float32 [num_tokens, rotary_dim / 2]; "
                   "nothing is modified", calls.rope_torch, ("q", "k", "cos", "sin")),
        Convention("flashinfer", "apply_rope_with_cos_sin_cache_inplace(positions, query, key, head_size, "
                   "cos_sin_cache, is_neox=True)", "query, key [num_tokens, num_heads * head_dim], in place; "
                   "cos_sin_cache float32 [max_positions, rotary_dim]", calls.rope_in_place),
        Convention("vllm", "rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox)",
                   "query, key [num_tokens, num_heads * head_dim], in place; cos_sin_cache float32 "
                   "[max_positions, rotary_dim]", calls.rope_in_place),
        Convention("flash-attn", "apply_rotary_emb(x, cos, sin, interleaved=False) -> out",
                   "x, out [1, num_tokens, num_heads, head_dim], cos, sin float32 [num_tokens, "
                   "rotary_dim / 2]", calls.rope_flash_attn),
    ),
    "silu_and_mul": (
        Convention("torch", "f(x) -> out", "x [num_tokens, 2 * size], out [num_tokens, size]",
                   calls.silu_torch,
                   ("x",)),
        Convention("flashinfer", "silu_and_mul(input) -> out",
                   "input [num_tokens, 2 * size], out [num_tokens, size]", calls.silu_torch),
        Convention("vllm", "silu_and_mul(out, x)", "out [num_tokens, size], x [num_tokens, 2 * size]",
                   calls.silu_out),
    ),
    "moe": (
        Convention("torch", "f(x, w13, w2, topk_weights, topk_ids) -> out",
                   "x [num_tokens, hidden], w13 [num_experts, 2 * intermediate, hidden], w2 [num_experts, "
                   "hidden, intermediate], topk_weights float32, topk_ids int32 [num_tokens, top_k]",
                   calls.moe_args, ("x",)),
        Convention("vllm", "fused_experts(hidden_states, w1, w2, topk_weights, topk_ids) -> out",
                   "as torch: w1 [num_experts, 2 * intermediate, hidden], w2 [num_experts, hidden, "
                   "intermediate]", calls.moe_args),
    ),
    "w8a8": (
        Convention("torch", "f(a, b, scale_a, scale_b, out_dtype) -> out",
                   "a int8 [num_tokens, size], b int8 [size, out], columns dense, scale_a float32 "
                   "[num_tokens, 1], scale_b float32 [1, out]", calls.scaled_gemm),
        Convention("vllm", "cutlass_scaled_mm(a, b, scale_a, scale_b, out_dtype) -> out",
                   "a int8 [num_tokens, size], b int8 [size, out], columns dense, scale_a float32 "
                   "[num_tokens, 1], scale_b float32 [1, out]", calls.scaled_gemm),
    ),
    "sampler": (
        Convention("torch", "f(logits, temperature, top_k, top_p) -> ids",
                   "logits float32 [num_rows, vocab_size], temperature, top_p float32, top_k int32, ids "
                   f"int32 or int64 [num_rows]; top_k is vocab_size where there is none; {_JOINT}",
                   calls.sampler_torch, ("logits",)),
        Convention("flashinfer", "top_k_top_p_sampling_from_probs(probs, top_k, top_p, "
                   "filter_apply_order='joint') -> ids", "probs float32 [num_rows, vocab_size], top_k int32, "
                   f"top_p float32, ids int32 or int64 [num_rows]; {_JOINT}", calls.sampler_flashinfer),
    ),
    "verify": (
        Convention("torch", "f(draft_probs, draft_token_ids, target_probs) -> output_token_ids",
                   "draft_probs float32 [num_rows, n, vocab_size], draft_token_ids int32 [num_rows, n], "
                   "target_probs float32 [num_rows, n + 1, vocab_size], output_token_ids int32 or int64 "
                   "[num_rows, n + 1]: accepted drafts, one more token, then -1", calls.verify_chain),
        Convention("flashinfer", "chain_speculative_sampling(draft_probs, draft_token_ids, target_probs) -> "
                   "(output_token_ids, ...)", "as torch; the other results are not checked",
                   calls.verify_chain),
    ),
    "all_reduce": (
        Convention("torch", "all_reduce(tensor, group=)",
                   "tensor [num_tokens, size] becomes the sum, in place; every rank is a process with one "
                   "tensor", calls.reduce_with("torch")),
        Convention("torch-functional", "all_reduce(tensor, 'sum', group) -> out",
                   "tensor, out [num_tokens, size]; the tensor is not modified",
                   calls.reduce_with("torch-functional")),
        Convention("vllm", "tensor_model_parallel_all_reduce(input_) -> out",
                   "input_, out [num_tokens, size]; the group is the default one of torch.distributed; the "
                   "input is not modified", calls.reduce_with("vllm")),
    ),
}  # fmt: skip


def operations_named(name: str) -> list[str]:
    """The operations with this full name, or of this group."""
    return [full for full in LIKES if name == full or name in full.split(".")]


def operation_of(name: str) -> str:
    """The full name of an operation. `mla` is short for `mla.decode`, the only one of its group. Raises
    `ValueError` for an unknown or ambiguous name."""
    matching = operations_named(name)
    if len(matching) != 1:
        raise ValueError(f"--like {name}: it can be {', '.join(matching or LIKES)}")
    return matching[0]


def convention_of(like: str, library: str) -> Convention:
    for convention in CONVENTIONS[like]:
        if convention.library == library:
            return convention
    known = ", ".join(each.library for each in CONVENTIONS[like])
    raise ValueError(f"--convention {library}: {like} has the conventions {known}")
