"""The weights of a model, and a canonical name for each.

Checkpoints name experts in several ways: one tensor per expert and matrix (Qwen3-MoE's
`mlp.experts.3.up_proj`, Mixtral's `block_sparse_moe.experts.3.w3`), or all experts of a layer in one
(`mlp.experts.gate_up_proj`: as transformers 5 holds them in memory, or transposed, as in GPT-OSS). The first
form is the canonical one for every family. So are q_proj, k_proj and v_proj, where a family has one tensor
for the three. What a family's checkpoints have is in its row of `diptych.shared.config.families`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import torch

from diptych.shared.config import MLAConfig, ModelConfig, MoEConfig
from diptych.shared.config.families import FAMILIES, GROUPED, Family
from diptych.shared.config.hf_multimodal import language_name
from diptych.shared.config.model import EXPERT_NORMS, LinearAttentionConfig

_MIXTRAL = re.compile(r"(model\.layers\.\d+)\.block_sparse_moe\.(gate|experts\.(\d+)\.(w1|w2|w3))\.weight")
_MIXTRAL_PROJ = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_CORRECTION_BIAS = ".mlp.gate.e_score_correction_bias"
AUDIO = ("model.audio_tower.", "audio_tower.", "model.embed_audio.", "embed_audio.")
VISION = (
    *("model.embed_vision.", "embed_vision."),
    *("vision_tower.", "model.vision_tower.", "vision_model.", "model.visual.", "visual."),
    *("multi_modal_projector.", "model.multi_modal_projector."),
)
_PACKED_WITH_BIAS = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(gate_up_proj|down_proj)(_bias)?")
KV_SCALE = re.compile(
    r"model\.layers\.(\d+)\.self_attn\."
    r"(?:(kv_scale)|(?:k_proj\.)?(k)_scale|(?:v_proj\.)?(v)_scale|(k|v)_proj\.output_scale)"
)
_OF_KV = re.compile(r"model\.layers\.(\d+)\.self_attn\.(?:k_proj|v_proj|k_norm|v_norm)\.\w+")
_OF_ATTENTION = re.compile(r"model\.layers\.(\d+)\.self_attn\.")
_PACKED = re.compile(r"(model\.layers\.\d+\.(?:mlp|moe)\.experts)\.(gate_up_proj|down_proj)")


class WeightPart(NamedTuple):
    """The place of a canonical weight in a tensor of a checkpoint."""

    name: str
    index: tuple[int | slice | torch.Tensor, ...]  # type: ignore[assignment]  # where in the tensor; (): all
    shape: tuple[int, ...]
    is_transposed: bool = False  # in the tensor

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        part = tensor[self.index]
        return part.T if self.is_transposed else part


def canonical_parts(name: str, shape: tuple[int, ...], config: ModelConfig | None = None) -> list[WeightPart]:
    """The canonical weights in a tensor of this name and shape: the tensor itself, several that a family has
    in one, or many in packed experts. `config`: of the language model; without one (a draft model) names get
    no prefix."""
    name = language_name(name)
    family = Family() if config is None else FAMILIES.get(config.architecture, Family())
    if config is not None and name.startswith(("embed_tokens.", "layers.", "norm.")):
        name = f"model.{name}"  # saved without a head, as embedding models are
    linear = None if config is None else config.linear_attention
    match = _OF_ATTENTION.match(name) if linear is not None and linear.channel_decay else None
    if config is not None and match and int(match[1]) in config.linear_layers:
        name = name.replace(".self_attn.", ".linear_attn.")  # Kimi-Linear has one name for both kinds
    for theirs, ours in family.names:
        name = name.replace(theirs, ours)
    parent, _, last = name.rpartition(".")
    parent, _, module = parent.rpartition(".")
    if config is not None and config.linear_attention is not None and module in GROUPED:
        return _grouped_parts(parent, module, shape, config.linear_attention)
    if config is not None and module in family.fused:
        return _fused_parts(parent, family.fused[module], last, shape, config)
    if family.packed_experts != "rows" and not _are_rows(name, shape, config, family):
        return _transposed_parts(name, shape, family.packed_experts == "alternating columns")
    if match := _MIXTRAL.fullmatch(name):
        layer, router, expert_id, matrix = match.groups()
        if router == "gate":
            return [WeightPart(f"{layer}.mlp.gate.weight", (), shape)]
        return [WeightPart(f"{layer}.mlp.experts.{expert_id}.{_MIXTRAL_PROJ[matrix]}.weight", (), shape)]
    if name.endswith(".A_log"):  # [heads], or [1, 1, heads, 1]
        index = tuple(slice(None) if size > 1 else 0 for size in shape) if len(shape) > 1 else ()
        return [WeightPart(name, index, (math.prod(shape),))]
    if name.endswith(_CORRECTION_BIAS):
        return [WeightPart(name.replace(".gate.e_score_correction_bias", ".correction_bias"), (), shape)]
    match = _PACKED.fullmatch(name)
    if match is None or len(shape) != 3:
        return [WeightPart(name, (), shape)]
    experts, matrix = match.groups()
    num_experts, num_rows, num_columns = shape
    if matrix == "down_proj":
        return [
            WeightPart(f"{experts}.{e}.down_proj.weight", (e,), (num_rows, num_columns))
            for e in range(num_experts)
        ]
    half = num_rows // 2
    return [
        WeightPart(f"{experts}.{e}.{proj}.weight", (e, rows), (rows.stop - rows.start, num_columns))
        for e in range(num_experts)
        for proj, rows in (("gate_proj", slice(0, half)), ("up_proj", slice(half, num_rows)))
    ]


def _are_rows(name: str, shape: tuple[int, ...], config: ModelConfig | None, family: Family) -> bool:
    """Whether these packed experts are not transposed, as transformers 5 holds and writes them."""
    match = _PACKED.fullmatch(name)
    if match is None or config is None or config.moe is None or family.packed_experts != "rows or columns":
        return False
    num_columns = config.hidden_size if match[2] == "gate_up_proj" else config.moe.intermediate_size
    if shape[-1] == shape[-2]:
        raise ValueError(
            f"{name} has shape {list(shape)}: it may be transposed or not, which a square does not tell"
        )
    return shape[-1] == num_columns


def _fused_parts(
    parent: str, names: tuple[str, ...], kind: str, shape: tuple[int, ...], config: ModelConfig
) -> list[WeightPart]:
    """The weights or biases of linear layers whose rows lie one below the other. Rows that are missing or too
    many are those of the last."""
    q_size, kv_size = config.num_qo_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sizes = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
    parts, start = [], 0
    for name in names:
        end = start + sizes.get(name, config.intermediate_size) if name != names[-1] else None
        num_rows = len(range(shape[0])[start:end])
        parts.append(WeightPart(f"{parent}.{name}.{kind}", (slice(start, end),), (num_rows, *shape[1:])))
        start = end or start
    return parts


def _grouped_parts(
    parent: str, module: str, shape: tuple[int, ...], linear: LinearAttentionConfig
) -> list[WeightPart]:
    """The weights of linear attention's projections whose rows lie key head by key head: for each, its q, its
    k, and v and z (or b and a) of its value heads."""
    num_v = linear.num_v_heads // linear.num_k_heads
    sizes = [num_v, num_v]
    if module == "in_proj_qkvz":
        sizes = [linear.k_head_dim, linear.k_head_dim] + [num_v * linear.v_head_dim] * 2
    if shape[0] != linear.num_k_heads * sum(sizes):
        return [WeightPart(f"{parent}.{module}.weight", (), shape)]
    of_each = torch.arange(shape[0]).view(linear.num_k_heads, -1).split(sizes, dim=1)
    rows = [these.flatten() for these in of_each]
    if module == "in_proj_qkvz":
        rows = [torch.cat(rows[:3]), rows[3]]
    return [
        WeightPart(f"{parent}.{name}.weight", (these,), (len(these), *shape[1:]))
        for name, these in zip(GROUPED[module], rows)
    ]


def _transposed_parts(name: str, shape: tuple[int, ...], rows_take_turns: bool) -> list[WeightPart]:
    """The canonical weights in packed and transposed experts: gate_up_proj [num_experts, hidden, 2 *
    intermediate], gate before up or interleaved, and down_proj [num_experts, intermediate, hidden]; and their
    biases."""
    match = _PACKED_WITH_BIAS.fullmatch(name)
    if match is None or len(shape) != (2 if match[3] else 3):
        return [WeightPart(name, (), shape)]
    experts, matrix, kind = match[1], match[2], "bias" if match[3] else "weight"
    rows = {"down_proj": slice(None)}
    if matrix == "gate_up_proj":
        half = shape[-1] // 2
        rows = {"gate_proj": slice(0, half), "up_proj": slice(half, None)}
        if rows_take_turns:
            rows = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
    parts = []
    for expert_id in range(shape[0]):
        for proj, these in rows.items():
            num_rows = len(range(shape[-1])[these])
            index = (expert_id, these) if match[3] else (expert_id, slice(None), these)
            part_shape = (num_rows, *shape[1:-1])
            part_name = f"{experts}.{expert_id}.{proj}.{kind}"
            parts.append(WeightPart(part_name, index, part_shape, is_transposed=kind == "weight"))
    return parts


def unused_part(name: str, config: ModelConfig) -> str | None:
    """The part of a checkpoint beside the language model that a tensor is of, by its name."""
    if name.startswith(VISION):
        return "images"
    if name.startswith(AUDIO):
        return "audio"
    match = _OF_KV.fullmatch(language_name(name))
    if match and config.kv_source(int(match[1])) != int(match[1]):
        return "KV that an earlier layer gives"
    layers = range(config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_layers)
    drafting = [f"model.layers.{layer}." for layer in layers]
    drafting += ["mtp."] if config.linear_attention is not None else []
    return "drafting" if language_name(name).startswith(tuple(drafting)) else None


def is_harmless(name: str, config: ModelConfig) -> bool:
    """Whether a tensor may be in a checkpoint though the model does not load it: RoPE frequencies, a tied
    head, scales of KV (`diptych.shared.loading.kv_scales`), the head of a reward model, layers for drafting,
    and those for images."""
    if unused_part(name, config) is not None:
        return True
    name = language_name(name)
    if name.endswith(".rotary_emb.inv_freq") or KV_SCALE.fullmatch(name):
        return True
    return (config.tie_word_embeddings and name == "lm_head.weight") or (
        config.num_labels > 0 and name == "score.weight"
    )


class _Shapes(dict[str, tuple[int, ...]]):
    """Shapes of weights by name, added part by part."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    def linear(self, name: str, num_out: int, num_in: int, bias: bool = False) -> None:
        self[f"{name}.weight"] = (num_out, num_in)
        if bias:
            self[f"{name}.bias"] = (num_out,)

    def mlp(self, name: str, intermediate_size: int, bias: bool = False) -> None:
        hidden_size = self.config.hidden_size
        self.linear(f"{name}.gate_proj", intermediate_size, hidden_size, bias)
        self.linear(f"{name}.up_proj", intermediate_size, hidden_size, bias)
        self.linear(f"{name}.down_proj", hidden_size, intermediate_size, bias)

    def mla(self, name: str, mla: MLAConfig) -> None:
        """Projections of latent attention to q, and to keys and values."""
        config, q_size = self.config, self.config.num_qo_heads * self.config.head_dim
        if mla.q_lora_rank is None:
            self.linear(f"{name}.q_proj", q_size, config.hidden_size)
        else:
            self.linear(f"{name}.q_a_proj", mla.q_lora_rank, config.hidden_size, config.qkv_bias)
            self[f"{name}.q_a_layernorm.weight"] = (mla.q_lora_rank,)
            self.linear(f"{name}.q_b_proj", q_size, mla.q_lora_rank)
        self.linear(f"{name}.kv_a_proj_with_mqa", mla.row_size, config.hidden_size, config.qkv_bias)
        self[f"{name}.kv_a_layernorm.weight"] = (mla.kv_lora_rank,)
        num_out = config.num_qo_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        self.linear(f"{name}.kv_b_proj", num_out, mla.kv_lora_rank)

    def attention(self, name: str, projections: tuple[str, ...]) -> None:
        config, hidden_size, head_dim = self.config, self.config.hidden_size, self.config.head_dim
        if config.mla is not None:
            self.mla(name, config.mla)
        else:
            q_size = config.num_qo_heads * head_dim * (2 if config.attn_output_gate else 1)
            for part in projections:
                size = q_size if part == "q_proj" else config.num_kv_heads * head_dim
                self.linear(f"{name}.{part}", size, hidden_size, config.qkv_bias)
        if config.qk_norm:
            is_wide = config.wide_qk_norm
            self[f"{name}.q_norm.weight"] = (head_dim * (config.num_qo_heads if is_wide else 1),)
            if "k_proj" in projections:
                self[f"{name}.k_norm.weight"] = (head_dim * (config.num_kv_heads if is_wide else 1),)
        self.linear(f"{name}.o_proj", hidden_size, config.num_qo_heads * config.v_head_dim, config.o_bias)
        if config.attn_sinks:
            self[f"{name}.sinks"] = (config.num_qo_heads,)

    def layer_input(self, name: str, size: int) -> None:
        hidden_size = self.config.hidden_size
        if size > 0:
            self.linear(f"{name}.per_layer_input_gate", size, hidden_size)
            self.linear(f"{name}.per_layer_projection", hidden_size, size)
            self[f"{name}.post_per_layer_input_norm.weight"] = (hidden_size,)
        self[f"{name}.layer_scalar"] = (1,)

    def linear_attention(self, name: str, linear: LinearAttentionConfig) -> None:
        hidden_size = self.config.hidden_size
        for part, size in linear.projections.items():
            self.linear(f"{name}.{part}", size, hidden_size)
        if linear.channel_decay:
            self.linear(f"{name}.f_b_proj", linear.k_size, linear.k_head_dim)
            self.linear(f"{name}.g_b_proj", linear.v_size, linear.v_head_dim)
        for part, size in linear.convolutions.items():
            self[f"{name}.{part}.weight"] = (size, 1, linear.conv_kernel)
        self[f"{name}.A_log"] = (linear.num_v_heads,)
        self[f"{name}.dt_bias"] = (linear.num_v_heads * linear.num_decays,)
        self[f"{name}.norm.weight"] = (linear.v_head_dim,)
        self.linear(f"{name}.out_proj", hidden_size, linear.v_size)

    def experts(self, name: str, moe: MoEConfig) -> None:
        """Router, experts, and the experts that every token takes."""
        self.linear(f"{name}.gate", moe.num_experts, self.config.hidden_size, moe.bias)
        if moe.routing == "biased-grouped":
            self[f"{name}.correction_bias"] = (moe.num_experts,)
        for expert_id in range(moe.num_local_experts or moe.num_experts):
            self.mlp(f"{name}.experts.{expert_id}", moe.intermediate_size, moe.bias)
        if moe.shared_intermediate_size > 0:
            self.mlp(f"{name}.shared_experts", moe.shared_intermediate_size)
            if moe.shared_expert_gate:
                self.linear(f"{name}.shared_expert_gate", 1, self.config.hidden_size)
        if moe.beside_mlp:
            self[f"{name}.scale"] = (self.config.hidden_size,)
            self[f"{name}.per_expert_scale"] = (moe.num_experts,)
            for norm in EXPERT_NORMS:
                self[f"{name.removesuffix('.moe')}.{norm}.weight"] = (self.config.hidden_size,)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every weight of the model, by canonical name, in the order in which the model uses them."""
    shapes = _Shapes(config)
    shapes["model.embed_tokens.weight"] = (config.vocab_size, config.hidden_size)
    for layer_id in range(config.num_hidden_layers):
        layer = f"model.layers.{layer_id}"
        shapes.config = config.of_layer(layer_id)
        if config.linear_attention is not None and layer_id in config.linear_layers:
            shapes.linear_attention(f"{layer}.linear_attn", config.linear_attention)
        else:
            shapes.attention(f"{layer}.self_attn", config.projections(layer_id))
        shapes |= {f"{layer}.{norm}.weight": (config.hidden_size,) for norm in config.layer_norms}
        moe = config.moe if layer_id in config.moe_layers else None
        if moe is not None:
            shapes.experts(f"{layer}.moe" if moe.beside_mlp else f"{layer}.mlp", moe)
        if moe is None or moe.beside_mlp:
            shapes.mlp(f"{layer}.mlp", shapes.config.intermediate_size, config.mlp_bias)
        if config.layer_scalar:
            shapes.layer_input(layer, config.layer_input_size)
    if config.layer_input_size > 0:
        size = config.num_hidden_layers * config.layer_input_size
        shapes["model.embed_tokens_per_layer.weight"] = (config.vocab_size, size)
        shapes.linear("model.per_layer_model_projection", size, config.hidden_size)
        shapes["model.per_layer_projection_norm.weight"] = (config.layer_input_size,)
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes.linear("lm_head", config.vocab_size, config.hidden_size)
    return shapes


def check_shapes(found: Mapping[str, tuple[int, ...]], config: ModelConfig, where: str) -> None:
    """Compare the weights found, by canonical name, with those expected: one `ValueError` for all missing and
    unknown weights and wrong shapes."""
    expected = expected_shapes(config)
    missing = [name for name in expected if name not in found]
    unknown = [name for name in found if name not in expected and not is_harmless(name, config)]
    misshapen = [
        f"{name} {list(shape)} instead of {list(expected[name])}"
        for name, shape in found.items()
        if name in expected and tuple(shape) != expected[name]
    ]
    problems = [
        f"{len(names)} {what}: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
        for what, names in (("missing", missing), ("unknown", unknown), ("of the wrong shape", misshapen))
        if names
    ]
    if problems:
        raise ValueError(
            f"{where}: the weights do not fit a {config.architecture} of this config.json: "
            f"{'; '.join(problems)}"
        )
