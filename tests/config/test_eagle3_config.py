"""The keys of EAGLE-3 heads, in the layouts in which they are published."""

from __future__ import annotations

from typing import Any

import pytest

from diptych.shared.config import DraftConfig, ModelConfig, parse_draft_config, read_config
from diptych.shared.config.draft import Eagle3Norms
from diptych.shared.loading.model_path import ASSETS

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
PLAIN: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 1,
    "vocab_size": 128256,
    "draft_vocab_size": 32000,
}
SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"],
    "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
    "draft_vocab_size": 32000,
    "dtype": "float16",
    "norm_before_residual": True,
    "speculators_config": {"algorithm": "eagle3", "proposal_methods": [{"speculative_tokens": 5}]},
    "speculators_model_type": "eagle3",
    "target_hidden_size": None,
    "transformer_layer_config": {
        **{key: PLAIN[key] for key in PLAIN if key not in ("architectures", "draft_vocab_size")},
        "model_type": "llama",
        "rope_theta": 500000.0,
        "rope_scaling": None,
    },
}


@pytest.fixture(scope="module")
def target() -> ModelConfig:
    return read_config(ASSETS / "configs" / "Llama-3.1-8B")


def read(target: ModelConfig, **changes: Any) -> DraftConfig:
    return parse_draft_config({**PLAIN, **changes}, target)


def test_layers_count_outputs_inside_of_eagle_config_and_inputs_outside(target: ModelConfig) -> None:
    inside = read(target, eagle_config={LAYER_IDS: [1, 15, 28], "use_aux_hidden_state": True})
    assert inside.target_layers == read(target).target_layers == (2, 16, 29)
    assert read(target, **{LAYER_IDS: [2, 16, 29]}).target_layers == (2, 16, 29)
    assert read(target, **{LAYER_IDS: None}, eagle_config={LAYER_IDS: []}).target_layers == (2, 16, 29)
    both = {LAYER_IDS: [2, 16, 32], "eagle_config": {LAYER_IDS: [1, 15, 31]}}
    assert read(target, **both).target_layers == (2, 16, 32)


def test_heads_for_gpt_oss_count_inputs_everywhere() -> None:
    target = read_config(ASSETS / "configs" / "gpt-oss-20b")
    hf_config = {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {LAYER_IDS: [12, 18, 24]}}
    assert parse_draft_config(hf_config, target).target_layers == (12, 18, 24)


def test_a_head_without_auxiliary_states_takes_the_last_ones(target: ModelConfig) -> None:
    config = read(target, eagle_config={"use_aux_hidden_state": False, LAYER_IDS: []})
    assert (config.target_layers, config.target_hidden_size) == ((), 4096)


@pytest.mark.parametrize(
    ("keys", "norms"),
    [
        ({}, Eagle3Norms()),
        ({"norm_before_residual": False}, Eagle3Norms()),
        ({"norm_before_residual": True}, Eagle3Norms(before_residual=True)),
        ({"norm_before_fc": True}, Eagle3Norms(fusion="joint")),
        ({"eagle_config": {"norm_before_fc": True}}, Eagle3Norms(fusion="joint")),
        ({"norm_before_fc": True, "eagle_config": {"norm_before_fc": False}}, Eagle3Norms()),
        ({"fc_norm": True}, Eagle3Norms(fusion="per layer")),
        ({"fc_norm": False, "norm_output": True}, Eagle3Norms(output=True)),
    ],
)
def test_norms(target: ModelConfig, keys: dict[str, Any], norms: Eagle3Norms) -> None:
    assert read(target, **keys).norms == norms


def test_a_head_may_be_less_wide_than_its_target(target: ModelConfig) -> None:
    config = read(target, hidden_size=3072, target_hidden_size=4096, head_dim=128)
    assert (config.model.hidden_size, config.target_hidden_size) == (3072, 3 * 4096)


def test_speculators(target: ModelConfig) -> None:
    config = parse_draft_config(SPECULATORS, target)
    plain = read(target, rope_theta=500000.0, torch_dtype="float16", norm_before_residual=True)
    assert config == plain
    changes = {
        "norm_before_residual": None,
        LAYER_IDS: [2, 18, 31],
        "norm_before_fc": True,
        "norm_output": True,
    }
    config = parse_draft_config({**SPECULATORS, **changes}, target, "eagle3")
    assert config.target_layers == (2, 18, 31)
    assert config.norms == Eagle3Norms(before_residual=True, fusion="joint", output=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc and fc_norm are both true"),
        ({"norm_before_fc": 1}, "norm_before_fc is 1; it must be true or false"),
        ({"fc_norm": "yes"}, "fc_norm is 'yes'; it must be true or false"),
        (
            {LAYER_IDS: [1, 15, 28], "eagle_config": {LAYER_IDS: [1, 15, 28]}},
            r"is \[1, 15, 28\], and in eagle_config \[1, 15, 28\]: .* other layers, \[2, 16, 29\]; leave one",
        ),
        ({LAYER_IDS: [5]}, rf"{LAYER_IDS} is \[5\]; it must be a list of at least 2"),
        ({LAYER_IDS: [2, 16, 33]}, r"\[2, 16, 33\]; they must be within 0..32"),
        ({"num_aux_hidden_states": 4}, "num_aux_hidden_states is 4; it must be 3"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2; it must be 1: engines disagree"),
        ({"layer_types": ["sliding_attention"]}, "layer_types is .* an EAGLE-3 layer has no window"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm is True; it must be false"),
        ({"eagle_config": {"use_last_layernorm": False}}, "use_last_layernorm is False; it must be true"),
        ({"eagle_config": {"parallel_draft_step": 4}}, "parallel_draft_step is 4; it must be 1"),
        ({"hidden_size": 12288, "target_hidden_size": 4096}, "distinguished by their width"),
        (
            {
                "hidden_size": 3072,
                "target_hidden_size": 4096,
                "eagle_config": {"use_aux_hidden_state": False},
            },
            "hidden_size is 3072, the target's 4096: .* made for another target",
        ),
    ],
)
def test_what_is_refused(target: ModelConfig, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(target, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculators_model_type": "dflash"}, "speculators_model_type is 'dflash'; it must be eagle3"),
        ({"speculators_model_type": None}, "speculators_model_type is null"),
        ({"transformer_layer_config": None}, "transformer_layer_config is null"),
        ({"transformer_layer_config": {"model_type": "qwen3"}}, "model_type is 'qwen3'; it must be llama"),
    ],
)
def test_which_files_of_speculators_are_refused(
    target: ModelConfig, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        parse_draft_config({**SPECULATORS, **changes}, target)
