"""Definitions of FlashInfer Trace whose exact results are known, with references in plain torch."""

from __future__ import annotations

import re
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
    lse = torch.full(q.shape[:2], -math.inf, device=q.device)
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
    lse = torch.full(q.shape[:2], -math.inf, device=q.device)
    group = q.shape[1] // k.shape[1]
    for i in range(len(qo_indptr) - 1):
        a, b, c, d = (int(x) for x in (*qo_indptr[i : i + 2], *kv_indptr[i : i + 2]))
        keys, values = (x[c:d].float().repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,nhd->qhn", q[a:b].float(), keys) * sm_scale
        last = torch.arange(b - a, device=q.device)[:, None] + (d - c) - (b - a)
        hidden = torch.arange(d - c, device=q.device) > last
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
    lse = torch.full(q_nope.shape[:2], -math.inf, device=q_nope.device)
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
    kept = torch.arange(probs.shape[1], device=probs.device) < top_k[:, None]
    kept &= ordered.cumsum(-1) - ordered < top_p[:, None]
    return ids.gather(1, torch.multinomial(ordered * kept, 1))[:, 0]
"""
GDN = """
import torch
import torch.nn.functional as F

def run(q, k, v, state, A_log, a, dt_bias, b, scale):
    g = torch.exp(-A_log.exp() * F.softplus(a.float()[:, 0] + dt_bias))
    beta = torch.sigmoid(b.float()[:, 0])
    group = v.shape[2] // q.shape[2]
    q, k = (x.float()[:, 0].repeat_interleave(group, 1) for x in (q, k))
    new = state * g[..., None, None]
    change = (v.float()[:, 0] - torch.einsum("nhvk,nhk->nhv", new, k)) * beta[..., None]
    new = new + change[..., None] * k[..., None, :]
    return (torch.einsum("nhvk,nhk->nhv", new, q) * scale)[:, None].to(v.dtype), new
"""
GDN_PREFILL = """
import torch
import torch.nn.functional as F

def run(q, k, v, state, A_log, a, dt_bias, b, cu_seqlens, scale):
    g = torch.exp(-A_log.exp() * F.softplus(a.float() + dt_bias))
    beta = torch.sigmoid(b.float())
    group = v.shape[1] // q.shape[1]
    q, k = (x.float().repeat_interleave(group, 1) for x in (q, k))
    out, new = torch.empty_like(v), state.clone()
    for i in range(len(state)):
        for t in range(int(cu_seqlens[i]), int(cu_seqlens[i + 1])):
            new[i] *= g[t, :, None, None]
            change = (v[t].float() - torch.einsum("hvk,hk->hv", new[i], k[t])) * beta[t, :, None]
            new[i] += change[..., None] * k[t][:, None, :]
            out[t] = (torch.einsum("hvk,hk->hv", new[i], q[t]) * scale).to(v.dtype)
    return out, new
"""
DSA = """
import math
import torch

def run(q_nope, q_pe, ckv_cache, kpe_cache, sparse_indices, sm_scale):
    out = torch.zeros_like(q_nope)
    lse = torch.full(q_nope.shape[:2], -math.inf, device=q_nope.device)
    for i, row in enumerate(sparse_indices):
        chosen = row[row != -1].long()
        ckv, kpe = (x.flatten(0, 1)[chosen].float() for x in (ckv_cache, kpe_cache))
        scores = (q_nope[i].float() @ ckv.T + q_pe[i].float() @ kpe.T) * sm_scale
        lse[i] = scores.logsumexp(-1) / math.log(2)
        out[i] = (scores.softmax(-1) @ ckv).to(q_nope.dtype)
    return out, lse
"""
INDEXER = """
import torch

def run(q_index_fp8, k_index_cache_fp8, weights, seq_lens, block_table):
    num_pages, page_size, _, width = k_index_cache_fp8.shape
    size, topk = width - 4, 8
    raw = k_index_cache_fp8.contiguous().view(torch.uint8).view(num_pages, -1)
    keys = raw[:, : page_size * size].contiguous().view(torch.float8_e4m3fn).view(num_pages, page_size, size)
    keys = keys.float() * raw[:, page_size * size :].contiguous().view(torch.float32)[..., None]
    device = seq_lens.device
    found = torch.full((len(seq_lens), topk), -1, dtype=torch.int32, device=device)
    places = torch.arange(page_size, device=device)
    for i, length in enumerate(seq_lens.tolist()):
        slots = (block_table[i].long()[:, None] * page_size + places).flatten()[:length]
        scores = weights[i] @ (q_index_fp8[i].float() @ keys.flatten(0, 1)[slots].T).relu()
        best = scores.topk(min(topk, length)).indices
        found[i, : len(best)] = slots[best].int()
    return found
"""
MOE = """
import torch

def run(routing_logits, routing_bias, hidden_states, hidden_states_scale, gemm1_weights, gemm1_weights_scale,
        gemm2_weights, gemm2_weights_scale, local_expert_offset, routed_scaling_factor):
    def numbers(x, scale):
        for dim, size in enumerate(x.shape):
            scale = scale.repeat_interleave(size // scale.shape[dim], dim)
        return x.float() * scale

    scores = routing_logits.sigmoid()
    groups = (scores + routing_bias.float()).unflatten(1, (2, -1))
    best = groups.topk(2, -1).values.sum(-1).argmax(1)
    is_other = torch.arange(2, device=best.device)[:, None] != best[:, None, None]
    kept = groups.masked_fill(is_other, -torch.inf).flatten(1)
    weights = torch.zeros_like(scores).scatter_(1, kept.topk(2, -1).indices, 1.0) * scores
    weights = weights / weights.sum(1, keepdim=True) * routed_scaling_factor
    x = numbers(hidden_states, hidden_states_scale.T)
    out = torch.zeros_like(x)
    for e in range(len(gemm1_weights)):
        share = weights[:, local_expert_offset + e]
        rows = share.nonzero()[:, 0]
        if len(rows):
            w13, w2 = (numbers(w[e], s[e]) for w, s in ((gemm1_weights, gemm1_weights_scale),
                                                        (gemm2_weights, gemm2_weights_scale)))
            up, gate = (x[rows] @ w13.T).chunk(2, -1)
            out[rows] += share[rows, None] * (torch.nn.functional.silu(gate) * up @ w2.T)
    return out.bfloat16()
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


_BF, _F8 = "bfloat16", "float8_e4m3fn"
_PAGED = "num_pages len_indptr num_kv_indices"
_GDN = "seq_len=1 num_q_heads=2 num_k_heads=2 num_v_heads=4 head_size=32"


def _gdn(tokens: str, sequences: str) -> str:
    return (
        f"q:{tokens},num_q_heads,head_size:{_BF} k:{tokens},num_k_heads,head_size:{_BF} "
        f"v:{tokens},num_v_heads,head_size:{_BF} state:{sequences},num_v_heads,head_size,head_size:float32 "
        f"A_log:num_v_heads:float32 a:{tokens},num_v_heads:{_BF} dt_bias:num_v_heads:float32 "
        f"b:{tokens},num_v_heads:{_BF}"
    )


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
    "gdn": definition_of(
        "gdn_decode_qk2_v4_d32_k_last", "gdn",
        f"batch_size {_GDN}", _gdn("batch_size,seq_len", "batch_size") + " scale::float32",
        f"output:batch_size,seq_len,num_v_heads,head_size:{_BF} "
        "new_state:batch_size,num_v_heads,head_size,head_size:float32", GDN),
    "gdn_prefill": definition_of(
        "gdn_prefill_qk2_v4_d32_k_last", "gdn", f"total_seq_len num_seqs len_cu_seqlens {_GDN}",
        _gdn("total_seq_len", "num_seqs") + " cu_seqlens:len_cu_seqlens:int64 scale::float32",
        f"output:total_seq_len,num_v_heads,head_size:{_BF} "
        "new_state:num_seqs,num_v_heads,head_size,head_size:float32", GDN_PREFILL),
    "dsa_paged": definition_of(
        "dsa_sparse_attention_h4_topk16", "dsa_paged",
        "num_tokens num_pages num_qo_heads=4 head_dim_ckv=64 head_dim_kpe=32 page_size=4 topk=16",
        f"q_nope:num_tokens,num_qo_heads,head_dim_ckv:{_BF} q_pe:num_tokens,num_qo_heads,head_dim_kpe:{_BF} "
        f"ckv_cache:num_pages,page_size,head_dim_ckv:{_BF} kpe_cache:num_pages,page_size,head_dim_kpe:{_BF} "
        "sparse_indices:num_tokens,topk:int32 sm_scale::float32",
        f"output:num_tokens,num_qo_heads,head_dim_ckv:{_BF} lse:num_tokens,num_qo_heads:float32", DSA),
    "dsa_indexer": definition_of(
        "dsa_topk_indexer_fp8_h4_d32_topk8", "dsa_paged",
        "batch_size num_pages max_num_pages num_index_heads=4 index_head_dim=32 page_size=4 topk=8 one=1 "
        "head_dim_with_scale=36",
        "q_index_fp8:batch_size,num_index_heads,index_head_dim:float8_e4m3fn "
        "k_index_cache_fp8:num_pages,page_size,one,head_dim_with_scale:int8 "
        "weights:batch_size,num_index_heads:float32 seq_lens:batch_size:int32 "
        "block_table:batch_size,max_num_pages:int32",
        "topk_indices:batch_size,topk:int32", INDEXER),
    "moe": definition_of(
        "moe_fp8_block_scale_ds_routing_topk2_ng2_kg1_e4_h64_i32", "moe",
        "seq_len num_experts=8 num_local_experts=4 hidden_size=64 intermediate_size=32 gemm1_out_size=64 "
        "num_hidden_blocks=4 num_intermediate_blocks=2 num_gemm1_out_blocks=4",
        "routing_logits:seq_len,num_experts:float32 routing_bias:num_experts:bfloat16 "
        f"hidden_states:seq_len,hidden_size:{_F8} hidden_states_scale:num_hidden_blocks,seq_len:float32 "
        f"gemm1_weights:num_local_experts,gemm1_out_size,hidden_size:{_F8} "
        "gemm1_weights_scale:num_local_experts,num_gemm1_out_blocks,num_hidden_blocks:float32 "
        f"gemm2_weights:num_local_experts,hidden_size,intermediate_size:{_F8} "
        "gemm2_weights_scale:num_local_experts,num_hidden_blocks,num_intermediate_blocks:float32 "
        "local_expert_offset::int32 routed_scaling_factor::float32",
        f"output:seq_len,hidden_size:{_BF}", MOE),
}  # fmt: skip


def _output_alone(data: dict[str, Any]) -> dict[str, Any]:
    reference = re.sub(r"\n +lse.*", "", data["reference"]).replace("return out, lse", "return out")
    outputs = {"output": data["outputs"]["output"]}
    return {**data, "name": f"{data['name']}_output", "outputs": outputs, "reference": reference}


OUTPUT_ALONE = {
    name: _output_alone(DEFINITIONS[name]) for name in ("gqa_paged", "gqa_ragged", "mla_paged", "dsa_paged")
}
"""Without the log of sums, which this project's kernels do not return."""
