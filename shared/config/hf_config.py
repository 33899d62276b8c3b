"""Reads a Hugging Face config.json into a ModelConfig: both dialects (transformers 4 and 5), all families."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from diptych.shared.config.families import FAMILIES, MIXTRAL_NAMES, Family
from diptych.shared.config.fields import REQUIRED, Fields, only_name
from diptych.shared.config.hf_deepseek import (
    deepseek_moe_layers,
    num_nextn_layers,
    parse_deepseek_moe,
    parse_mla,
)
from diptych.shared.config.hf_multimodal import TEXT_MODELS, text_part
from diptych.shared.config.hf_quantization import parse_quantization
from diptych.shared.config.hf_rope import context_len, parse_local_rope, parse_rope
from diptych.shared.config.hf_windows import sliding_windows
from diptych.shared.config.model import HiddenAct, MLAConfig, ModelConfig, MoEConfig, RopeConfig
from diptych.shared.config.quant_config import QuantConfig

HIDDEN_ACTS: dict[str, HiddenAct] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
DEEPSEEK_MOE = ("deepseek-v2", "deepseek-v3")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def read_config(folder: str | Path) -> ModelConfig:
    """The config of the model in a folder. A generation_config.json adds its end-of-sequence tokens. Raises
    `ValueError` as `parse_config` does."""
    folder = Path(folder)
    path = config_path(folder)
    values = read_json(path)
    older = folder / "hf_quant_config.json"  # of ModelOpt, before it wrote into config.json
    if "quantization_config" not in values and older.is_file():
        settings = Fields(read_json(older), str(older)).raw("quantization", "an object")
        settings = {"quant_method": "modelopt", **Fields(settings, str(older)).values}
        values = {**values, "quantization_config": settings}
    config = parse_config(values, str(path))
    path = folder / "generation_config.json"
    if path.is_file():
        eos_token_ids = Fields(read_json(path), str(path)).token_ids("eos_token_id")
        config = replace(config, eos_token_ids=config.eos_token_ids | eos_token_ids)
    return config


def config_path(folder: Path) -> Path:
    """A model folder's config.json; `ValueError` when it is none."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; a model is a folder with config.json and *.safetensors")
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(
            f"{folder} has no config.json; a model is a folder with config.json and *.safetensors"
        )
    return path


