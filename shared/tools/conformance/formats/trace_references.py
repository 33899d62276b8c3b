"""Definitions of FlashInfer Trace whose exact results are known, with references in plain torch."""

from __future__ import annotations

import textwrap
from typing import Any

NORM = """
import torch

def run(hidden_states, weight):
    x = hidden_states.float()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    return (y * weight.float()).to(hidden_states.dtype)
"""
GEMM = """
def run(A, B):
    return (A.float() @ B.float().T).to(A.dtype)
"""
DECODE = """
import math
import torch

def run(q, k_cache, v_cache, kv_indptr, kv_indices, sm_scale):
    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], -math.inf)
    group, page_size = q.shape[1] // k_cache.shape[2], k_cache.shape[1]
    for i in range(len(q)):
        pages = kv_indices[int(kv_indptr[i]) : int(kv_indptr[i + 1])].long()
        k, v = (x[pages].flatten(0, 1).float().repeat_interleave(group, 1) for x in (k_cache, v_cache))
        scores = torch.einsum("hd,nhd->hn", q[i].float(), k) * sm_scale
        lse[i] = scores.logsumexp(-1) / math.log(2)
        out[i] = torch.einsum("hn,nhd->hd", scores.softmax(-1), v).to(q.dtype)
    return out, lse
"""
RAGGED = """
import math
import torch

def run(q, k, v, qo_indptr, kv_indptr, sm_scale):
    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], -math.inf)
    group = q.shape[1] // k.shape[1]
    for i in range(len(qo_indptr) - 1):
        a, b, c, d = (int(x) for x in (*qo_indptr[i : i + 2], *kv_indptr[i : i + 2]))
        keys, values = (x[c:d].float().repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,nhd->qhn", q[a:b].float(), keys) * sm_scale
        hidden = torch.arange(d - c) > torch.arange(b - a)[:, None] + (d - c) - (b - a)
        scores = scores.masked_fill(hidden[:, None], -math.inf)
        lse[a:b] = scores.logsumexp(-1) / math.log(2)
        out[a:b] = torch.einsum("qhn,nhd->qhd", scores.softmax(-1), values).to(q.dtype)
    return out, lse
"""
MLA = """
import math
import torch

def run(q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, sm_scale):
    out = torch.zeros_like(q_nope)
    lse = torch.full(q_nope.shape[:2], -math.inf)
    for i in range(len(q_nope)):
        pages = kv_indices[int(kv_indptr[i]) : int(kv_indptr[i + 1])].long()
        ckv, kpe = (x[pages].flatten(0, 1).float() for x in (ckv_cache, kpe_cache))
        scores = (q_nope[i].float() @ ckv.T + q_pe[i].float() @ kpe.T) * sm_scale
        lse[i] = scores.logsumexp(-1) / math.log(2)
        out[i] = (scores.softmax(-1) @ ckv).to(q_nope.dtype)
    return out, lse
"""
ROPE = """
import torch

def run(q, k, cos_sin_cache, positions):
    cos, sin = cos_sin_cache[positions].chunk(2, -1)
    n = cos.shape[1]
    results = []
    for x in (q, k):
        a, b, rest = x[..., :n].float(), x[..., n : 2 * n].float(), x[..., 2 * n :]
        c, s = cos[:, None], sin[:, None]
        results.append(torch.cat(((a * c - b * s).to(x.dtype), (b * c + a * s).to(x.dtype), rest), -1))
    return tuple(results)
"""
SAMPLING = """
import torch

def run(probs, top_k, top_p):
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    kept = torch.arange(probs.shape[1]) < top_k[:, None]
    kept &= ordered.cumsum(-1) - ordered < top_p[:, None]
    return ids.gather(1, torch.multinomial(ordered * kept, 1))[:, 0]
"""


