"""Names of tensors in a GGUF file, and the weights that they are. What llama.cpp's converter changes in the
values of a weight is named beside the architecture."""

from __future__ import annotations

import re
from typing import NamedTuple

from diptych.shared.config import ModelConfig
from diptych.shared.loading.weight_names import WeightPart, canonical_parts

_COMMON = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_EXPERTS = {"ffn_gate_inp": "mlp.gate"} | {
    f"ffn_{kind}_exps": f"mlp.experts.*.{kind}_proj" for kind in ("gate", "up", "down")
}
"""*: one tensor [experts, out, in], or biases [experts, out]."""
_GEMMA = {
    **_COMMON,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


class GgufFamily(NamedTuple):
    """What an architecture is in config.json, and how its tensors differ from the weights."""

    architecture: str
    names: dict[str, str]  # tensor -> module of a checkpoint
    is_permuted: bool = False  # rows of q and k: llama.cpp rotates neighbours, the engine halves of a head
    norm_offset: float = 0.0  # that the converter adds to the weights of norms


# --8<-- [start:gguf-family]
GGUF_FAMILIES = {
    "llama": GgufFamily("LlamaForCausalLM", _COMMON, is_permuted=True),
    "qwen2": GgufFamily("Qwen2ForCausalLM", _COMMON),
    "qwen3": GgufFamily("Qwen3ForCausalLM", _COMMON | _HEAD_NORMS),
    "qwen3moe": GgufFamily("Qwen3MoeForCausalLM", _COMMON | _HEAD_NORMS | _EXPERTS),
    "gemma2": GgufFamily("Gemma2ForCausalLM", _GEMMA, norm_offset=1.0),
    "gemma3": GgufFamily("Gemma3ForCausalLM", _GEMMA | _HEAD_NORMS, norm_offset=1.0),
    # one tensor for q, k and v, and one for gate and up
    "phi3": GgufFamily(
        "Phi3ForCausalLM", _COMMON | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
    ),
    "gpt-oss": GgufFamily(
        "GptOssForCausalLM",
        {**_COMMON, **_EXPERTS, "attn_sinks": "self_attn.sinks", "post_attention_norm": _COMMON["ffn_norm"]},
    ),
}
"""general.architecture -> the family."""
# --8<-- [end:gguf-family]

IN_CONFIG = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that `gguf_config` has put into config.json."""

_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


def family_of(config: ModelConfig) -> GgufFamily:
    return next(each for each in GGUF_FAMILIES.values() if each.architecture == config.architecture)


def weight_parts(name: str, shape: tuple[int, ...], config: ModelConfig, where: str) -> list[WeightPart]:
    """The canonical weights in a tensor. Raises `ValueError` for a name that the architecture does not
    have."""
    match, names = _NAME.fullmatch(name), family_of(config).names
    if match is None or match[2] not in names:
        raise ValueError(f"{where}: no weight of {config.architecture} is named {name}")
    module = ("" if match[1] is None else f"model.layers.{match[1]}.") + names[match[2]]
    if "*" in module:
        return [
            WeightPart(f"{module.replace('*', str(index))}.{match[3]}", (index,), shape[1:])
            for index in range(shape[0])
        ]
    if module.endswith(".sinks"):
        return [WeightPart(module, (), shape)]
    return canonical_parts(f"{module}.{match[3]}", shape, config)
