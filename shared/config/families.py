"""The model families: what an architecture of config.json fixes. A new dense family is a row of FAMILIES."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Literal

from diptych.shared.config.fields import Fields
from diptych.shared.config.hf_gemma4 import with_gemma4
from diptych.shared.config.hf_linear_attention import KIMI_KEYS, with_kimi_linear, with_linear_attention
from diptych.shared.config.hf_llama4 import with_llama4
from diptych.shared.config.hf_small_families import (
    with_glm4_moe,
    with_granite,
    with_interleaved_rope,
    with_minimax,
    with_nope_layers,
    with_plain_local_rope,
)
from diptych.shared.config.hf_windows import NO_WINDOWS, Windows
from diptych.shared.config.model import ModelConfig, NormPlacement

DecoderName = Literal[
    "decoder", "gemma", "gemma4", "glm4", "granite", "kimi_linear", "llama4", "minimax", "olmo", "qwen_next"
]
Names = tuple[tuple[str, str], ...]
"""Parts of a checkpoint's names, and what they are in canonical names."""

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Linear layers that a checkpoint may hold as one tensor: their rows lie one below the other."""

MIXTRAL_NAMES: Names = (
    (".block_sparse_moe.", ".mlp."),
    *((f".w{i}.", f".{name}_proj.") for i, name in ((1, "gate"), (2, "down"), (3, "up"))),
)

GROUPED = {"in_proj_qkvz": ("in_proj_qkv", "in_proj_z"), "in_proj_ba": ("in_proj_b", "in_proj_a")}
"""Linear layers of Qwen3-Next that are one tensor: its rows are grouped by key head."""


@dataclass(frozen=True)
class Family:
    """What an architecture fixes, and what it takes for a key that a config.json leaves out."""

    # whose forward pass: each panel has a class
    decoder: DecoderName = "decoder"

    # the shape of a layer
    num_key_value_heads: Literal["required", "as query heads"] = "required"
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    qkv_bias: bool | None = False  # None: as attention_bias says
    o_bias: bool | None = False  # None: as attention_bias says
    mlp_bias: bool | None = False  # None: as mlp_bias says
    attention_bias: bool = False  # for a missing attention_bias
    tie_word_embeddings: bool = False
    hidden_act: tuple[str, str] = ("hidden_act", "silu")  # its key, and the value that is supported
    moe: Literal["none", "mixtral", "qwen3", "gpt-oss", "deepseek-v2", "deepseek-v3", "minimax"] = "none"
    mla: bool = False

    # norms
    qk_norm: bool = False  # of the heads of q and k
    norm_unit_offset: bool = False  # norms multiply by 1 + weight
    norms: NormPlacement = "before"
    wide_qk_norm: bool = False

    # attention and positions
    rope_theta: float = 10_000.0
    rotary_share: float = 1.0  # for a missing partial_rotary_factor
    local_rope_theta: float | None = None  # RoPE of its own in layers with a window
    is_context_scaled: bool = False  # max_position_embeddings has RoPE's factor in it
    windows: Windows = NO_WINDOWS
    attn_sinks: bool = False
    attn_scale: float | None = None  # for a missing query_pre_attn_scalar; None: head_dim stands for it
    soft_caps: tuple[float | None, float | None] = (None, None)  # of attention and of the logits

    # the checkpoint
    keys: Names = ()  # of config.json, and what they are elsewhere
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # rows of FUSED or GROUPED
    names: Names = ()
    # of gate and up
    packed_experts: Literal["rows", "columns", "alternating columns", "rows or columns"] = "rows"

    more: Callable[[ModelConfig, Fields], ModelConfig] | None = None  # what only this family has


_NORM_BEHIND_ATTENTION: Names = ((".post_attention_layernorm.", ".post_self_attn_layernorm."),)
"""A name that other families give to the norm before the MLP. In GLM-4 it is that one."""
_GEMMA = Family(
    "gemma",
    head_dim=256,
    qkv_bias=None,
    o_bias=None,
    tie_word_embeddings=True,
    hidden_act=("hidden_activation", "gelu_pytorch_tanh"),
    norm_unit_offset=True,
    norms="both",
    names=_NORM_BEHIND_ATTENTION,
    is_context_scaled=True,
    attn_scale=256.0,
)
_QWEN_NEXT = Family(
    "qwen_next",
    head_dim=256,
    qkv_bias=None,
    o_bias=None,
    qk_norm=True,
    norm_unit_offset=True,
    rope_theta=10_000_000.0,
    rotary_share=0.25,
    windows=Windows("other layer types"),
    names=((".shared_expert.", ".shared_experts."),),
    more=with_linear_attention,
)
_GLM = Family(
    head_dim=128,
    qkv_bias=None,
    rotary_share=0.5,
    fused={"gate_up_proj": FUSED["gate_up_proj"]},
    more=with_interleaved_rope,
)
_OLMO = Family(
    "olmo",
    num_key_value_heads="as query heads",
    qkv_bias=None,
    o_bias=None,
    qk_norm=True,
    wide_qk_norm=True,
    norms="after",
    names=_NORM_BEHIND_ATTENTION,
)
_QWEN3_MOE = Family(
    qkv_bias=None, o_bias=None, qk_norm=True, windows=Windows("optional, all layers"), moe="qwen3"
)
_QWEN_WINDOWS = Windows("optional, from max_window_layers")

FAMILIES = {
    "LlamaForCausalLM": Family(
        num_key_value_heads="as query heads", qkv_bias=None, o_bias=None, mlp_bias=None
    ),
    # a sliding window in every layer, in early releases
    "MistralForCausalLM": Family(windows=Windows("all layers", default=4096)),
    # --8<-- [start:family-row]
    # one tensor for q, k and v, and one for gate and up; a share of each head rotates
    "Phi3ForCausalLM": Family(
        num_key_value_heads="as query heads", windows=Windows("all layers"), fused=FUSED
    ),
    # --8<-- [end:family-row]
    "Qwen2ForCausalLM": Family(qkv_bias=True, windows=_QWEN_WINDOWS),
    "Qwen3ForCausalLM": Family(head_dim=128, qkv_bias=None, o_bias=None, qk_norm=True, windows=_QWEN_WINDOWS),
    # four norms a layer, 1 + weight in each; soft-caps; a window in every other layer
    "Gemma2ForCausalLM": replace(
        _GEMMA, windows=Windows("all but every nth", default=4096, every=2), soft_caps=(50.0, 30.0)
    ),
    # norms on heads instead of the caps; windows in five layers of six, and a RoPE of their own
    "Gemma3ForCausalLM": replace(
        _GEMMA,
        qk_norm=True,
        rope_theta=1_000_000.0,
        local_rope_theta=10_000.0,
        windows=Windows("all but every nth", default=4096, every=6),
    ),
    # two sizes of heads, V from the projection of K, KV of earlier layers, embeddings of each layer, experts
    # beside the MLP
    "Gemma4ForCausalLM": replace(
        _GEMMA,
        decoder="gemma4",
        norm_unit_offset=False,
        qk_norm=True,
        rope_theta=1_000_000.0,
        local_rope_theta=10_000.0,
        windows=Windows("all but every nth", default=512, every=6),
        names=(
            *_NORM_BEHIND_ATTENTION,
            *(
                (".moe.experts.", ".experts."),
                (".experts.", ".moe.experts."),
                (".router.proj.", ".moe.gate."),
                (".router.", ".moe."),
            ),
        ),
        more=with_gemma4,
    ),
    # sinks in attention; experts with biases and a clamped SwiGLU; a window in every other layer
    "GptOssForCausalLM": Family(
        head_dim=64,
        qkv_bias=None,
        o_bias=None,
        attention_bias=True,
        rope_theta=150_000.0,
        windows=Windows("all but every nth", default=128, every=2),
        attn_sinks=True,
        moe="gpt-oss",
        names=((".mlp.router.", ".mlp.gate."),),
        packed_experts="alternating columns",
    ),
    # chunked attention with RoPE, full attention without; one expert of many, and a shared one
    "Llama4ForCausalLM": Family(
        "llama4",
        num_key_value_heads="as query heads",
        head_dim=128,
        qkv_bias=None,
        o_bias=None,
        rope_theta=500_000.0,
        windows=Windows("other layer types"),
        names=((".feed_forward.", ".mlp."), (".router.", ".gate."), (".shared_expert.", ".shared_experts.")),
        packed_experts="columns",
        more=with_llama4,
    ),
    # MoE in every layer: softmax over all experts, the best two renormalised
    "MixtralForCausalLM": Family(rope_theta=1_000_000.0, windows=Windows("all layers"), moe="mixtral"),
    # Qwen3 with MoE in the layers of decoder_sparse_step and mlp_only_layers
    "Qwen3MoeForCausalLM": _QWEN3_MOE,
    # the same in Qwen3-VL, whose published checkpoints have experts packed and transposed
    "Qwen3VLMoeForCausalLM": replace(_QWEN3_MOE, packed_experts="rows or columns"),
    # no RoPE in every fourth layer
    "SmolLM3ForCausalLM": Family(
        qkv_bias=None,
        o_bias=None,
        mlp_bias=None,
        tie_word_embeddings=True,
        rope_theta=2_000_000.0,
        windows=Windows("optional, all layers"),
        more=with_nope_layers,
    ),
    # half of each head rotates, neighbouring dimensions together
    "GlmForCausalLM": _GLM,
    # the same with four norms a layer
    "Glm4ForCausalLM": replace(
        _GLM,
        decoder="glm4",
        norms="both",
        names=(
            (".post_attention_layernorm.", ".pre_feedforward_layernorm."),
            (".post_mlp_layernorm.", ".post_feedforward_layernorm."),
        ),
    ),
    # dense first layers, then DeepSeek-V3's experts; half of each head rotates, its halves together
    "Glm4MoeForCausalLM": Family(qkv_bias=None, rotary_share=0.5, moe="deepseek-v3", more=with_glm4_moe),
    # factors of the embeddings, of what a layer adds, and of the logits
    "GraniteForCausalLM": Family(
        "granite",
        num_key_value_heads="as query heads",
        qkv_bias=None,
        o_bias=None,
        mlp_bias=None,
        more=with_granite,
    ),
    # norms behind attention and MLP, and none before; one norm over all heads of q, and one over those of k
    "Olmo2ForCausalLM": _OLMO,
    # windows in three layers of four, where RoPE is not scaled
    "Olmo3ForCausalLM": replace(
        _OLMO,
        rope_theta=500_000.0,
        local_rope_theta=500_000.0,
        windows=Windows("all but every nth", default=4096, every=4),
        more=with_plain_local_rope,
    ),
    # one norm over all heads of q, and one over those of k; experts chosen by a sigmoid and a bias
    "MiniMaxM2ForCausalLM": Family(
        "minimax",
        head_dim=128,
        qk_norm=True,
        wide_qk_norm=True,
        rope_theta=5_000_000.0,
        moe="minimax",
        names=((".block_sparse_moe.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),),
        more=with_minimax,
    ),
    # gated DeltaNet in three layers of four, gated attention in the fourth; MoE with a shared expert
    "Qwen3NextForCausalLM": replace(_QWEN_NEXT, moe="qwen3", fused=GROUPED),
    # the same layers with an MLP, or with MoE
    "Qwen3_5ForCausalLM": _QWEN_NEXT,
    "Qwen3_5MoeForCausalLM": replace(_QWEN_NEXT, moe="qwen3"),
    # multi-head latent attention; dense first layers, then MoE with shared experts and groups of experts
    "DeepseekV2ForCausalLM": Family(qkv_bias=None, o_bias=None, moe="deepseek-v2", mla=True),
    # the same, routed by a sigmoid and a bias for each expert
    "DeepseekV3ForCausalLM": Family(qkv_bias=None, o_bias=None, moe="deepseek-v3", mla=True),
    # KDA in three layers of four, latent attention without RoPE in the fourth; DeepSeek-V3's experts
    "KimiLinearForCausalLM": Family(
        "kimi_linear",
        moe="deepseek-v3",
        mla=True,
        windows=Windows("other layer types"),
        keys=KIMI_KEYS,
        names=(
            *MIXTRAL_NAMES,
            (".b_proj.", ".in_proj_b."),
            (".o_norm.", ".norm."),
            (".linear_attn.o_proj.", ".linear_attn.out_proj."),
        ),
        more=with_kimi_linear,
    ),
}


def find_class(architecture: str, classes: Mapping[str, str]) -> Any:
    """The class of a panel. `classes`: "module:class" by `Family.decoder`. Raises `ValueError` for an unknown
    architecture."""
    if architecture not in FAMILIES:
        raise ValueError(f"no model for architecture {architecture!r}; supported are {', '.join(FAMILIES)}")
    module, name = classes[FAMILIES[architecture].decoder].split(":")
    return getattr(import_module(module), name)
