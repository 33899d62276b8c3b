"""ModelConfig: what a Hugging Face config.json says, in one vocabulary for all families."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch

from diptych.shared.config.quant_config import QuantConfig

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]
HiddenAct = Literal["silu", "gelu_tanh"]
NormPlacement = Literal["before", "both", "after"]
"""Of the norms of attention and of the MLP."""
EXPERT_NORMS = "post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"
"""Gemma-4: behind the MLP, and before and behind the experts beside it."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. The fields beyond `rotary_dim` belong to the scaling types named beside
    them; `diptych.shared.modeling.rope` turns them into frequencies."""

    rope_type: RopeType
    theta: float
    rotary_dim: int  # leading dimensions of a head that rotate (head_dim, or less)
    factor: float = 1.0  # linear, dynamic, llama3, yarn, longrope, proportional
    original_max_position_embeddings: int = 0  # dynamic, llama3, yarn, longrope
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn, longrope; None: by the formula
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    short_factor: tuple[float, ...] = ()  # longrope: divisors in a context up to the original
    long_factor: tuple[float, ...] = ()  # longrope: in a longer one
    is_long: bool = False  # longrope: long_factor is used
    turning_dim: int = 0  # proportional: of rotary_dim, so many turn; the angles of the others are 0
    is_interleaved: bool = False  # dimensions 2i and 2i + 1 turn together, not i and i + rotary_dim / 2
    # Of images: frequencies that turn by a position in time, by a row and by a column. (): one position.
    mrope_section: tuple[int, ...] = ()

    @property
    def axis_ends(self) -> tuple[int, int]:
        """Frequency i turns by the row if i % 3 is 1 and i is below the first number, by the column if
        i % 3 is 2 and i is below the second, and else by time."""
        return (3 * self.mrope_section[1], 3 * self.mrope_section[2]) if self.mrope_section else (0, 0)


@dataclass(frozen=True)
class MoEConfig:
    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    norm_topk_prob: bool  # renormalise the chosen weights to sum 1
    routing: Literal["softmax", "grouped", "biased-grouped", "sigmoid"] = "softmax"
    weight_on_input: bool = (
        False  # Llama-4: the router's weight multiplies the input of a token's only expert
    )
    num_expert_groups: int = 1  # grouped kinds
    topk_group: int = 1  # grouped kinds: groups kept
    routed_scaling_factor: float = 1.0
    shared_intermediate_size: int = 0  # 0: no shared experts
    shared_expert_gate: bool = False  # a sigmoid gate on the shared experts' output
    bias: bool = False  # GPT-OSS: the router and both matrices of an expert have biases
    swiglu_limit: float = 0.0  # GPT-OSS: experts have a clamped SwiGLU; 0: plain SwiGLU
    num_local_experts: int | None = None  # expert parallelism: those that a rank has; None: all
    hidden_act: HiddenAct = "silu"  # of the experts
    beside_mlp: bool = False  # Gemma-4: their layers have an MLP, too

    def __post_init__(self) -> None:
        if self.num_experts % self.num_expert_groups != 0:
            raise ValueError(
                f"num_experts ({self.num_experts}) is no multiple of num_expert_groups "
                f"({self.num_expert_groups})"
            )
        num_eligible = self.num_experts
        if self.routing in ("grouped", "biased-grouped"):
            num_eligible = self.topk_group * (self.num_experts // self.num_expert_groups)
        if self.weight_on_input and self.num_experts_per_tok != 1:
            raise ValueError(
                f"weight_on_input: num_experts_per_tok is {self.num_experts_per_tok}; it must be 1"
            )
        if not 1 <= self.num_experts_per_tok <= num_eligible <= self.num_experts:
            raise ValueError(
                f"num_experts_per_tok ({self.num_experts_per_tok}) must be between 1 and the experts that a "
                f"token can choose from ({num_eligible} of {self.num_experts})"
            )


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention. A token's KV is one row for all heads: a latent vector of kv_lora_rank
    numbers and a rotated key of qk_rope_head_dim."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None  # None: q comes from one matrix
    norm_eps: float = 1e-6  # of the norms of the latent vectors, whatever rms_norm_eps is

    @property
    def row_size(self) -> int:
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True)
class LinearAttentionConfig:
    """Gated DeltaNet, and KDA. A key head serves num_v_heads / num_k_heads value heads. A causal convolution
    runs over the channels of q, k and v before the recurrence."""

    num_k_heads: int
    num_v_heads: int
    k_head_dim: int
    v_head_dim: int
    conv_kernel: int  # taps of the convolution, that of the token itself included
    channel_decay: bool = False  # KDA: a head has a decay for each channel of k, and not one for all

    def __post_init__(self) -> None:
        if self.num_v_heads % self.num_k_heads != 0:
            raise ValueError(
                f"linear_num_value_heads ({self.num_v_heads}) is no multiple of linear_num_key_heads "
                f"({self.num_k_heads})"
            )

        if self.channel_decay and self.num_v_heads != self.num_k_heads:
            raise ValueError(f"channel_decay with {self.num_k_heads} key and {self.num_v_heads} value heads")

    @property
    def k_size(self) -> int:
        return self.num_k_heads * self.k_head_dim

    @property
    def v_size(self) -> int:
        return self.num_v_heads * self.v_head_dim

    @property
    def num_decays(self) -> int:
        """Numbers of g for a value head and token."""
        return self.k_head_dim if self.channel_decay else 1

    @property
    def num_channels(self) -> int:
        """The convolution's channels: all heads of q, then of k, then of v."""
        return 2 * self.k_size + self.v_size

    @property
    def projections(self) -> dict[str, int]:
        """The matrices that multiply the input, by name, and their rows."""
        if not self.channel_decay:
            qkv = {"in_proj_qkv": self.num_channels, "in_proj_z": self.v_size}
            return {**qkv, "in_proj_b": self.num_v_heads, "in_proj_a": self.num_v_heads}
        qkv = {"q_proj": self.k_size, "k_proj": self.k_size, "v_proj": self.v_size}
        low_rank = {"f_a_proj": self.k_head_dim, "g_a_proj": self.v_head_dim}
        return {**qkv, **low_rank, "in_proj_b": self.num_v_heads}

    @property
    def convolutions(self) -> dict[str, int]:
        """Parts of the convolution's weight, by name, and their channels."""
        if not self.channel_decay:
            return {"conv1d": self.num_channels}
        return {"q_conv1d": self.k_size, "k_conv1d": self.k_size, "v_conv1d": self.v_size}


