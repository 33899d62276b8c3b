"""Right functions in plain torch, one for each operation and convention."""

from __future__ import annotations

from typing import Any

import torch

from docs.examples.my_kernels import paged_decode as decode
from docs.examples.my_kernels import rms_norm, rope, silu_and_mul


def paged_decode(
    q: Any, k: Any, v: Any, table: Any, lens: Any, window_left: int = -1, scale: float | None = None
) -> Any:
    """With any scale: q in float32 keeps it exact."""
    factor = 1.0 if scale is None else scale * q.shape[-1] ** 0.5
    return decode(q.float() * factor, k, v, table, lens, window_left).to(q.dtype)


def decode_without_window(q: Any, k: Any, v: Any, table: Any, lens: Any) -> Any:
    return decode(q, k, v, table, lens)


def decode_flash_attn(
    q: Any, k_cache: Any, v_cache: Any, *, cache_seqlens: Any, block_table: Any, softmax_scale: float,
    causal: bool, window_size: tuple[int, int] = (-1, -1),
) -> Any:  # fmt: skip
    assert causal
    out = paged_decode(q[:, 0], k_cache, v_cache, block_table, cache_seqlens, window_size[0], softmax_scale)
    return out[:, None]


def table_of(indptr: Any, indices: Any) -> Any:
    """Rows of page ids, padded with the row's first."""
    rows = [indices[a:b] for a, b in zip(indptr.tolist(), indptr.tolist()[1:])]
    longest = max(map(len, rows))
    return torch.stack([torch.cat((row, row[:1].expand(longest - len(row)))) for row in rows])


def decode_flashinfer(
    q: Any, kv: Any, indptr: Any, indices: Any, last: Any, *, sm_scale: float, window_left: int = -1
) -> Any:
    lens = (indptr.diff() - 1) * kv[0].shape[1] + last
    return paged_decode(q, *kv, table_of(indptr, indices), lens, window_left, sm_scale)  # type: ignore[call-arg]


def decode_triton(
    q: Any, k: Any, v: Any, out: Any, indptr: Any, indices: Any, scale: float, window_left: int = -1
) -> None:
    out.copy_(
        paged_decode(q, k[:, None], v[:, None], table_of(indptr, indices), indptr.diff(), window_left, scale)
    )


def decode_vllm(
    out: Any, q: Any, key_cache: Any, value_cache: Any, num_kv_heads: int, scale: float, tables: Any,
    lens: Any, block_size: int, max_len: int, alibi: None, kind: str, k_scale: Any, v_scale: Any,
) -> None:  # fmt: skip
    k = key_cache.permute(0, 3, 1, 2, 4).flatten(3)
    v = value_cache.permute(0, 3, 1, 2)
    assert k.shape[1:3] == (block_size, num_kv_heads)
    assert max_len == lens.max()
    out.copy_(paged_decode(q, k, v, tables, lens, scale=scale))


