import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from diptych.shared.config import ModelConfig, MoEConfig, RopeConfig, parse_config, read_config
from diptych.shared.tools.conformance.oracles.configs import CONFIGS


@pytest.mark.parametrize("name", CONFIGS)
def test_both_dialects_say_the_same(name: str) -> None:
    """transformers reads either dialect and writes its own."""
    hf_config = CONFIGS[name]
    rewritten = AutoConfig.for_model(**deepcopy(hf_config)).to_dict()
    assert "rope_scaling" not in rewritten
    assert parse_config(rewritten) == parse_config(hf_config)


def with_changes(name: str, **changes: Any) -> dict[str, Any]:
    """A config with keys changed, or, for a value of `...`, removed."""
    hf_config = deepcopy(CONFIGS[name]) | changes
    return {key: value for key, value in hf_config.items() if value is not ...}


def parse(name: str, **changes: Any) -> ModelConfig:
    return parse_config(with_changes(name, **changes))


def test_head_dim() -> None:
    assert parse("llama-biases").head_dim == 80
    assert parse("llama-biases", head_dim=None).head_dim == 96 // 6
    assert parse("llama-biases", head_dim=...).head_dim == 96 // 6
    # Qwen3's configuration class has a head_dim of its own.
    assert parse("qwen3-yarn", head_dim=...).head_dim == 128
    assert parse("qwen3-yarn", head_dim=None).head_dim == 64 // 4


def test_num_kv_heads() -> None:
    assert parse("llama-biases", num_key_value_heads=...).num_kv_heads == 6
    assert parse("qwen3-yarn", num_key_value_heads=None).num_kv_heads == 4


def test_biases() -> None:
    def biases(config: ModelConfig) -> tuple[bool, bool, bool]:
        return config.qkv_bias, config.o_bias, config.mlp_bias

    assert biases(parse("llama-biases")) == (True, True, True)
    assert biases(parse("llama-biases", attention_bias=False)) == (False, False, True)
    assert biases(parse("llama-biases", mlp_bias=...)) == (True, True, False)
    assert biases(parse("qwen2-yarn")) == (True, False, False)
    assert biases(parse("qwen2-yarn", attention_bias=False)) == (True, False, False)
    assert biases(parse("qwen3-layer-types")) == (True, True, False)
    assert biases(parse("qwen3-yarn")) == (False, False, False)
    assert biases(parse("mistral-window")) == (False, False, False)


def test_sliding_windows_count_previous_tokens() -> None:
    assert parse("mistral-window").sliding_windows == (23, 23, 23)
    assert parse("mistral-window", sliding_window=None).sliding_windows == (-1, -1, -1)
    assert parse("mistral-window", sliding_window=1).sliding_windows == (0, 0, 0)
    assert parse("mistral-window", sliding_window=...).sliding_windows == (4095, 4095, 4095)
    assert parse("mixtral", sliding_window=...).sliding_windows == (-1, -1)
    assert parse("qwen2-window-layers").sliding_windows == (-1, 16, 16)
    assert parse("qwen2-window-layers", use_sliding_window=False).sliding_windows == (-1, -1, -1)
    assert parse("qwen2-window-layers", max_window_layers=9).sliding_windows == (-1, -1, -1)
    assert parse("qwen3-layer-types").sliding_windows == (8, -1, 8)
    # Qwen3-MoE's windows are in all layers.
    moe = parse("qwen3-moe-renormalised", max_window_layers=1)
    assert moe.sliding_windows == (29, 29)
    assert [moe.sliding_window(layer_id) for layer_id in range(2)] == [29, 29]


def test_moe_layers() -> None:
    assert parse("mixtral").moe_layers == {0, 1}
    assert parse("qwen3-moe").moe_layers == {1}  # every second layer of four, but not the last
    assert parse("qwen3-moe", decoder_sparse_step=1).moe_layers == {0, 1, 2}
    assert parse("qwen3-moe", mlp_only_layers=None).moe_layers == {1, 3}
    dense = parse("qwen3-moe", num_experts=0)
    assert dense.moe is None
    assert dense.moe_layers == frozenset()


def test_moe_config() -> None:
    assert parse("mixtral").moe == MoEConfig(5, 2, 56, norm_topk_prob=True)
    assert parse("qwen3-moe").moe == MoEConfig(7, 3, 40, norm_topk_prob=False)
    assert parse("qwen3-moe-renormalised").moe == MoEConfig(9, 4, 24, norm_topk_prob=True)


