"""Launches of the kernels of latent attention, linear attention and LoRA adapters, for `launches.py`."""

from __future__ import annotations

import torch

from diptych.optimized.kernels.attention.expanded_attention import AttentionState, expanded_attention
from diptych.optimized.kernels.attention.mla_decode import mla_decode
from diptych.optimized.kernels.attention.mla_extend import mla_extend
from diptych.optimized.kernels.attention.mla_rope_store import mla_rope_store
from diptych.optimized.kernels.attention.mla_small_batch import absorb_few
from diptych.optimized.kernels.attention.qk_norm_rope_store import rotate
from diptych.optimized.kernels.linear.lora_linear import BLOCK_M, expand_add, shrink
from diptych.optimized.kernels.moe.gathered_experts import gathered_experts
from diptych.optimized.kernels.moe.local_experts import local_experts
from diptych.optimized.kernels.moe.moe_align import align
from diptych.optimized.kernels.recurrence.convolve import convolve, keep_inputs
from diptych.optimized.kernels.recurrence.decode_step import Gates, decode_step
from diptych.optimized.kernels.recurrence.delta_chunks import delta_chunks
from diptych.optimized.kernels.recurrence.delta_tokens import delta_tokens
from diptych.optimized.kernels.recurrence.gates import decay_and_beta, gate_heads, norm_and_gate
from diptych.optimized.kernels.recurrence.step_tables import LayerRows, LinearSteps
from diptych.shared.config.model import LinearAttentionConfig
from diptych.shared.interfaces.linear_attention import LinearLayer
from diptych.shared.parallel.expert_map import ExpertPlacement, in_order


def mla(
    kind: str, num_heads: int, tokens: int, dtype: torch.dtype, pool_dtype: torch.dtype | None = None
) -> None:
    batch, rank = 4, 512
    rows = torch.empty(4096, 1, rank + 64, dtype=pool_dtype or dtype)
    where = torch.empty(512, 8192, dtype=torch.int32), *torch.empty(2, batch, dtype=torch.int64)
    q = torch.empty(batch * tokens, num_heads, rank + 64, dtype=dtype)
    if kind == "decode":
        counters = torch.empty(batch * num_heads, dtype=torch.int32)
        mla_decode(q, rows, *where, counters, kv_lora_rank=rank, scale=1.0)
    elif kind == "few":
        w = torch.empty(num_heads, 256, rank, dtype=dtype)
        out = torch.empty(batch, num_heads, 128, dtype=dtype)
        absorbed = absorb_few(torch.empty(batch, num_heads, 192, dtype=dtype), w[:, :128], 64)
        counters = torch.empty(batch * num_heads, dtype=torch.int32)
        options = {"kv_lora_rank": rank, "scale": 1.0, "w_v": w[:, 128:], "projected": out}
        mla_decode(absorbed, rows, *where, counters, **options)
    elif kind == "rope":
        positions, slots = torch.empty(2, len(q), dtype=torch.int64)
        mla_rope_store(
            q[..., -192:], torch.empty(len(q), 576, dtype=dtype), positions, torch.empty(4096, 64),
            torch.empty(rank, dtype=dtype), 1e-6, rows, slots, is_interleaved=True,
        )  # fmt: skip
    elif kind == "extend":
        new = torch.empty(2, batch, dtype=torch.int64)
        mla_extend(q, rows, *where, *new, kv_lora_rank=rank, scale=1.0)
    else:
        q = torch.empty(batch * tokens, num_heads, 192, dtype=dtype)
        kv, k_rope = torch.empty(999, num_heads * 256, dtype=dtype), rows[:999, 0, rank:]
        indptr = torch.empty(batch + 1, dtype=torch.int64)
        state = AttentionState(len(q), num_heads, 128, q.device)
        options = {"scale": 1.0, "v_head_dim": 128, "state": state}
        expanded_attention(q, kv, k_rope, indptr, indptr, is_causal=False, **options)
        expanded_attention(
            q, kv, k_rope, indptr, indptr, is_causal=True, out=q.new_empty(len(q), num_heads, 128), **options
        )


