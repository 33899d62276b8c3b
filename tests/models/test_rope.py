"""Frequencies of every scaling against transformers', bit for bit where the arithmetic is the same."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from diptych.shared.config import RopeConfig, parse_config
from diptych.shared.modeling.rope import rope_frequencies

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.5},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 8192},
    "llama3, other bands": LLAMA3
    | {
        "factor": 32.0,
        "low_freq_factor": 2.0,
        "high_freq_factor": 3.0,
        "original_max_position_embeddings": 64,
    },
    "llama3, no original length": LLAMA3,
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn, short original": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 40},
    "yarn, betas": {"rope_type": "yarn", "factor": 40.0, "beta_fast": 64.0, "beta_slow": 0.5},
    "yarn, factor below one": {"rope_type": "yarn", "factor": 0.5, "beta_fast": 32, "beta_slow": 1},
    "yarn, not truncated": {"rope_type": "yarn", "factor": 32.0, "truncate": False},
    "yarn, one step": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 2, "beta_slow": 2, "truncate": False},
    "yarn, attention_factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.75},
    "yarn, mscale": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn, mscale alone": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707},
}


def both_configs(rope: dict[str, Any], head_dim: int = 96) -> tuple[Any, RopeConfig]:
    hf_config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 192,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "rope_parameters": {"rope_theta": 500000.0} | rope,
    }
    rope_config = parse_config(hf_config).rope
    return AutoConfig.for_model(**hf_config), rope_config


@pytest.mark.parametrize("name", [name for name in CASES if name != "dynamic"])
@pytest.mark.parametrize("head_dim", [64, 96])
def test_frequencies(name: str, head_dim: int) -> None:
    hf_config, rope = both_configs(CASES[name], head_dim)
    rotary_emb = LlamaRotaryEmbedding(hf_config)
    inv_freq, factor = rope_frequencies(rope)
    # A blend of two frequencies is written differently: a few float32 roundings (6e-8 each) apart.
    torch.testing.assert_close(inv_freq, rotary_emb.inv_freq, rtol=4e-7, atol=0.0)
    assert factor == pytest.approx(rotary_emb.attention_scaling, rel=1e-12)
    if name in ("default", "linear"):
        assert torch.equal(inv_freq, rotary_emb.inv_freq)


@pytest.mark.parametrize("seq_len", [0, 1, 131071, 131072, 131073, 200000, 524288])
def test_dynamic_frequencies(seq_len: int) -> None:
    hf_config, rope = both_configs(CASES["dynamic"])
    expected, factor = ROPE_INIT_FUNCTIONS["dynamic"](hf_config, "cpu", seq_len=seq_len)
    inv_freq, our_factor = rope_frequencies(rope, seq_len)
    # The base is a Python float in both, so at most a rounding of the power differs.
    torch.testing.assert_close(inv_freq, expected, rtol=4e-7, atol=0.0)
    assert our_factor == factor == 1.0


def test_scalings_that_differ_give_different_frequencies() -> None:
    """The comparison above would not notice two cases that both fall back to the unscaled frequencies."""
    different = {
        name: rope
        for name, rope in CASES.items()
        if not name.startswith(("dynamic", "yarn, att", "yarn, ms"))
    }
    freqs = [rope_frequencies(both_configs(rope)[1])[0] for rope in different.values()]
    for i, one in enumerate(freqs):
        assert not any(torch.allclose(one, other, rtol=1e-3, atol=0.0) for other in freqs[i + 1 :])


def test_frequencies_are_made_on_the_cpu_whatever_the_default_device() -> None:
    """A model may be built on "meta"."""
    with torch.device("meta"):
        inv_freq, _ = rope_frequencies(
            RopeConfig("yarn", 1e4, 32, factor=2.0, original_max_position_embeddings=64)
        )
    assert inv_freq.device.type == "cpu"
