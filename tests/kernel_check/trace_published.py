"""Definitions with what published ones and drafts of FlashInfer Trace have, in our own words and at small
sizes: results by name, pages that are not full, inputs that may be left out, other orders of arguments."""

from __future__ import annotations

from typing import Any

from diptych.shared.tools.conformance.formats.trace_references import DEFINITIONS as KNOWN
from diptych.shared.tools.conformance.formats.trace_references import definition_of

BF, F8 = "bfloat16", "float8_e4m3fn"
SHARED = """
import math
import torch
import torch.nn.functional as F

def attend(q, k, v, scale, hidden):
    scores = torch.einsum("qhd,nhd->qhn", q.float(), k.float()) * scale
    scores = scores.masked_fill(hidden[:, None], -math.inf)
    return torch.einsum("qhn,nhd->qhd", scores.softmax(-1), v.float()), scores.logsumexp(-1) / math.log(2)

def later(new, length, device):
    last = torch.arange(new, device=device)[:, None] + length - new
    return torch.arange(length, device=device) > last
"""
PAGED = """
def run(q, k_cache, v_cache, kv_indptr, kv_indices, kv_last_page_len, sm_scale):
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:2], -math.inf, dtype=torch.float32)
    group, size = q.shape[1] // k_cache.shape[2], k_cache.shape[1]
    for i in range(len(q)):
        pages = kv_indices[kv_indptr[i] : kv_indptr[i + 1]].long()
        length = (len(pages) - 1) * size + int(kv_last_page_len[i])
        k, v = (x[pages].flatten(0, 1)[:length].repeat_interleave(group, 1) for x in (k_cache, v_cache))
        found, lse[i : i + 1] = attend(q[i : i + 1], k, v, sm_scale, later(1, length, q.device))
        out[i] = found[0].to(q.dtype)
    return {"output": out, "lse": lse}
"""
LATENT_PREFILL = """
def run(q_nope, q_pe, ckv_cache, kpe_cache, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, sm_scale):
    q, out = torch.cat((q_nope, q_pe), -1), torch.zeros_like(q_nope)
    lse = q.new_full(q.shape[:2], -math.inf, dtype=torch.float32)
    for i in range(len(qo_indptr) - 1):
        a, b = int(qo_indptr[i]), int(qo_indptr[i + 1])
        pages = kv_indices[kv_indptr[i] : kv_indptr[i + 1]].long()
        length = (len(pages) - 1) * ckv_cache.shape[1] + int(kv_last_page_len[i])
        c, p = (x[pages].flatten(0, 1)[:length, None] for x in (ckv_cache, kpe_cache))
        k, v = (x.expand(-1, q.shape[1], -1) for x in (torch.cat((c, p), -1), c))
        found, lse[a:b] = attend(q[a:b], k, v, sm_scale, later(b - a, length, q.device))
        out[a:b] = found.to(out.dtype)
    return out, lse
"""
LATENT_RAGGED = """
def run(q, k, v, seq_indptr, sm_scale):
    out, lse = torch.zeros_like(v), q.new_zeros(q.shape[:2], dtype=torch.float32)
    for a, b in zip(seq_indptr[:-1].tolist(), seq_indptr[1:].tolist()):
        found, lse[a:b] = attend(q[a:b], k[a:b], v[a:b], sm_scale, later(b - a, b - a, q.device))
        out[a:b] = found.to(out.dtype)
    return out, lse
"""
DRAFTED = """
def run(q, k, v, initial_state, initial_state_indices, A_log, a, dt_bias, b, scale,
        intermediate_states_buffer=None):
    assert q.shape[1] > 1
    g, beta = torch.exp(-A_log.exp() * F.softplus(a.float() + dt_bias)), torch.sigmoid(b.float())
    group, state = v.shape[2] // q.shape[2], initial_state[initial_state_indices.long()]
    q, k = (x.float().repeat_interleave(group, 2) for x in (q, k))
    out = torch.empty_like(v)
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None]
        change = (v[:, t].float() - torch.einsum("nhvk,nhk->nhv", state, k[:, t])) * beta[:, t, :, None]
        state = state + change[..., None] * k[:, t, :, None, :]
        out[:, t] = (torch.einsum("nhvk,nhk->nhv", state, q[:, t]) * scale).to(v.dtype)
    return out, initial_state.clone()
"""
IN_ORDER = """
def run(probs, top_k, top_p):
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    ordered = ordered * (torch.arange(probs.shape[1], device=probs.device) < top_k[:, None])
    ordered = ordered / ordered.sum(-1, keepdim=True)
    kept = ordered * (ordered.cumsum(-1) - ordered < top_p[:, None])
    return ids.gather(1, torch.multinomial(kept, 1))[:, 0]
"""
TOP_P = """
def run(probs, top_p):
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    kept = ordered * (ordered.cumsum(-1) - ordered < top_p[:, None])
    return ids.gather(1, torch.multinomial(kept, 1))[:, 0]
"""
SOFTMAX_EXPERTS = """
def numbers(x, scale):
    for dim, size in enumerate(x.shape):
        scale = scale.repeat_interleave(size // scale.shape[dim], dim)
    return x.float() * scale

def run(routing_logits, hidden_states, hidden_states_scale, gemm1_weights, gemm1_weights_scale, gemm2_weights,
        gemm2_weights_scale):
    best = routing_logits.float().topk(2, -1)
    weights = torch.zeros_like(routing_logits, dtype=torch.float32)
    weights.scatter_(1, best.indices, best.values.softmax(-1))
    x = numbers(hidden_states, hidden_states_scale.T)
    out = torch.zeros_like(x)
    for e in range(weights.shape[1]):
        rows = weights[:, e].nonzero()[:, 0]
        if len(rows):
            up, gate = (x[rows] @ numbers(gemm1_weights[e], gemm1_weights_scale[e]).T).chunk(2, -1)
            found = (F.silu(gate) * up) @ numbers(gemm2_weights[e], gemm2_weights_scale[e]).T
            out[rows] += weights[rows, e, None] * found
    return out.bfloat16()
"""
EXPERTS_OF_LIBRARY = """
def run(names):
    choice
    out = torch.zeros(len(hidden_states), gemm2_weights.shape[1], device=hidden_states.device)
    for e in range(len(gemm1_weights)):
        for rows, k in (best == e).nonzero().tolist():
            w, x = weights[rows, k], hidden_states[rows].float()
            up, gate = (gemm1_weights[e].float() @ (x * w if best.shape[1] == 1 else x)).chunk(2)
            if "output1" in "names":
                up, gate = up * output1_scales_scalar[e], gate * output1_scales_gate_scalar[e]
            found = gemm2_weights[e].float() @ (F.silu(gate) * up)
            if "output1" in "names":
                found = found * output2_scales_scalar[e]
            out[rows] += found if best.shape[1] == 1 else w * found
    return out.bfloat16()
"""
CHOICES = {
    "softmax": "values, best = routing_logits.float().topk(2, -1); weights = values.softmax(-1)",
    "sigmoid": "weights, best = routing_logits.float().sigmoid().topk(1, -1)",
    "given": "best = topk_ids >> 16; "
    "weights = (topk_ids & 0xFFFF).to(torch.int16).view(torch.bfloat16).float()",
}
OTHER_ORDER = """
def run(routing_logits, routing_bias, hidden_states, gemm1_weights, gemm2_weights):
    assert routing_bias.dim() == 1
    share, best = routing_logits.float().sigmoid().max(-1)
    x = hidden_states.float() * share[:, None]
    up, gate = torch.einsum("th,toh->to", x, gemm1_weights[best]).chunk(2, -1)
    return torch.einsum("ti,thi->th", F.silu(gate) * up, gemm2_weights[best]).bfloat16()
"""
POOL = """
def run(state, x, indices, is_kept, power):
    new = state.clone()
    new[indices.long()] = new[indices.long()] * (0.5 ** power) + x * is_kept
    return new
"""
ADDED_NORM = """
def run(hidden_states, residual, weight):
    x = hidden_states.float() + residual.float()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    return (y * weight.float()).to(hidden_states.dtype)
"""
PAGES = "num_pages len_indptr num_kv_indices"
LATENT = "num_qo_heads=4 head_dim_ckv=64 head_dim_kpe=32 page_size=4"
HEADS = "num_q_heads=2 num_k_heads=2 num_v_heads=4 head_size=32"
CACHES = (
    f"k_cache:num_pages,page_size,num_kv_heads,head_dim:{BF} "
    f"v_cache:num_pages,page_size,num_kv_heads,head_dim:{BF} kv_indptr:len_indptr:int32 "
    "kv_indices:num_kv_indices:int32"
)


