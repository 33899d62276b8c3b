"""Solutions of FlashInfer Trace by components of this project: of the optimized panel on a GPU, of the
reference on a CPU; and by kernels of attention, for a GPU or Triton's interpreter."""

from __future__ import annotations

HEAD = """import torch
from diptych.shared import registry

def panel(x):
    return "optimized" if x.is_cuda else "reference"
"""
NORM = """
def run(hidden_states, weight):
    norm = registry.load("layers", panel(weight)).RMSNorm(hidden_states.shape[-1], eps=1e-6)
    norm.weight.data = weight
    return norm(hidden_states)
"""
GEMM = """
def run(A, B):
    linear = registry.load("layers", panel(A)).Linear(B.shape[1], B.shape[0])
    linear.weight = torch.nn.Parameter(B, requires_grad=False)
    return linear(A)
"""
ROPE = """
from diptych.shared.config import RopeConfig

def run(q, k, cos_sin_cache, positions):
    num_positions, rotary_dim = cos_sin_cache.shape
    rope = RopeConfig("default", 10000.0, rotary_dim)
    layer = registry.load("layers", panel(q)).RotaryEmbedding(rope, q.shape[-1], num_positions)
    cos, sin = cos_sin_cache.chunk(2, -1)
    both = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1)
    layer.table = cos_sin_cache if q.is_cuda else both.unsqueeze(2)
    return layer(positions, q, k)
"""
SAMPLING = """
from diptych.shared.types import SamplingBatchInfo

def run(probs, top_k, top_p):
    rows = torch.arange(len(probs), device=probs.device)
    info = SamplingBatchInfo(
        temperatures=torch.ones_like(top_p), top_ks=top_k.long(), top_ps=top_p,
        min_ps=torch.zeros_like(top_p), seeds=torch.randint_like(rows, 2**31),
        is_greedy=torch.zeros_like(rows, dtype=torch.bool),
        is_all_greedy=False, needs_filter=True,
    )
    return registry.load("sampler", panel(probs))().sample(probs.log(), info, rows).next_token_ids
"""
OWN = {
    op_type: HEAD + source
    for op_type, source in (("gemm", GEMM), ("rmsnorm", NORM), ("rope", ROPE), ("sampling", SAMPLING))
}
"""op_type -> the source of a Solution."""
PAGES = """import torch
from diptych.shared import registry

def kernel(name, x):
    if not registry.runs_triton(x.device.type):
        raise NotImplementedError("needs a CUDA GPU, or TRITON_INTERPRET=1")
    return getattr(registry.load_part(name), name)

def tables(indptr, indices, page_size):
    pages = indptr.diff()
    places = indptr[:-1, None] + torch.arange(max(int(pages.max()), 1), device=indptr.device)
    first = indices[places.clamp(max=len(indices) - 1).long()] * page_size
    slots = first[..., None] + torch.arange(page_size, device=indptr.device)
    return slots.flatten(1).int(), torch.arange(len(pages), device=indptr.device), pages.long() * page_size
"""
"""Slots of requests, their rows and lengths."""
DECODE = """
def run(q, k_cache, v_cache, kv_indptr, kv_indices, sm_scale):
    page_size, num_kv_heads = k_cache.shape[1:3]
    table, rows, lens = tables(kv_indptr, kv_indices, page_size)
    counters = torch.zeros(len(q) * num_kv_heads, dtype=torch.int32, device=q.device)
    return kernel("decode_attention", q)(
        q, k_cache.flatten(0, 1), v_cache.flatten(0, 1), table, rows, lens, counters,
        out=torch.empty_like(q), scale=sm_scale, page_size=page_size,
    )
"""
RAGGED = """
def run(q, k, v, qo_indptr, kv_indptr, sm_scale):
    table, rows, lens = tables(kv_indptr, torch.arange(len(k), device=q.device), 1)
    starts, new = qo_indptr[:-1].long(), qo_indptr.diff().long()
    out = torch.zeros_like(q)  # a launch behind the tables: the kernel reads them before the last one ends
    return kernel("extend_attention", q)(
        q, k, v, table, rows, lens, new, starts, out=out, scale=sm_scale
    )
"""
LATENT = """
def latent(q_nope, q_pe, ckv_cache, kpe_cache, table, rows, lens, sm_scale, page_size):
    q = torch.cat((q_nope, q_pe), -1)
    kv = torch.cat((ckv_cache, kpe_cache), -1).flatten(0, 1)[:, None]  # in this project's pool they are one
    counters = torch.zeros(q.shape[0] * q.shape[1], dtype=torch.int32, device=q.device)
    out = kernel("mla_decode", q)(
        q, kv, table, rows, lens, counters,
        kv_lora_rank=q_nope.shape[-1], scale=sm_scale, page_size=page_size,
    )
    return out.masked_fill((lens == 0)[:, None, None], 0.0)
"""
MLA = """
def run(q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, sm_scale):
    page_size = ckv_cache.shape[1]
    places = tables(kv_indptr, kv_indices, page_size)
    return latent(q_nope, q_pe, ckv_cache, kpe_cache, *places, sm_scale, page_size)
"""
DSA = """
def run(q_nope, q_pe, ckv_cache, kpe_cache, sparse_indices, sm_scale):
    order = (sparse_indices == -1).int().argsort(dim=1, stable=True)
    table = sparse_indices.gather(1, order).clamp(min=0)
    rows, lens = torch.arange(len(table), device=table.device), (sparse_indices != -1).sum(1)
    return latent(q_nope, q_pe, ckv_cache, kpe_cache, table, rows, lens, sm_scale, 1)
"""
KERNELS = {
    "gqa_paged": PAGES + DECODE,
    "gqa_ragged": PAGES + RAGGED,
    "mla_paged": PAGES + LATENT + MLA,
    "dsa_paged": PAGES + LATENT + DSA,
}
"""Name of `OUTPUT_ALONE` -> the source of a Solution."""
