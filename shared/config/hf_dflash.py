"""What only DFlash heads say in their config.json: the block, and the layers of the target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diptych.shared.config.draft import DraftBlock
from diptych.shared.config.fields import Fields
from diptych.shared.config.model import ModelConfig

ARCHITECTURE = "DFlashDraftModel"
_FAMILIES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}


def with_family(hf_config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """A file that names DFlash alone, with the family of its layers in the name. Others come back as they
    are."""
    if not isinstance(hf_config, Mapping) or hf_config.get("architectures") != [ARCHITECTURE]:
        return hf_config
    wanted = f"one of {', '.join(_FAMILIES)}"
    model_type = Fields(hf_config, where).raw("model_type", wanted)
    if model_type not in _FAMILIES:
        raise Fields(hf_config, where).error("model_type", wanted)
    family = _FAMILIES[model_type].replace("ForCausalLM", "ForCausalLMDFlash")
    return {**hf_config, "architectures": [family]}


def dflash_block(fields: Fields, target: ModelConfig) -> DraftBlock:
    block_len = fields.integer("block_size", minimum=2)
    dflash = _dflash_config(fields)
    mask_id = dflash.integer("mask_token_id", minimum=0)
    if mask_id >= target.vocab_size:
        raise dflash.error("mask_token_id", f"below {target.vocab_size}, the target's vocab_size")
    return DraftBlock(block_len, mask_id)


def dflash_layers(fields: Fields, target: ModelConfig) -> tuple[int, ...]:
    """The layers of the target whose inputs the head takes. The file names layers whose outputs it takes,
    which are the inputs of the layers behind them."""
    dflash, num_layers = _dflash_config(fields), target.num_hidden_layers
    if fields.integer("num_target_layers", default=num_layers) != num_layers:
        raise fields.error("num_target_layers", f"{num_layers}, as many as the target has")
    layers = dflash.integers("target_layer_ids")
    if not layers or max(layers) >= num_layers - 1:
        raise dflash.error(
            "target_layer_ids",
            f"a list of layers below {num_layers - 1}: engines disagree about the norm behind the last one",
        )
    return tuple(layer_id + 1 for layer_id in layers)


def refuse_unsupported(fields: Fields, model: ModelConfig, target: ModelConfig) -> None:
    """Raise `ValueError` for heads and targets that the drafter does not support."""
    if target.linear_attention is not None:
        raise ValueError(f"{fields.where}: a DFlash head for a target with linear attention is not supported")
    if model.quantization is not None:
        raise ValueError(f"{fields.where}: quantized DFlash heads are not supported")
    if any(model.sliding_window(layer) >= 0 for layer in range(model.num_hidden_layers)):
        raise ValueError(f"{fields.where}: DFlash layers with a sliding window are not supported")


def _dflash_config(fields: Fields) -> Fields:
    return Fields(fields.raw("dflash_config", "an object"), f"{fields.where}, dflash_config")