def _paged(page_size: int, last: str) -> dict[str, Any]:
    return definition_of(
        f"gqa_decode_ps{page_size}", "gqa_paged",
        f"batch_size {PAGES} num_qo_heads=6 num_kv_heads=2 head_dim=64 page_size={page_size}",
        f"q:batch_size,num_qo_heads,head_dim:{BF} {CACHES} {last}:batch_size:int32 sm_scale::float32",
        f"output:batch_size,num_qo_heads,head_dim:{BF} lse:batch_size,num_qo_heads:float32", SHARED + PAGED,
    )  # fmt: skip


def _draft() -> dict[str, Any]:
    """`type` in place of `op_type`, [] for scalars, an input that the reference does not take."""
    data = _paged(1, "last_page_len")
    data["inputs"]["sm_scale"]["shape"] = []
    source = data["reference"].replace(", kv_last_page_len, sm_scale", ", sm_scale")
    data["reference"] = source.replace("int(kv_last_page_len[i])", "size")
    return {"type": "gqa", **{name: each for name, each in data.items() if name != "op_type"}}


def _optional(data: dict[str, Any], name: str, *change: str) -> dict[str, Any]:
    inputs = {**data["inputs"], name: {**data["inputs"][name], "optional": True}}
    return {**data, "inputs": inputs, "reference": data["reference"].replace(*change)}


