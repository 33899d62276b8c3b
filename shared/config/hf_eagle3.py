"""What only EAGLE-3 heads say in their config.json: layers of the target, norms, the layout of speculators.

Three layouts are published. EAGLE's authors and SpecForge write the keys of a plain model and a few more;
NVIDIA's Model Optimizer puts more of them into `eagle_config`; speculators puts those of the decoder layer
into `transformer_layer_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diptych.shared.config.draft import Eagle3Norms, FusionNorm
from diptych.shared.config.fields import Fields
from diptych.shared.config.model import ModelConfig

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Keys of a speculators file that belong to the head, not to its decoder layer.
_OF_THE_HEAD = (
    "draft_vocab_size",
    "target_hidden_size",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    LAYER_IDS,
    "quantization_config",
)
# Switches of eagle_config, and the only value that heads of this structure have.
_SWITCHES = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}


def plain_layout(hf_config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The keys of a speculators file, as the other layouts have them: those of the decoder layer, and beside
    them the head's. Any other file comes back as it is. Raises `ValueError` for heads other than EAGLE-3."""
    if not isinstance(hf_config, Mapping) or "speculators_config" not in hf_config:
        return hf_config
    fields = Fields(hf_config, where)
    algorithm = fields.raw("speculators_model_type", "eagle3")
    if algorithm != "eagle3":
        raise fields.error("speculators_model_type", "eagle3")
    layer = Fields(fields.raw("transformer_layer_config", "an object"), f"{where}, transformer_layer_config")
    if layer.raw("model_type", "llama") != "llama":
        raise layer.error("model_type", "llama")
    values = {"norm_before_residual": True} | {key: hf_config[key] for key in _OF_THE_HEAD if key in fields}
    if "dtype" not in layer and "torch_dtype" not in layer:
        values |= {key: hf_config[key] for key in ("dtype", "torch_dtype") if key in fields}
    return {**layer.values, **values, "architectures": ["LlamaForCausalLMEagle3"]}


def refuse_unsupported(fields: Fields, target: ModelConfig) -> None:
    """Raise `ValueError` for keys that change what is computed: ignored, they would only make bad drafts."""
    layer_types = fields.raw("layer_types", "a list", default=[])
    if layer_types not in ([], ["full_attention"]):
        raise fields.error("layer_types", 'absent or ["full_attention"]: an EAGLE-3 layer has no window')
    if fields.integer("num_hidden_layers", default=1) != 1:
        raise fields.error("num_hidden_layers", "1: engines disagree about the norms of further layers")
    key = "target_hidden_size" if "target_hidden_size" in fields else "hidden_size"
    if (width := fields.integer(key, default=target.hidden_size)) != target.hidden_size:
        raise ValueError(
            f"{fields.where}: {key} is {width}, the target's {target.hidden_size}: this draft model was made "
            "for another target"
        )
    eagle = _eagle_config(fields)
    for key, value in _SWITCHES.items():
        if eagle.boolean(key, default=value) is not value:
            raise eagle.error(key, str(value).lower())
    if eagle.integer("parallel_draft_step", default=1) != 1:
        raise eagle.error("parallel_draft_step", "1: one token is drafted a step")


def eagle3_norms(fields: Fields) -> Eagle3Norms:
    """Where the head has norms that are optional."""
    eagle = _eagle_config(fields)
    is_joint = eagle.boolean("norm_before_fc", default=fields.boolean("norm_before_fc", default=False))
    is_per_layer = fields.boolean("fc_norm", default=False)
    if is_joint and is_per_layer:
        raise ValueError(f"{fields.where}: norm_before_fc and fc_norm are both true; a head has one of them")
    fusion: FusionNorm = "joint" if is_joint else "per layer" if is_per_layer else "none"
    return Eagle3Norms(
        before_residual=fields.boolean("norm_before_residual", default=False),
        fusion=fusion,
        output=fields.boolean("norm_output", default=False),
    )


def target_layers(fields: Fields, target: ModelConfig) -> tuple[int, ...]:
    """The layers of the target whose inputs the head takes. (): its hidden states after the final norm."""
    eagle = _eagle_config(fields)
    if not eagle.boolean("use_aux_hidden_state", default=True):
        return ()
    # eagle_config names layers whose outputs are taken, which are the inputs of the layers behind them; the
    # heads for GPT-OSS, and the same key outside of eagle_config, name layers whose inputs are taken.
    shift = 0 if target.architecture == "GptOssForCausalLM" else 1
    inside = tuple(layer_id + shift for layer_id in eagle.integers(LAYER_IDS))
    outside = tuple(fields.integers(LAYER_IDS))
    if inside and outside and inside != outside:
        raise ValueError(
            f"{fields.where}: {LAYER_IDS} is {list(outside)}, and in eagle_config {eagle.values[LAYER_IDS]}: "
            f"the inputs of other layers, {list(inside)}; leave one of the two away"
        )
    layers = inside or outside or _usual_layers(eagle.where, target)
    if len(layers) < 2:
        where = eagle if inside else fields
        raise where.error(LAYER_IDS, "a list of at least 2 layers (3 are usual)")
    if fields.integer("num_aux_hidden_states", default=len(layers)) != len(layers):
        raise fields.error("num_aux_hidden_states", f"{len(layers)}, the number of layers")
    return layers


def _usual_layers(where: str, target: ModelConfig) -> tuple[int, ...]:
    num_layers = target.num_hidden_layers
    layers = 2, num_layers // 2, num_layers - 3
    if min(layers) < 1:
        raise ValueError(
            f"{where}: {LAYER_IDS} is missing, and a target of {num_layers} layers has none of the usual ones"
        )
    return layers


def _eagle_config(fields: Fields) -> Fields:
    return Fields(fields.raw("eagle_config", "an object", default={}), f"{fields.where}, eagle_config")