def test_eos_token_ids() -> None:
    assert parse("mixtral").eos_token_ids == {2}
    assert parse("mixtral", eos_token_id=[5, 0, 5]).eos_token_ids == {0, 5}
    assert parse("mixtral", eos_token_id=None).eos_token_ids == frozenset()
    assert parse("mixtral", eos_token_id=...).eos_token_ids == frozenset()


@pytest.mark.parametrize(
    ("key", "name", "dtype"),
    [
        ("dtype", "bfloat16", torch.bfloat16),
        ("torch_dtype", "float16", torch.float16),
        ("dtype", None, torch.float32),
    ],
)
def test_dtype(key: str, name: str | None, dtype: torch.dtype) -> None:
    assert parse("mixtral", **({"torch_dtype": ...} | {key: name})).dtype == dtype


def test_context_len_is_what_the_rope_scaling_reaches() -> None:
    assert parse("llama-linear").context_len == 160  # 2.5 * 64
    assert parse("llama-dynamic").context_len == 192  # 4 * 48
    assert parse("qwen2-yarn").context_len == 256  # 4 * 64, max_position_embeddings is the trained 64
    assert parse("llama-yarn").context_len == 256  # 8 * 32, max_position_embeddings says so too
    assert parse("llama-llama3", max_position_embeddings=128).context_len == 128  # not 8 * 32


def test_rope_parameters_of_each_type() -> None:
    yarn = parse("llama-yarn").rope
    assert yarn == RopeConfig(
        "yarn",
        10000.0,
        32,
        factor=8.0,
        original_max_position_embeddings=32,
        beta_fast=16.0,
        beta_slow=2.0,
        mscale=1.0,
        mscale_all_dim=0.5,
        truncate=False,
    )
    rope_scaling = {"type": "yarn", "original_max_position_embeddings": 32}
    by_ratio = parse("qwen2-yarn", rope_scaling=rope_scaling).rope
    assert (by_ratio.factor, by_ratio.beta_fast, by_ratio.beta_slow) == (2.0, 32.0, 1.0)
    assert parse("llama-dynamic").rope.original_max_position_embeddings == 48
    # With no theta anywhere the family's default holds.
    assert parse("mixtral", rope_theta=...).rope.theta == 1e6
    assert parse("mistral-window", rope_theta=...).rope.theta == 1e4


def test_partial_rotary_factor() -> None:
    assert parse("llama-biases", partial_rotary_factor=0.5).rope.rotary_dim == 40
    rope_parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    assert parse("llama-yarn", rope_parameters=rope_parameters).rope.rotary_dim == 8