def _sampling(name: str, inputs: str, reference: str) -> dict[str, Any]:
    return definition_of(f"{name}_v60", "sampling", "batch_size vocab_size=60",
                         f"probs:batch_size,vocab_size:float32 {inputs}", "samples:batch_size:int64",
                         SHARED + reference)  # fmt: skip


def _experts_of_library(choice: str, top_k: int, dtype: str, weights: str) -> dict[str, Any]:
    """As published for kernels of TensorRT-LLM: float32 weights for FP4, FP8 with a scale an expert."""
    inputs = "topk_ids:seq_len,top_k:int32 "
    if choice != "given":
        inputs = f"routing_logits:seq_len,num_experts:{BF} "
    if choice == "sigmoid":
        inputs += f"routing_bias:num_experts:{BF} "
    inputs += (
        f"hidden_states:seq_len,hidden_size:{dtype} gemm1_weights:num_experts,gemm1_out_size,hidden_size:"
        f"{weights} gemm2_weights:num_experts,hidden_size,intermediate_size:{weights}"
    )
    for each in ("output1_scales_scalar", "output1_scales_gate_scalar", "output2_scales_scalar"):
        inputs += f" {each}:num_experts:float32" * (dtype == F8)
    names = ", ".join(each.partition(":")[0] for each in inputs.split())
    reference = EXPERTS_OF_LIBRARY.replace("names", names).replace("choice", CHOICES[choice])
    return definition_of(
        f"moe_{choice}_topk{top_k}_e6_h64_i32", "moe",
        f"seq_len num_experts=6 hidden_size=64 intermediate_size=32 gemm1_out_size=64 top_k={top_k}",
        inputs, f"output:seq_len,hidden_size:{BF}", SHARED + reference)  # fmt: skip


