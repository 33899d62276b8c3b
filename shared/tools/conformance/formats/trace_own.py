"""Solutions of FlashInfer Trace by components of this project: of the optimized panel on a GPU, of the
reference on a CPU. Attention is not among them: it returns no log of sums, which Definitions ask for."""

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