def parse_config(hf_config: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Read the contents of a config.json, as transformers 4 or 5 writes it. Whatever is missing, ill-typed or
    unsupported raises `ValueError`: what was found, and what would do."""
    if isinstance(hf_config, Mapping) and only_name(hf_config.get("architectures")) in TEXT_MODELS:
        hf_config, where = text_part(hf_config, where)
    fields = Fields(hf_config, where)
    architecture, num_labels = _architecture(fields)
    family = FAMILIES[architecture]
    fields = _renamed(fields, family)
    attention_bias = fields.boolean("attention_bias", default=family.attention_bias)
    num_hidden_layers = fields.integer("num_hidden_layers")
    mla = parse_mla(fields) if family.mla else None
    head_dim, num_kv_heads, rope = _heads(fields, family, mla)
    local_rope = None
    if family.local_rope_theta is not None:
        local_rope = parse_local_rope(fields, head_dim, family.local_rope_theta)
    moe, max_len = _moe(fields, family), fields.integer("max_position_embeddings")
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        # Where every layer has experts, the key may be missing.
        intermediate_size=fields.integer(
            "intermediate_size", default=REQUIRED if moe is None else moe.intermediate_size
        ),
        num_hidden_layers=num_hidden_layers,
        num_qo_heads=fields.integer("num_attention_heads"),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps"),
        context_len=max_len if family.is_context_scaled else context_len(rope, max_len),
        rope=rope,
        dtype=_dtype(fields),
        # A reward model has no head for tokens: the embedding stands in for it, and is not used.
        tie_word_embeddings=bool(num_labels)
        or fields.boolean("tie_word_embeddings", default=family.tie_word_embeddings),
        num_labels=num_labels,
        hidden_act=_hidden_act(fields, family),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=fields.boolean("mlp_bias", default=False) if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        attn_sinks=family.attn_sinks,
        norm_unit_offset=family.norm_unit_offset,
        norms=family.norms,
        wide_qk_norm=family.wide_qk_norm,
        attn_scale=_attn_scale(fields, family),
        local_rope=local_rope,
        sliding_windows=sliding_windows(fields, family.windows, num_hidden_layers),
        attn_logit_cap=_soft_cap(fields, "attn_logit_softcapping", family.soft_caps[0]),
        final_logit_cap=_soft_cap(fields, "final_logit_softcapping", family.soft_caps[1]),
        moe=moe,
        moe_layers=_moe_layers(fields, family, num_hidden_layers) if moe else frozenset(),
        mla=mla,
        num_nextn_layers=num_nextn_layers(fields) if family.moe in DEEPSEEK_MOE else 0,
        eos_token_ids=fields.token_ids("eos_token_id"),
        bos_token_id=fields.integer("bos_token_id", default=None, minimum=0),
        quantization=_quantization(fields, family),
    )
    return config if family.more is None else family.more(config, fields)


def _heads(fields: Fields, family: Family, mla: MLAConfig | None) -> tuple[int, int, RopeConfig]:
    """(head_dim, num_kv_heads, rope)"""
    if mla is None:
        head_dim = _head_dim(fields, family)
        has_local = family.local_rope_theta is not None
        rope = parse_rope(fields, head_dim, family.rope_theta, has_local, family.rotary_share)
        return head_dim, _num_kv_heads(fields, family), rope
    rope = parse_rope(fields, mla.qk_rope_head_dim, family.rope_theta)
    rope = replace(rope, is_interleaved=fields.boolean("rope_interleave", default=True))
    num_kv_heads = fields.integer("num_attention_heads")  # whatever num_key_value_heads is
    return mla.qk_nope_head_dim + mla.qk_rope_head_dim, num_kv_heads, rope


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deeply
        raise ValueError(f"{path} is not JSON: {error}") from None


def _architecture(fields: Fields) -> tuple[str, int]:
    """A name of FAMILIES, and the number of labels of a reward model: a ...ForSequenceClassification."""
    names = fields.raw("architectures", "a list with one name")
    name = only_name(names).replace("ForSequenceClassification", "ForCausalLM")
    if name in FAMILIES:
        labels = fields.raw("id2label", "a mapping of labels", default={0: "", 1: ""})
        return name, len(labels) if name != only_name(names) else 0
    raise ValueError(_unsupported(fields.where, names, name))


def _unsupported(where: str, names: object, name: str) -> str:
    nearest = get_close_matches(name, (*FAMILIES, *TEXT_MODELS), 1, 0.0)[0]
    return (
        f"{where}: architectures is {names!r:.80}, which is not supported; the nearest is {nearest}. "
        f"{Path(__file__).with_name('families.py')} has all; in a clone, docs/models.md says how to add one"
    )


def _renamed(fields: Fields, family: Family) -> Fields:
    """The keys by the names that other families have."""
    _refuse_unsupported(fields)
    same = {ours: fields.values[theirs] for theirs, ours in family.keys if theirs in fields}
    return Fields({**fields.values, **same}, fields.where)


def _refuse_unsupported(fields: Fields) -> None:
    key = "use_bidirectional_attention"
    if (found := fields.raw(key, "true or false", False)) not in (False, "vision"):  # of tokens of images
        raise ValueError(f"{fields.where}: {key} is {found!r:.80}; supported is causal attention")


def _hidden_act(fields: Fields, family: Family) -> HiddenAct:
    key, supported = family.hidden_act
    name = fields.raw(key, "a name", default=supported)
    if name != supported:
        raise ValueError(f"{fields.where}: {key} is {name!r:.80}; supported is {supported}")
    return HIDDEN_ACTS[supported]


def _attn_scale(fields: Fields, family: Family) -> float | None:
    if family.attn_scale is None:
        return None
    scale: float = fields.number("query_pre_attn_scalar", default=family.attn_scale) ** -0.5
    return scale


def _soft_cap(fields: Fields, key: str, default: float | None) -> float:
    """null is "no cap"; only a missing key stands for the family's default."""
    cap: float | None = fields.number(key, default=None if key in fields.values else default)
    return 0.0 if cap is None else cap


def _quantization(fields: Fields, family: Family) -> QuantConfig | None:
    key = "quantization_config"
    if key not in fields:
        return None
    fused = [(f".{whole}.", f".{part}.") for whole, parts in family.fused.items() for part in parts]
    renamed = (
        *(((".self_attn.", ".linear_attn."),) if family.decoder == "kimi_linear" else ()),
        *(MIXTRAL_NAMES if family.moe in ("mixtral", "minimax") else ()),
        *(*family.names, *fused),
    )
    return replace(parse_quantization(fields.values[key], fields.where), renamed=renamed)


def _dtype(fields: Fields) -> torch.dtype:
    key = "dtype" if "dtype" in fields else "torch_dtype"
    name = fields.raw(key, "a name", default="float32")
    if not isinstance(name, str) or name not in DTYPES:
        raise ValueError(f"{fields.where}: {key} is {name!r:.80}; supported are {', '.join(DTYPES)}")
    return DTYPES[name]


def _num_kv_heads(fields: Fields, family: Family) -> int:
    num_qo_heads = fields.integer("num_attention_heads")
    # Llama's checkpoints from before grouped queries do not have the key. Elsewhere only null means that.
    may_be_missing = family.num_key_value_heads == "as query heads" or "num_key_value_heads" in fields.values
    num_kv_heads = fields.integer("num_key_value_heads", default=num_qo_heads if may_be_missing else REQUIRED)
    if num_qo_heads % num_kv_heads != 0:
        raise ValueError(
            f"{fields.where}: num_attention_heads ({num_qo_heads}) is no multiple of "
            f"num_key_value_heads ({num_kv_heads})"
        )
    return num_kv_heads


def _head_dim(fields: Fields, family: Family) -> int:
    if "head_dim" in fields:
        return fields.integer("head_dim")
    if "head_dim" not in fields.values and family.head_dim is not None:
        return family.head_dim
    hidden_size, num_qo_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if hidden_size % num_qo_heads != 0:
        raise ValueError(
            f"{fields.where}: there is no head_dim, and hidden_size ({hidden_size}) is no multiple of "
            f"num_attention_heads ({num_qo_heads})"
        )
    return hidden_size // num_qo_heads


def _moe(fields: Fields, family: Family) -> MoEConfig | None:
    if family.moe == "none":
        return None
    if family.moe == "deepseek-v2" or family.moe == "deepseek-v3":
        return parse_deepseek_moe(fields, family.moe)
    # transformers 5 writes num_local_experts for every family; 4 wrote Qwen's as num_experts.
    key = "num_local_experts" if "num_local_experts" in fields else "num_experts"
    num_experts = fields.integer(key, minimum=0)
    if family.moe == "qwen3" and num_experts == 0:
        return None
    num_experts_per_tok = fields.integer("num_experts_per_tok")
    if num_experts_per_tok > num_experts:
        raise ValueError(
            f"{fields.where}: num_experts_per_tok ({num_experts_per_tok}) exceeds {key} ({num_experts})"
        )
    is_qwen, is_gpt_oss = family.moe == "qwen3", family.moe == "gpt-oss"
    if (alpha := fields.number("swiglu_alpha", default=1.702)) != 1.702:
        raise ValueError(f"{fields.where}: swiglu_alpha is {alpha:g}; supported is 1.702")
    return MoEConfig(
        num_experts=num_experts,
        num_experts_per_tok=num_experts_per_tok,
        intermediate_size=fields.integer("moe_intermediate_size" if is_qwen else "intermediate_size"),
        norm_topk_prob=fields.boolean("norm_topk_prob", default=False) if is_qwen else True,
        routing="biased-grouped" if family.moe == "minimax" else "softmax",
        bias=is_gpt_oss,
        swiglu_limit=fields.number("swiglu_limit", default=7.0) if is_gpt_oss else 0.0,
    )


def _moe_layers(fields: Fields, family: Family, num_hidden_layers: int) -> frozenset[int]:
    if family.moe in ("mixtral", "gpt-oss", "minimax"):
        return frozenset(range(num_hidden_layers))
    if family.moe in DEEPSEEK_MOE:
        return deepseek_moe_layers(fields, num_hidden_layers)
    step = fields.integer("decoder_sparse_step", default=1)
    dense = fields.integers("mlp_only_layers")
    return frozenset(i for i in range(num_hidden_layers) if i not in dense and (i + 1) % step == 0)
