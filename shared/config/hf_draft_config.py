"""Reads the config.json of a draft model: EAGLE, EAGLE-3, NEXTN and DFlash heads as they are published.

Such a file is the one of a plain model with few layers, and a few keys more. Often it leaves keys out, and
often "architectures" names the plain family: then the caller has to say which format it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from diptych.shared.config import hf_dflash
from diptych.shared.config.draft import DraftConfig, DraftFormat, Eagle3Norms
from diptych.shared.config.families import FAMILIES
from diptych.shared.config.fields import Fields, only_name
from diptych.shared.config.hf_config import config_path, parse_config, read_json
from diptych.shared.config.hf_eagle3 import eagle3_norms, plain_layout, refuse_unsupported, target_layers
from diptych.shared.config.hf_multimodal import TEXT_MODELS, text_part
from diptych.shared.config.model import ModelConfig

# Ends of the names under "architectures"; what is before names a family.
SUFFIXES: dict[str, DraftFormat] = {
    "ForCausalLMEagle": "eagle",
    "ForCausalLMEagle3": "eagle3",
    "ForCausalLMNextN": "nextn",
    "ForCausalLMDFlash": "dflash",
}
# The same names with the format in front, as other engines write them.
PREFIXES: dict[str, DraftFormat] = {"Eagle": "eagle", "Eagle3": "eagle3"}
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")


def read_draft_config(
    folder: str | Path, target: ModelConfig, draft_format: DraftFormat | None = None
) -> DraftConfig:
    """`parse_draft_config` of a folder's config.json."""
    path = config_path(Path(folder))
    return parse_draft_config(read_json(path), target, draft_format, str(path))


def parse_draft_config(
    hf_config: Mapping[str, Any],
    target: ModelConfig,
    draft_format: DraftFormat | None = None,
    where: str = "config.json",
) -> DraftConfig:
    """Read the contents of a draft model's config.json. What it leaves out is as in the target.
    `draft_format`: None takes it from the name under "architectures", which many checkpoints give as the
    plain family's. Whatever is ill-typed, unsupported or does not fit the target raises `ValueError`."""
    if isinstance(hf_config, Mapping) and only_name(hf_config.get("architectures")) in TEXT_MODELS:
        hf_config, where = text_part(hf_config, where)  # a layer for drafting beside its target
    fields = Fields(hf_dflash.with_family(plain_layout(hf_config, where), where), where)
    family, found = _family_and_format(fields)
    if draft_format is None:
        if found is None:
            raise ValueError(
                f"{where}: architectures {fields.values['architectures']!r:.80} does not tell this draft "
                f"model's format; name one of {', '.join(get_args(DraftFormat))}"
            )
        draft_format = found
    elif found not in (None, draft_format):
        raise ValueError(
            f"{where}: architectures {fields.values['architectures']!r:.80} is a draft model of format "
            f"{found}, not {draft_format}"
        )
    model = _own_layers(fields, family, draft_format, target)
    layers: tuple[int, ...] = ()
    norms, block = Eagle3Norms(), None
    if draft_format == "eagle3":
        layers, norms = target_layers(fields, target), eagle3_norms(fields)
    elif draft_format == "dflash":
        layers, block = hf_dflash.dflash_layers(fields, target), hf_dflash.dflash_block(fields, target)
    try:
        return DraftConfig(draft_format, model, target, layers, norms, block)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _family_and_format(fields: Fields) -> tuple[str, DraftFormat | None]:
    """The family of its decoder layer, and the format where the name tells."""
    known: dict[str, tuple[str, DraftFormat | None]] = {}
    for family in FAMILIES:
        for suffix, its_format in SUFFIXES.items():
            known[family.replace("ForCausalLM", suffix)] = family, its_format
        for prefix, its_format in PREFIXES.items():
            known[prefix + family] = family, its_format
    likes = ", ".join(list(known)[: len(SUFFIXES)])
    wanted = f"a list with one name, of a family or of its drafts, like {likes}"
    known |= {family: (family, None) for family in FAMILIES}
    names = fields.raw("architectures", wanted)
    if only_name(names) in known:
        return known[only_name(names)]
    raise fields.error("architectures", wanted)


def _own_layers(fields: Fields, family: str, draft_format: DraftFormat, target: ModelConfig) -> ModelConfig:
    values = {key: value for key, value in fields.values.items() if value is not None}
    if draft_format not in ("eagle", "dflash"):
        # Formats of exactly one layer: a NEXTN layer's file may be its target's, with all of its layers.
        values = {key: value for key, value in values.items() if key != "layer_types"}
        values["num_hidden_layers"] = 1
        if target.linear_attention is not None:
            values["layer_types"] = ["full_attention"]
        values["first_k_dense_replace"] = (
            0  # the layer has experts, though its target's first layers have none
        )
    model = parse_config(_completed(values, family, target), fields.where)
    if model.quantization is not None and model.quantization.storage == "mxfp4":
        raise ValueError(f"{fields.where}: MXFP4 draft models are not supported; supported are other formats")
    if draft_format in ("eagle3", "dflash") and model.moe is not None:
        what = "an EAGLE-3 layer" if draft_format == "eagle3" else "a DFlash layer"
        raise ValueError(f"{fields.where}: {what} of {family} would have experts; it has an MLP")
    vocab_size = model.vocab_size
    if draft_format == "dflash":
        hf_dflash.refuse_unsupported(fields, model, target)
    if draft_format == "eagle3":
        refuse_unsupported(fields, target)
        vocab_size = fields.integer("draft_vocab_size", default=vocab_size)
    elif vocab_size != target.vocab_size:
        raise ValueError(f"{fields.where}: vocab_size is {vocab_size}, the target's {target.vocab_size}")
    has_rope = any(key in fields for key in ROPE_KEYS)
    same_heads = model.head_dim == target.head_dim
    return replace(
        model,
        architecture=family.replace("ForCausalLM", _suffix(draft_format)),
        vocab_size=vocab_size,
        # A head is trained on short texts and says so; it drafts wherever the target is.
        context_len=target.context_len,
        rope=model.rope if has_rope or not same_heads else target.rope,
    )


def _completed(values: Mapping[str, Any], family: str, target: ModelConfig) -> dict[str, Any]:
    """The keys of a plain model of the family; those that are missing have the target's values."""
    inherited: dict[str, Any] = {
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": 1,
        "rms_norm_eps": target.rms_norm_eps,
        "max_position_embeddings": target.context_len,
        "torch_dtype": str(target.dtype).removeprefix("torch."),
    }
    if "num_attention_heads" not in values:
        inherited |= {
            "num_attention_heads": target.num_qo_heads,
            "num_key_value_heads": target.num_kv_heads,
            "head_dim": target.head_dim,
        }
    if "dtype" in values:
        del inherited["torch_dtype"]
    return {**inherited, **values, "architectures": [family]}


def _suffix(draft_format: DraftFormat) -> str:
    return next(suffix for suffix, its_format in SUFFIXES.items() if its_format == draft_format)
