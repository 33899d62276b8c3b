"""The config.json of a draft model: what is taken from it, what from the target, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.shared.config import (
    ModelConfig,
    parse_config,
    parse_draft_config,
    read_config,
    read_draft_config,
)
from diptych.shared.loading.model_path import ASSETS

EAGLE = {  # like the heads of EAGLE's authors: the plain family's name
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": 128256,
}
EAGLE3 = {
    **EAGLE,
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": 32000,
    "rope_theta": 500000.0,
    "rope_scaling": None,
}


@pytest.fixture(scope="module")
def target() -> ModelConfig:
    return read_config(ASSETS / "configs" / "Llama-3.1-8B")


def test_eagle3(target: ModelConfig) -> None:
    config = parse_draft_config(EAGLE3, target)
    assert config.draft_format == "eagle3"
    assert config.model.architecture == "LlamaForCausalLMEagle3"
    assert (config.model.vocab_size, config.target.vocab_size) == (32000, 128256)
    assert config.target_layers == (2, 16, 29)
    assert config.target_hidden_size == 3 * 4096
    assert config.model.num_hidden_layers == 1
    assert config.model.dtype is torch.float16
    # It is used as far as the target goes, however short its own training texts were.
    assert config.model.context_len == target.context_len == 131072
    assert config.model.rope.rope_type == "default"
    assert config.model.rope.theta == 500000.0


def test_layers_named_by_the_file_count_outputs(target: ModelConfig) -> None:
    hf_config = {**EAGLE3, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 15, 31]}}
    assert parse_draft_config(hf_config, target).target_layers == (1, 16, 32)


def test_eagle_is_distinguished_from_a_plain_model(target: ModelConfig) -> None:
    with pytest.raises(ValueError, match=r"'LlamaForCausalLM'.* name one of eagle, eagle3, nextn"):
        parse_draft_config(EAGLE, target)
    config = parse_draft_config(EAGLE, target, "eagle")
    assert (config.draft_format, config.target_layers, config.target_hidden_size) == ("eagle", (), 4096)
    # The file has nothing about RoPE: it is the target's, scaling and all.
    assert config.model.rope == target.rope
    assert config.model.vocab_size == 128256


def test_what_is_left_out_is_as_in_the_target() -> None:
    target = read_config(ASSETS / "configs" / "Qwen3-8B")
    config = parse_draft_config({"architectures": ["LlamaForCausalLMEagle"]}, target)
    model = config.model
    for name in (
        "hidden_size",
        "intermediate_size",
        "num_qo_heads",
        "num_kv_heads",
        "head_dim",
        "rope",
        "dtype",
    ):
        assert getattr(model, name) == getattr(target, name), name
    assert model.num_hidden_layers == 1
    assert not model.qk_norm
    # With heads of its own, what goes with them is the family's, not the target's.
    own = parse_draft_config({"architectures": ["LlamaForCausalLMEagle"], "num_attention_heads": 16}, target)
    assert (own.model.num_kv_heads, own.model.head_dim) == (16, 4096 // 16)


def test_nextn_takes_the_config_of_its_target() -> None:
    hf_config = json.loads((ASSETS / "configs" / "Qwen3-8B" / "config.json").read_text())
    target = parse_config(hf_config)
    config = parse_draft_config({**hf_config, "architectures": ["Qwen3ForCausalLMNextN"]}, target)
    assert config.draft_format == "nextn"
    assert config.model.num_hidden_layers == 1
    assert config.model.qk_norm
    assert (config.target_layers, config.target_hidden_size) == ((), 4096)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 2048}, "hidden_size is 2048, the target's 4096: .* made for another target"),
        ({"draft_vocab_size": 200000}, "draft vocabulary has 200000 ids, the target's 128256"),
        ({"draft_vocab_size": 0}, "draft_vocab_size is 0; it must be an integer >= 1"),
        ({"architectures": ["MedusaModel"]}, r"architectures is \['MedusaModel'\]; .*LlamaForCausalLMEagle3"),
        ({"architectures": None}, "architectures is null"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 16, 40]}},
            r"inputs of the target's layers \[2, 17, 41\]; they must be within 0..32",
        ),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [5]}},
            r"eagle_config: eagle_aux_hidden_state_layer_ids is \[5\]; it must be a list of at least 2",
        ),
        ({"target_hidden_size": 2048}, "target_hidden_size is 2048, the target's 4096"),
        ({"norm_before_residual": "yes"}, "norm_before_residual is 'yes'; it must be true or false"),
        ({"eagle_config": 3}, "eagle_config: expected an object with keys, found 3"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "MXFP4 draft models are not supported"),
    ],
)
def test_what_does_not_fit_is_named(target: ModelConfig, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_draft_config({**EAGLE3, **changes}, target)


def test_a_format_must_not_contradict_the_name(target: ModelConfig) -> None:
    with pytest.raises(ValueError, match="is a draft model of format eagle3, not nextn"):
        parse_draft_config(EAGLE3, target, "nextn")
    assert parse_draft_config(EAGLE3, target, "eagle3") == parse_draft_config(EAGLE3, target)


def test_another_vocabulary_is_eagle3s_alone(target: ModelConfig) -> None:
    with pytest.raises(ValueError, match="vocab_size is 32000, the target's 128256"):
        parse_draft_config({**EAGLE, "vocab_size": 32000}, target, "eagle")


def test_a_small_target_has_no_usual_layers() -> None:
    target = read_config(ASSETS / "tiny-dense")
    assert parse_draft_config({"architectures": ["LlamaForCausalLMEagle3"]}, target).target_layers == (
        2,
        3,
        3,
    )
    smaller = replace(target, num_hidden_layers=3, sliding_windows=())
    with pytest.raises(ValueError, match="a target of 3 layers has none of the usual ones"):
        parse_draft_config({"architectures": ["LlamaForCausalLMEagle3"]}, smaller)


def test_files(target: ModelConfig, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        read_draft_config(tmp_path, target)
    (tmp_path / "config.json").write_text(json.dumps(EAGLE3))
    assert read_draft_config(tmp_path, target) == parse_draft_config(EAGLE3, target)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        read_draft_config(tmp_path, target)


@pytest.mark.parametrize(
    ("name", "draft_format"), [("Eagle3LlamaForCausalLM", "eagle3"), ("EagleLlamaForCausalLM", "eagle")]
)
def test_names_with_the_format_in_front(target: ModelConfig, name: str, draft_format: str) -> None:
    config = parse_draft_config({**EAGLE3, "architectures": [name]}, target)
    assert config.draft_format == draft_format
    same = "LlamaForCausalLMEagle3" if draft_format == "eagle3" else "LlamaForCausalLMEagle"
    assert config == parse_draft_config({**EAGLE3, "architectures": [same]}, target)
    assert parse_draft_config({**EAGLE3, "target_hidden_size": 4096}, target)