YARN = CONFIGS["llama-yarn"]["rope_parameters"]
LLAMA3 = CONFIGS["llama-llama3"]["rope_scaling"]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mixtral", {"architectures": ...}, "architectures is missing; it must be a list with one name"),
        (
            "mixtral",
            {"architectures": ["GPT2LMHeadModel"]},
            "GPT2LMHeadModel.*the nearest is .*/config/families.py has all.*docs/models.md",
        ),
        ("mixtral", {"architectures": "MixtralForCausalLM"}, "architectures is 'MixtralForCausalLM'"),
        (
            "mixtral",
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "quant_method 'bitsandbytes'.*fp8, compr",
        ),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported is silu"),
        (
            "mixtral",
            {"torch_dtype": "float8_e4m3fn"},
            "torch_dtype is 'float8_e4m3fn'; supported are float32",
        ),
        ("mixtral", {"vocab_size": ...}, "vocab_size is missing; it must be an integer >= 1"),
        ("mixtral", {"vocab_size": None}, "vocab_size is null; it must be an integer >= 1"),
        ("mixtral", {"vocab_size": "331"}, "vocab_size is '331'; it must be an integer >= 1"),
        ("mixtral", {"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be an integer >= 1"),
        ("mixtral", {"num_hidden_layers": True}, "num_hidden_layers is True; it must be an integer"),
        ("mixtral", {"rms_norm_eps": 0}, "rms_norm_eps is 0; it must be a number > 0"),
        ("mixtral", {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ("mixtral", {"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; it must be true or false"),
        ("mixtral", {"num_key_value_heads": ...}, "num_key_value_heads is missing"),
        ("mixtral", {"num_key_value_heads": 3}, r"num_attention_heads \(4\) is no multiple of .*\(3\)"),
        ("mixtral", {"hidden_size": 63}, r"hidden_size \(63\) is no multiple of num_attention_heads \(4\)"),
        ("mixtral", {"eos_token_id": [2, "3"]}, "eos_token_id is .*list of integers >= 0"),
        ("mixtral", {"eos_token_id": -1}, "eos_token_id is -1"),
        ("mixtral", {"sliding_window": 0}, "sliding_window is 0"),
        ("mixtral", {"num_local_experts": ...}, "num_experts is missing"),
        ("mixtral", {"num_experts_per_tok": 6}, r"num_experts_per_tok \(6\) exceeds num_local_experts \(5\)"),
        ("qwen3-moe", {"moe_intermediate_size": ...}, "moe_intermediate_size is missing"),
        ("qwen3-moe", {"mlp_only_layers": 3}, "mlp_only_layers is 3"),
        ("qwen2-window-layers", {"max_window_layers": ...}, "max_window_layers is missing"),
        ("qwen3-layer-types", {"layer_types": ["full_attention"]}, "has 1 entries, num_hidden_layers is 3"),
        (
            "qwen3-layer-types",
            {"layer_types": ["linear_attention"] * 3},
            "full_attention or sliding_attention",
        ),
        ("qwen3-layer-types", {"use_sliding_window": False}, "no window in use"),
        (
            "llama-linear",
            {"rope_scaling": {"type": "ntk"}},
            "rope_type is 'ntk'; supported are default, linear",
        ),
        ("phi3", {"rope_scaling": {"type": "longrope"}}, "short_factor is missing; it must be a list of"),
        (
            "phi3",
            {"rope_scaling": {"type": "su", "short_factor": [1.0]}},
            r"is \[1.0\]; it must be a list of",
        ),
        ("llama-linear", {"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        ("llama-linear", {"rope_scaling": "linear"}, "rope_scaling: expected an object"),
        ("llama-linear", {"rope_theta": -1.0}, "rope_theta is -1.0"),
        ("llama-linear", {"partial_rotary_factor": 0.33}, "leaves 5 dimensions to rotate"),
        ("llama-linear", {"partial_rotary_factor": 2}, "leaves 32 dimensions to rotate"),
        ("llama-dynamic", {"head_dim": 2}, "dynamic scaling needs more than 2"),
        (
            "llama-llama3",
            {"rope_scaling": LLAMA3 | {"high_freq_factor": 0.5}},
            "not be below low_freq_factor",
        ),
        ("llama-llama3", {"rope_scaling": LLAMA3 | {"low_freq_factor": ...}}, "low_freq_factor is Ellipsis"),
        ("llama-yarn", {"rope_parameters": YARN | {"truncate": 1}}, "rope_parameters: truncate is 1"),
        ("llama-yarn", {"rope_parameters": {"full_attention": YARN}}, "parameters per layer type"),
    ],
)
def test_what_is_wrong_or_unsupported_is_named(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(name, **changes)


def test_a_config_that_is_no_object() -> None:
    with pytest.raises(ValueError, match="expected an object with keys"):
        parse_config([])  # type: ignore[arg-type]


def test_from_pretrained_adds_the_end_tokens_of_generation_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["mixtral"]))
    assert read_config(tmp_path) == parse_config(CONFIGS["mixtral"])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9], "temperature": 0.6}')
    assert read_config(str(tmp_path)).eos_token_ids == {2, 7, 9}


def test_from_pretrained_names_the_file_that_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere is no folder"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"has no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["X"]}')
    with pytest.raises(ValueError, match=rf"{tmp_path}/config\.json: architectures is \['X'\]"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["mixtral"]))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id is '</s>'"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 5}, r"num_qo_heads \(6\) is no multiple of num_kv_heads \(5\)"),
        ({"sliding_windows": (7,)}, "1 entries for 2 layers"),
        ({"moe_layers": frozenset([1])}, "there is no MoE config"),
    ],
)
def test_a_model_config_made_by_hand_must_be_consistent(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(parse("llama-biases"), **changes)


def test_an_moe_config_must_leave_enough_experts_to_choose_from() -> None:
    with pytest.raises(ValueError, match=r"num_experts \(6\) is no multiple"):
        MoEConfig(6, 2, 8, True, "grouped", num_expert_groups=4)
    with pytest.raises(ValueError, match=r"num_experts_per_tok \(4\) must be between 1 and .*\(3 of 6\)"):
        MoEConfig(6, 4, 8, True, "grouped", num_expert_groups=2, topk_group=1)
    with pytest.raises(ValueError, match=r"num_experts_per_tok \(7\)"):
        MoEConfig(6, 7, 8, True)