def extend(
    q: Any, k: Any, v: Any, page_table: Any, lens: Any, qo_indptr: Any, scale: float | None = None
) -> Any:
    output, starts = torch.empty_like(q), qo_indptr.tolist()
    for i, length in enumerate(lens.tolist()):
        rows = slice(starts[i], starts[i + 1])
        keys, values = (
            x[page_table[i]].flatten(0, 1)[:length].float().repeat_interleave(q.shape[1] // x.shape[2], 1)
            for x in (k, v)
        )
        scores = torch.einsum("mhd,nhd->hmn", q[rows].float(), keys) * (scale or q.shape[2] ** -0.5)
        is_hidden = torch.ones_like(scores[0], dtype=torch.bool).triu(length - scores.shape[1] + 1)
        output[rows] = torch.einsum(
            "hmn,nhd->mhd", scores.masked_fill(is_hidden, -torch.inf).softmax(-1), values
        )
    return output


def extend_flash_attn(
    q: Any, k: Any, v: Any, *, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
    softmax_scale: float, causal: bool, block_table: Any,
) -> Any:  # fmt: skip
    return extend(q, k, v, block_table, cu_seqlens_k.diff(), cu_seqlens_q, softmax_scale)


def extend_flashinfer(
    q: Any, kv: Any, qo_indptr: Any, indptr: Any, indices: Any, last: Any, *, causal: bool, sm_scale: float
) -> Any:
    lens = (indptr.diff() - 1) * kv[0].shape[1] + last
    return extend(q, *kv, table_of(indptr, indices), lens, qo_indptr, sm_scale)  # type: ignore[call-arg]


def mla(q_nope: Any, q_pe: Any, ckv: Any, kpe: Any, table: Any, lens: Any, sm_scale: float) -> Any:
    q, k = torch.cat((q_nope, q_pe), -1), torch.cat((ckv, kpe), -1)[:, :, None]
    return paged_decode(q, k, k, table, lens, scale=sm_scale)[..., : q_nope.shape[-1]]


def mla_flashinfer(
    q_nope: Any, q_pe: Any, ckv: Any, kpe: Any, indptr: Any, indices: Any, lens: Any, *, sm_scale: float
) -> Any:
    return mla(q_nope, q_pe, ckv, kpe, table_of(indptr, indices), lens, sm_scale)


def flash_mla(
    q: Any, k: Any, table: Any, lens: Any, head_dim_v: int, *, softmax_scale: float, causal: bool
) -> Any:
    return paged_decode(q[:, 0], k, k, table, lens, scale=softmax_scale)[:, None, :, :head_dim_v], None


def dense_rms_norm(x: Any, shape: Any, weight: Any, eps: float) -> Any:
    if not x.is_contiguous():
        raise ValueError("x must be contiguous")
    return rms_norm(x, shape, weight, eps)


def norm_flashinfer(x: Any, weight: Any, *, eps: float) -> Any:
    return rms_norm(x, (), weight, eps)


def norm_vllm(out: Any, x: Any, weight: Any, eps: float) -> None:
    out.copy_(rms_norm(x, (), weight, eps))


def add_norm(x: Any, residual: Any, weight: Any, eps: float) -> Any:
    total = x + residual
    return rms_norm(total, (), weight, eps), total


def add_norm_in_place(x: Any, residual: Any, weight: Any, eps: float) -> None:
    residual += x
    x.copy_(rms_norm(residual, (), weight, eps))


def rope_in_place(positions: Any, q: Any, k: Any, head_dim: int, cache: Any, is_neox: bool) -> None:
    cos, sin = cache[positions].chunk(2, dim=-1)
    heads = (x.view(len(x), -1, head_dim) for x in (q, k))
    for x, y in zip((q, k), rope(*heads, cos, sin)):  # type: ignore[call-arg]
        x.copy_(y.flatten(1))


def rope_flash_attn(x: Any, cos: Any, sin: Any, *, interleaved: bool) -> Any:
    return rope(x[0], x[0], cos, sin)[0][None]


def silu_vllm(out: Any, x: Any) -> None:
    out.copy_(silu_and_mul(x))


def moe(x: Any, w13: Any, w2: Any, topk_weights: Any, topk_ids: Any) -> Any:
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in topk_ids.unique().tolist():
        tokens, choice = torch.where(topk_ids == expert)
        gate, up = (x[tokens].float() @ w13[expert].float().T).chunk(2, dim=-1)
        y = (torch.nn.functional.silu(gate) * up) @ w2[expert].float().T
        out.index_add_(0, tokens, y * topk_weights[tokens, choice, None])
    return out.to(x.dtype)


def w8a8(a: Any, b: Any, scale_a: Any, scale_b: Any, dtype: torch.dtype) -> Any:
    return ((a.int() @ b.int()).float() * scale_a * scale_b).to(dtype)


def sample_from(probs: Any, top_k: Any, top_p: Any, *, filter_apply_order: str = "joint") -> Any:
    assert filter_apply_order == "joint"
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    is_kept = torch.arange(probs.shape[1], device=probs.device) < top_k[:, None]
    is_kept &= (before < top_p[:, None]) | (top_p == 1)[:, None]
    drawn = torch.multinomial(ordered * is_kept, 1)
    return ids.gather(1, drawn)[:, 0]


def sample(logits: Any, temperature: Any, top_k: Any, top_p: Any) -> Any:
    return sample_from((logits / temperature[:, None]).softmax(-1), top_k, top_p)


def verify(draft_probs: Any, draft_ids: Any, target_probs: Any, mistake: str = "") -> Any:
    num_rows, num_drafts, _ = draft_probs.shape
    device = target_probs.device
    out = torch.full((num_rows, num_drafts + 1), -1, device=device)
    goes_on = torch.ones(num_rows, dtype=torch.bool, device=device)
    for i in range(num_drafts):
        ids = draft_ids[:, i, None].long()
        p, q = (x[:, i].gather(1, ids)[:, 0] for x in (target_probs, draft_probs))
        accepts = torch.rand(num_rows, device=device) * (1 if mistake == "target only" else q) < p
        if mistake == "all":
            accepts[:] = True
        residual = (target_probs[:, i] - draft_probs[:, i]).clamp(min=0)
        if mistake == "no residual":
            residual = target_probs[:, i]
        drawn = torch.multinomial(residual + 1e-12 * target_probs[:, i], 1)[:, 0]
        out[goes_on, i] = torch.where(accepts, ids[:, 0], drawn)[goes_on]
        goes_on = goes_on & accepts
    out[goes_on, num_drafts] = torch.multinomial(target_probs[:, num_drafts], 1)[goes_on, 0]
    return out


RIGHT = {
    ("attention.decode", "torch"): paged_decode,
    ("attention.decode", "flash-attn"): decode_flash_attn,
    ("attention.decode", "flashinfer"): decode_flashinfer,
    ("attention.decode", "vllm"): decode_vllm,
    ("attention.decode", "triton"): decode_triton,
    ("attention.extend", "torch"): extend,
    ("attention.extend", "flash-attn"): extend_flash_attn,
    ("attention.extend", "flashinfer"): extend_flashinfer,
    ("rms_norm", "torch"): rms_norm,
    ("rms_norm", "flashinfer"): norm_flashinfer,
    ("rms_norm", "vllm"): norm_vllm,
    ("add_rms_norm", "torch"): add_norm,
    ("add_rms_norm", "flashinfer"): add_norm_in_place,
    ("add_rms_norm", "vllm"): add_norm_in_place,
    ("rope", "torch"): rope,
    ("rope", "flashinfer"): rope_in_place,
    ("rope", "vllm"): rope_in_place,
    ("rope", "flash-attn"): rope_flash_attn,
    ("silu_and_mul", "torch"): silu_and_mul,
    ("silu_and_mul", "flashinfer"): silu_and_mul,
    ("silu_and_mul", "vllm"): silu_vllm,
    ("moe", "torch"): moe,
    ("moe", "vllm"): moe,
    ("gemm", "torch"): lambda a, b: (a.float() @ b.float().T).to(a.dtype),
    ("w8a8", "torch"): w8a8,
    ("w8a8", "vllm"): w8a8,
    ("mla.decode", "torch"): mla,
    ("mla.decode", "flashinfer"): mla_flashinfer,
    ("mla.decode", "flash-mla"): flash_mla,
    ("sampler", "torch"): sample,
    ("sampler", "flashinfer"): sample_from,
    ("verify", "torch"): verify,
    ("verify", "flashinfer"): verify,
}