PUBLISHED: dict[str, dict[str, Any]] = {
    "draft": _draft(),
    "last page": _paged(4, "kv_last_page_len"),
    "latent prefill": definition_of(
        "mla_prefill", "mla_paged", f"total_q batch_size {PAGES} {LATENT}",
        f"q_nope:total_q,num_qo_heads,head_dim_ckv:{BF} q_pe:total_q,num_qo_heads,head_dim_kpe:{BF} "
        f"ckv_cache:num_pages,page_size,head_dim_ckv:{BF} kpe_cache:num_pages,page_size,head_dim_kpe:{BF} "
        "qo_indptr:len_indptr:int32 kv_indptr:len_indptr:int32 kv_indices:num_kv_indices:int32 "
        "kv_last_page_len:batch_size:int32 sm_scale::float32",
        f"output:total_q,num_qo_heads,head_dim_ckv:{BF} lse:total_q,num_qo_heads:float32",
        SHARED + LATENT_PREFILL),
    "latent heads": definition_of(
        "mla_ragged_prefill", "mla_ragged",
        "total_tokens len_indptr num_qo_heads=3 head_dim_qk=48 head_dim_vo=32",
        f"q:total_tokens,num_qo_heads,head_dim_qk:{BF} k:total_tokens,num_qo_heads,head_dim_qk:{BF} "
        f"v:total_tokens,num_qo_heads,head_dim_vo:{BF} seq_indptr:len_indptr:int32 sm_scale::float32",
        f"output:total_tokens,num_qo_heads,head_dim_vo:{BF} lse:total_tokens,num_qo_heads:float32",
        SHARED + LATENT_RAGGED),
    "state left out": _optional(KNOWN["gdn"], "state", "new = state *",
                                "state = k.new_zeros(len(v), 4, 32, 32) if state is None else state\n"
                                "    new = state *"),
    "drafted tokens": _optional(definition_of(
        "gdn_mtp_qk2_v4_d32_k_last", "gdn", f"batch_size seq_len pool_size {HEADS}",
        f"q:batch_size,seq_len,num_q_heads,head_size:{BF} k:batch_size,seq_len,num_k_heads,head_size:{BF} "
        f"v:batch_size,seq_len,num_v_heads,head_size:{BF} "
        "initial_state:pool_size,num_v_heads,head_size,head_size:float32 "
        "initial_state_indices:batch_size:int32 A_log:num_v_heads:float32 "
        f"a:batch_size,seq_len,num_v_heads:{BF} dt_bias:num_v_heads:float32 "
        f"b:batch_size,seq_len,num_v_heads:{BF} scale::float32 "
        "intermediate_states_buffer:pool_size,seq_len,num_v_heads,head_size,head_size:float32",
        f"output:batch_size,seq_len,num_v_heads,head_size:{BF} "
        "final_state:pool_size,num_v_heads,head_size,head_size:float32", SHARED + DRAFTED),
        "intermediate_states_buffer", "", ""),
    "filters in order": _sampling("top_k_top_p", "top_k:batch_size:int32 top_p:batch_size:float32", IN_ORDER),
    "top-p alone": _sampling("top_p", "top_p:batch_size:float32", TOP_P),
    "softmax experts": definition_of(
        "moe_fp8_block_scale_renorm_topk2_e8_h64_i32", "moe",
        "seq_len num_local_experts=8 hidden_size=64 intermediate_size=32 gemm1_out_size=64 top_k=2 "
        "num_hidden_blocks=4 num_intermediate_blocks=2 num_gemm1_out_blocks=4",
        f"routing_logits:seq_len,num_local_experts:{BF} hidden_states:seq_len,hidden_size:{F8} "
        "hidden_states_scale:num_hidden_blocks,seq_len:float32 "
        f"gemm1_weights:num_local_experts,gemm1_out_size,hidden_size:{F8} "
        "gemm1_weights_scale:num_local_experts,num_gemm1_out_blocks,num_hidden_blocks:float32 "
        f"gemm2_weights:num_local_experts,hidden_size,intermediate_size:{F8} "
        "gemm2_weights_scale:num_local_experts,num_hidden_blocks,num_intermediate_blocks:float32",
        f"output:seq_len,hidden_size:{BF}", SHARED + SOFTMAX_EXPERTS),
    "experts of FP4": _experts_of_library("softmax", 2, BF, "float32"),
    "given experts of FP4": _experts_of_library("given", 2, BF, "float32"),
    "one given expert of FP4": _experts_of_library("given", 1, BF, "float32"),
    "one expert of FP8": _experts_of_library("sigmoid", 1, F8, F8),
    "experts of FP8": _experts_of_library("softmax", 2, F8, F8),
    "experts in another order": definition_of(
        "moe_topk1_e4_h64_i32", "moe",
        "seq_len num_experts=4 hidden_size=64 intermediate_size=32 gemm1_out_size=64",
        f"routing_logits:seq_len,num_experts:{BF} hidden_states:seq_len,hidden_size:{BF} "
        "gemm1_weights:num_experts,gemm1_out_size,hidden_size:float32 "
        f"gemm2_weights:num_experts,hidden_size,intermediate_size:float32 routing_bias:num_experts:{BF}",
        f"output:seq_len,hidden_size:{BF}", SHARED + OTHER_ORDER),
    "pool of states": definition_of(
        "pool_update", "state_update", "batch_size state_cache_size size=16",
        "state:state_cache_size,size:float32 x:batch_size,size:float32 indices:batch_size:int64 "
        "is_kept::bool power::int32", "new_state:state_cache_size,size:float32", SHARED + POOL),
    "added norm": definition_of(
        "fused_add_rmsnorm_h64", "rmsnorm", "batch_size hidden_size=64",
        f"hidden_states:batch_size,hidden_size:{BF} residual:batch_size,hidden_size:{BF} "
        f"weight:hidden_size:{BF}",
        f"output:batch_size,hidden_size:{BF}", SHARED + ADDED_NORM),
}  # fmt: skip
WITHOUT_EXACT_RESULT = ("experts in another order", "pool of states")