def definition_of(
    name: str, op_type: str, axes: str, inputs: str, outputs: str, reference: str
) -> dict[str, Any]:
    """`axes`: "M K=64"; `inputs`, `outputs`: "A:M,K:bfloat16 s::float32"."""

    def axis(text: str) -> tuple[str, dict[str, Any]]:
        key, _, size = text.partition("=")
        kind = {"type": "const", "value": int(size)} if size else {"type": "var"}
        return key, {**kind, "description": key.replace("_", " ")}

    def tensor(text: str) -> tuple[str, dict[str, Any]]:
        key, shape, dtype = text.split(":")
        text = key.replace("_", " ")
        return key, {"shape": shape.split(",") if shape else None, "dtype": dtype, "description": text}

    return {
        "name": name, "op_type": op_type, "description": f"{op_type} at small sizes, for checks.",
        "axes": dict(map(axis, axes.split())),
        "inputs": dict(map(tensor, inputs.split())), "outputs": dict(map(tensor, outputs.split())),
        "reference": textwrap.dedent(reference).lstrip(),
    }  # fmt: skip


_BF = "bfloat16"
_PAGED = "num_pages len_indptr num_kv_indices"
DEFINITIONS: dict[str, dict[str, Any]] = {
    "gemm": definition_of("gemm_n48_k130", "gemm", "M N=48 K=130", f"A:M,K:{_BF} B:N,K:{_BF}",
                          f"C:M,N:{_BF}", GEMM),
    "rmsnorm": definition_of("rmsnorm_h96", "rmsnorm", "batch_size hidden_size=96",
                           f"hidden_states:batch_size,hidden_size:{_BF} weight:hidden_size:{_BF}",
                           f"output:batch_size,hidden_size:{_BF}", NORM),
    "gqa_paged": definition_of(
        "gqa_decode", "gqa_paged", f"total_q {_PAGED} num_qo_heads=6 num_kv_heads=2 head_dim=64 page_size=1",
        f"q:total_q,num_qo_heads,head_dim:{_BF} k_cache:num_pages,page_size,num_kv_heads,head_dim:{_BF} "
        f"v_cache:num_pages,page_size,num_kv_heads,head_dim:{_BF} kv_indptr:len_indptr:int32 "
        "kv_indices:num_kv_indices:int32 sm_scale::float32",
        f"output:total_q,num_qo_heads,head_dim:{_BF} lse:total_q,num_qo_heads:float32", DECODE),
    "gqa_ragged": definition_of(
        "gqa_ragged", "gqa_ragged", "total_q total_kv len_indptr num_qo_heads=4 num_kv_heads=1 head_dim=32",
        f"q:total_q,num_qo_heads,head_dim:{_BF} k:total_kv,num_kv_heads,head_dim:{_BF} "
        f"v:total_kv,num_kv_heads,head_dim:{_BF} qo_indptr:len_indptr:int32 kv_indptr:len_indptr:int32 "
        "sm_scale::float32",
        f"output:total_q,num_qo_heads,head_dim:{_BF} lse:total_q,num_qo_heads:float32", RAGGED),
    "mla_paged": definition_of(
        "mla_decode", "mla_paged",
        f"batch_size {_PAGED} num_qo_heads=4 head_dim_ckv=64 head_dim_kpe=32 page_size=4",
        f"q_nope:batch_size,num_qo_heads,head_dim_ckv:{_BF} q_pe:batch_size,num_qo_heads,head_dim_kpe:{_BF} "
        f"ckv_cache:num_pages,page_size,head_dim_ckv:{_BF} kpe_cache:num_pages,page_size,head_dim_kpe:{_BF} "
        "kv_indptr:len_indptr:int32 kv_indices:num_kv_indices:int32 sm_scale::float32",
        f"output:batch_size,num_qo_heads,head_dim_ckv:{_BF} lse:batch_size,num_qo_heads:float32", MLA),
    "rope": definition_of(
        "rope_d64", "rope", "num_tokens num_qo_heads num_kv_heads max_seq_len head_size=64 rotary_dim=48",
        f"q:num_tokens,num_qo_heads,head_size:{_BF} k:num_tokens,num_kv_heads,head_size:{_BF} "
        "cos_sin_cache:max_seq_len,rotary_dim:float32 positions:num_tokens:int64",
        f"q_out:num_tokens,num_qo_heads,head_size:{_BF} k_out:num_tokens,num_kv_heads,head_size:{_BF}", ROPE),
    "sampling": definition_of("top_k_top_p_v60", "sampling", "batch_size vocab_size=60",
                            "probs:batch_size,vocab_size:float32 top_k:batch_size:int32 "
                            "top_p:batch_size:float32",
                            "samples:batch_size:int64", SAMPLING),
}  # fmt: skip
