"""ModelConfig: what a Hugging Face config.json says, in one vocabulary for all families."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. The fields beyond `rotary_dim` belong to the scaling types named beside
    them."""

    rope_type: RopeType
    theta: float
    rotary_dim: int  # leading dimensions of a head that rotate (head_dim, or less)
    factor: float = 1.0  # linear, dynamic, llama3, yarn
    original_max_position_embeddings: int = 0  # dynamic, llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: by the formula
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions


@dataclass(frozen=True)
class MoEConfig:
    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    norm_topk_prob: bool  # renormalise the chosen weights to sum 1
    routing: Literal["softmax", "grouped", "biased-grouped"] = "softmax"
    num_expert_groups: int = 1  # grouped kinds
    topk_group: int = 1  # grouped kinds: groups kept
    routed_scaling_factor: float = 1.0
    shared_intermediate_size: int = 0  # 0: no shared experts
    shared_expert_gate: bool = False  # a sigmoid gate on the shared experts' output


@dataclass(frozen=True)
class ModelConfig:
    architecture: str  # "LlamaForCausalLM", "Qwen3MoeForCausalLM" ...
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    context_len: int  # max_position_embeddings
    rope: RopeConfig
    dtype: torch.dtype  # of the checkpoint
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_windows: tuple[int, ...] = ()  # per layer, previous tokens visible (HF window - 1); -1: all
    attn_logit_cap: float = 0.0  # soft-cap; 0: none
    moe: MoEConfig | None = None
    moe_layers: frozenset[int] = field(default_factory=frozenset)  # layers whose MLP is an MoE
    eos_token_ids: frozenset[int] = frozenset()
    bos_token_id: int | None = None