class KVHeads(NamedTuple):
    """K, and V, of a token in one layer."""

    num_kv_heads: int
    head_dim: int


class AttnTemperature(NamedTuple):
    """Layers without RoPE scale q at position p by ln(1 + floor((p + 1) / floor_scale)) * scale + 1."""

    floor_scale: int
    scale: float


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
    context_len: int  # max_position_embeddings, or what the RoPE scaling extends it to
    rope: RopeConfig
    dtype: torch.dtype  # of the checkpoint
    tie_word_embeddings: bool = False
    hidden_act: HiddenAct = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_unit_offset: bool = False  # Gemma: norms multiply by 1 + weight
    norms: NormPlacement = "before"  # Gemma, GLM-4: attention and MLP end with a norm, too; OLMo: only so
    wide_qk_norm: bool = False  # with qk_norm: one norm over all heads, and not one for each
    kv_heads: tuple[KVHeads, ...] = ()  # of each layer; (): num_kv_heads and head_dim in all
    num_kv_shared_layers: int = 0  # so many last layers read the KV of an earlier one: `kv_source`
    k_eq_v_layers: frozenset[int] = field(default_factory=frozenset)  # V comes from the projection of K
    intermediate_sizes: tuple[int, ...] = ()  # of each layer; (): intermediate_size in all
    layer_scalar: bool = False  # Gemma-4: each layer's output has a factor,
    layer_input_size: int = 0  # and each token an embedding of this size for each layer; 0: none
    embed_scale: float = 1.0  # Granite: times the embeddings,
    residual_scale: float = 1.0  # times what attention and the MLP add,
    logits_scale: float = 1.0  # and times the logits
    attn_scale: float | None = None  # multiplies q·k; None: head_dim ** -0.5
    local_rope: RopeConfig | None = None  # RoPE of the layers with a sliding window; None: rope
    nope_layers: frozenset[int] = field(default_factory=frozenset)  # layers without RoPE
    attn_temperature: AttnTemperature | None = None  # Llama-4: of these layers
    qk_l2_norm: bool = False  # Llama-4: after RoPE, heads of q and k get a norm without a weight
    attention_chunks: tuple[int, ...] = ()  # per layer: a token sees its chunk of so many positions; 0: all
    sliding_windows: tuple[int, ...] = ()  # per layer, previous tokens visible (HF window - 1); -1: all
    attn_sinks: bool = False  # GPT-OSS: each head has one more logit in the softmax
    attn_logit_cap: float = 0.0  # soft-cap; 0: none
    final_logit_cap: float = 0.0  # soft-cap of the logits over the vocabulary; 0: none
    moe: MoEConfig | None = None
    moe_layers: frozenset[int] = field(default_factory=frozenset)  # layers whose MLP is an MoE
    num_nextn_layers: int = 0  # behind the last layer a checkpoint has so many for drafting (NEXTN, or MTP)
    mla: MLAConfig | None = None  # head_dim is then that of q and k, qk_nope_head_dim + qk_rope_head_dim
    attn_output_gate: bool = False  # q_proj gives each head a gate, too: sigmoid(gate) times its output
    linear_attention: LinearAttentionConfig | None = None  # of the layers without KV
    linear_layers: frozenset[int] = field(default_factory=frozenset)  # these layers; the others have KV
    eos_token_ids: frozenset[int] = frozenset()
    bos_token_id: int | None = None
    num_labels: int = 0  # of a reward model: rows of its head, which gives scores and no tokens
    quantization: QuantConfig | None = None  # of linear layers; None: all weights are of `dtype`

    def __post_init__(self) -> None:
        if self.num_qo_heads % self.num_kv_heads != 0:
            raise ValueError(
                f"num_qo_heads ({self.num_qo_heads}) is no multiple of num_kv_heads ({self.num_kv_heads})"
            )
        if self.sliding_windows and len(self.sliding_windows) != self.num_hidden_layers:
            raise ValueError(
                f"sliding_windows has {len(self.sliding_windows)} entries for {self.num_hidden_layers} layers"
            )
        for name in ("kv_heads", "intermediate_sizes"):
            if getattr(self, name) and len(getattr(self, name)) != self.num_hidden_layers:
                raise ValueError(
                    f"{name} has {len(getattr(self, name))} entries for {self.num_hidden_layers} layers"
                )
        if self.moe_layers and self.moe is None:
            raise ValueError(f"moe_layers names {len(self.moe_layers)} layers, but there is no MoE config")

    @property
    def layer_norms(self) -> tuple[str, ...]:
        """Names of a layer's norms of the hidden size, in the order in which it uses them."""
        if self.norms == "after":
            return "post_self_attn_layernorm", "post_feedforward_layernorm"
        if self.norms == "both":
            before = ("input_layernorm", "pre_feedforward_layernorm")
            return before[0], "post_self_attn_layernorm", before[1], "post_feedforward_layernorm"
        return "input_layernorm", "post_attention_layernorm"

    @property
    def num_own_layers(self) -> int:
        """The layers before those that read the KV of an earlier one."""
        return self.num_hidden_layers - self.num_kv_shared_layers

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """The layers with KV of their own, in the order of the pool: those of linear attention have none."""
        return tuple(i for i in range(self.num_own_layers) if i not in self.linear_layers)

    @property
    def num_kv_layers(self) -> int:
        return len(self.kv_layers)

    # --8<-- [start:kv-source]
    def kv_source(self, layer_id: int) -> int:
        """The layer whose KV a layer reads: itself, or the last own one of its kind."""
        if layer_id < self.num_own_layers:
            return layer_id
        window = self.sliding_window(layer_id)
        return max(i for i in range(self.num_own_layers) if self.sliding_window(i) == window)

    # --8<-- [end:kv-source]

    def projections(self, layer_id: int) -> tuple[str, ...]:
        """The projections of a layer's attention: fewer than three where K and V come from elsewhere."""
        if self.kv_source(layer_id) != layer_id:
            return ("q_proj",)
        return ("q_proj", "k_proj") if layer_id in self.k_eq_v_layers else ("q_proj", "k_proj", "v_proj")

    def of_layer(self, layer_id: int) -> ModelConfig:
        """The same config with the sizes of one layer, where layers differ."""
        config = self
        if self.kv_heads:
            config = replace(config, **self.kv_heads[layer_id]._asdict())
        if self.intermediate_sizes:
            config = replace(config, intermediate_size=self.intermediate_sizes[layer_id])
        return config

    def layer_of_kind(self, layer_id: int) -> int:
        """The index of a layer among those of its kind, with KV or with states: its place in their pool.
        Layers that share KV share the place."""
        layer_id = self.kv_source(layer_id)
        is_linear = layer_id in self.linear_layers
        return sum((i in self.linear_layers) == is_linear for i in range(layer_id))

    @property
    def v_head_dim(self) -> int:
        """Numbers that attention returns for a head."""
        return self.head_dim if self.mla is None else self.mla.v_head_dim

    @property
    def kv_size(self) -> int:
        """Numbers that a token has in the KV pool, in one layer: see `of_layer`."""
        return 2 * self.num_kv_heads * self.head_dim if self.mla is None else self.mla.row_size

    def sliding_window(self, layer_id: int) -> int:
        """Previous tokens that a token of the layer sees beside itself; -1: all."""
        return self.sliding_windows[layer_id] if self.sliding_windows else -1

    def attention_chunk(self, layer_id: int) -> int:
        return self.attention_chunks[layer_id] if self.attention_chunks else 0

    def layer_rope(self, layer_id: int) -> RopeConfig | None:
        if layer_id in self.nope_layers:
            return None
        has_window = self.sliding_window(layer_id) >= 0
        return self.local_rope if self.local_rope is not None and has_window else self.rope
