"""Multi-head latent attention: modules, scale, and the operations of its expanded and absorbed forms."""

from __future__ import annotations

import math

import torch
from torch import nn

from diptych.shared.config import ModelConfig
from diptych.shared.interfaces.layers import Layers, RotaryEmbedding
from diptych.shared.types.attention import MLALayer


def mla_scale(config: ModelConfig) -> float:
    """The scale of scores: head_dim ** -0.5, not row_size ** -0.5. YaRN's mscale_all_dim multiplies both q
    and k, so its square multiplies the scores."""
    scale, rope = config.head_dim**-0.5, config.rope
    if rope.rope_type == "yarn" and rope.mscale_all_dim and rope.factor > 1.0:
        scale *= (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
    return scale


class MLAModules(nn.Module):
    """What the latent vector goes through. A panel adds the linear layers that multiply the hidden states."""

    linear_class: type[nn.Module]

    def __init__(
        self, config: ModelConfig, layer_id: int, layers: Layers, rotary_emb: RotaryEmbedding
    ) -> None:
        super().__init__()
        assert config.mla is not None
        mla, num_heads = config.mla, config.num_qo_heads
        self.mla = mla
        self.kv_a_layernorm = layers.RMSNorm(mla.kv_lora_rank, mla.norm_eps)
        kv_size = num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        self.kv_b_proj = self.linear_class(mla.kv_lora_rank, kv_size)
        self.o_proj = self.linear_class(num_heads * mla.v_head_dim, config.hidden_size, config.o_bias)
        self.rotary_emb = rotary_emb
        self.layer = MLALayer(
            layer_id=config.layer_of_kind(layer_id),
            num_qo_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=config.head_dim,
            scale=mla_scale(config),
            v_head_dim=mla.v_head_dim,
            kv_lora_rank=mla.kv_lora_rank,
            qk_nope_head_dim=mla.qk_nope_head_dim,
            kv_b_proj=self.kv_b_proj,
        )


# --8<-- [start:mla-expand]
def expand(rows: torch.Tensor, layer: MLALayer) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the pool [n, 1, row_size] -> k [n, num_qo_heads, head_dim] and
    v [n, num_qo_heads, v_head_dim], in the type of the rows."""
    c, k_rope = rows.split([layer.kv_lora_rank, rows.shape[-1] - layer.kv_lora_rank], dim=-1)
    k_nope = torch.einsum("nl,hdl->nhd", c[:, 0], layer.w_k.to(c.dtype))
    v = torch.einsum("nl,hdl->nhd", c[:, 0], layer.w_v.to(c.dtype))
    return torch.cat((k_nope, k_rope.expand(-1, layer.num_qo_heads, -1)), dim=-1), v


# --8<-- [end:mla-expand]


# --8<-- [start:mla-absorb]
def absorb(q: torch.Tensor, layer: MLALayer) -> torch.Tensor:
    """q [n, num_qo_heads, head_dim] -> absorbed q [n, num_qo_heads, row_size], whose
    dot products with rows are the scores: q_nope (W_k c) = (q_nope W_k) c."""
    q_nope, q_rope = q.split([layer.qk_nope_head_dim, q.shape[-1] - layer.qk_nope_head_dim], dim=-1)
    latent = torch.einsum("nhd,hdl->nhl", q_nope, layer.w_k.to(q.dtype))
    return torch.cat((latent, q_rope), dim=-1)


def project_values(latent: torch.Tensor, layer: MLALayer) -> torch.Tensor:
    """Weighted sums of c [n, num_qo_heads, kv_lora_rank] -> weighted sums of values
    [n, num_qo_heads, v_head_dim]."""
    return torch.einsum("nhl,hdl->nhd", latent, layer.w_v.to(latent.dtype))
    # --8<-- [end:mla-absorb]