def lora(rank: int, dtype: torch.dtype) -> None:
    """q, k and v of an 8B model, its last layer of the MLP, and the projections of gated DeltaNet."""
    num_rows, num_slots = 64, 8
    blocks = align(torch.empty(num_rows, 1, dtype=torch.int32), num_slots, BLOCK_M)
    for size, sizes in ((4096, (4096, 1024, 1024)), (12288, (4096,)), (2048, (8192, 4096, 32, 32))):
        x, y = torch.empty(num_rows, size, dtype=dtype), torch.empty(num_rows, sum(sizes), dtype=dtype)
        a = torch.empty(num_slots, len(sizes), rank, size, dtype=dtype)
        b = torch.empty(num_slots, sum(sizes), rank, dtype=dtype)
        expand_add(y, shrink(x, a, blocks), b, torch.empty(num_slots, len(sizes)), sizes, blocks)


def linear_attention(dtype: torch.dtype, num_held: int = 0, num_nodes: int = 0, kda: bool = False) -> None:
    """Eight requests of one token and one of 100, in the sizes of Qwen3-Next or Kimi-Linear, or eight of
    `num_nodes`. Rows hold `num_held` nodes."""
    config = LinearAttentionConfig(32 if kda else 16, 32, 128, 128, 4, channel_decay=kda)
    num_rows, heads, k_dim, v_dim = 20, config.num_v_heads, config.k_head_dim, config.v_head_dim
    num_requests, num_tokens = (8, 8 * num_nodes) if num_nodes else (9, 108)
    tables = [torch.empty(n, dtype=torch.int64) for n in (8, 1, num_tokens, 9 * num_requests, 2, 6)]
    accepted = torch.empty(num_requests, dtype=torch.int64)
    steps = LinearSteps(num_requests, 8, 2, num_nodes, *tables, accepted=accepted)
    rows = LayerRows(
        torch.empty(num_rows, config.conv_kernel - 1, config.num_channels, dtype=dtype),
        torch.empty(num_rows, heads, k_dim, v_dim),
        torch.empty(num_rows, num_held, config.num_channels, dtype=dtype),
        torch.empty(num_rows, num_held, (config.num_decays + 1) * heads),
    )
    sizes = [config.num_channels, config.v_size, heads, heads * config.num_decays]
    u, z, b, a = torch.empty(num_tokens, sum(sizes), dtype=dtype).split(sizes, dim=1)
    weight = torch.empty(config.num_channels, config.conv_kernel, dtype=dtype)
    g, beta = decay_and_beta(a, b, torch.empty(heads), torch.empty(sizes[3]))
    c, o = convolve(u, rows, weight, steps), u.new_empty(num_tokens, heads, v_dim)
    delta_chunks(c, g, beta, o, rows.states, config, steps)
    delta_tokens(u, g, beta, o, rows, LinearLayer(0, config, weight), steps, 8, steps.single)
    keep_inputs(u, g, beta, rows, steps)
    if not num_held:
        gates = Gates(z[:8], torch.empty(heads), torch.empty(sizes[3]), torch.empty(v_dim), 1e-6, not kda)
        arrived, layer = torch.empty(num_rows * heads, dtype=torch.int32), LinearLayer(0, config, weight)
        decode_step(u[:8], a[:8], b[:8], gates, rows, arrived, layer, steps._replace(num_requests=8))
    norm_and_gate(o, z, torch.empty(v_dim), 1e-6, silu=not kda)
    gate_heads(o.flatten(1), z.unflatten(1, (heads, v_dim)))


def turn(num_patches: int, dtype: torch.dtype) -> None:
    """q and k of a vision tower."""
    qkv = torch.empty(num_patches, 48, 72, dtype=dtype)
    rotate(qkv[:, :32], torch.empty(num_patches, dtype=torch.int64), torch.empty(num_patches, 72))


def local(num_tokens: int) -> None:
    """The experts of a rank among 128 with 16 redundant ones."""
    with torch.device("cpu"):
        experts = in_order(1, 128, 144)
    placement = ExpertPlacement(experts, 0, torch.get_default_device())
    local_experts(torch.empty(num_tokens, 8, dtype=torch.int32), placement, 72, 72)
    rows, counts = torch.empty(num_tokens, 2080, dtype=torch.int32), torch.empty(1, dtype=torch.int64)
    gathered_experts(rows[:, :8].view(torch.float32), rows[:, 8:16], counts, 64, 64)
