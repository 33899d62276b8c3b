"""The config.json of a DFlash head: what is taken from it, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from diptych.shared.config import ModelConfig, parse_draft_config, read_config
from diptych.shared.config.draft import DraftBlock
from diptych.shared.loading.model_path import ASSETS

DFLASH: dict[str, Any] = {  # the keys of the published head for Qwen3-8B
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


@pytest.fixture(scope="module")
def target() -> ModelConfig:
    return read_config(ASSETS / "configs" / "Qwen3-8B")


def test_a_published_head(target: ModelConfig) -> None:
    config = parse_draft_config(DFLASH, target)
    assert (config.draft_format, config.block) == ("dflash", DraftBlock(16, 151669))
    assert config.target_layers == (2, 10, 18, 26, 34)  # outputs of layers are inputs of those behind them
    assert config.target_hidden_size == 5 * 4096
    assert (config.model.num_hidden_layers, config.model.qk_norm) == (5, True)
    assert config.model.rope.theta == 1000000


def dflash(**values: Any) -> dict[str, Any]:
    return {"dflash_config": {**DFLASH["dflash_config"], **values}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 1}, "block_size is 1; it must be an integer >= 2"),
        ({"block_size": None}, "block_size is null"),
        ({"dflash_config": None}, "dflash_config is null; it must be an object"),
        (dflash(mask_token_id=151936), "mask_token_id is 151936; it must be below 151936"),
        (dflash(target_layer_ids=[1, 35]), r"target_layer_ids is \[1, 35\]; it must be .* below 35"),
        (dflash(target_layer_ids=[]), r"target_layer_ids is \[\]"),
        ({"num_target_layers": 28}, "num_target_layers is 28; it must be 36"),
        ({"model_type": "gpt_oss"}, "model_type is 'gpt_oss'; it must be one of qwen3, llama"),
        ({"hidden_size": 2048}, "hidden_size is 2048, the target's 4096"),
        ({"vocab_size": 32000}, "vocab_size is 32000, the target's 151936"),
        (
            {"layer_types": ["sliding_attention"] * 5, "sliding_window": 64, "use_sliding_window": True},
            "sliding window are not supported",
        ),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "of format eagle3, not dflash"),
    ],
)
def test_refused(target: ModelConfig, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_draft_config({**DFLASH, **change}, target, "dflash")
