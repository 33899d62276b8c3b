"""The config.json of published models, and what is known of these models from elsewhere."""

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch

from diptych.shared.config import (
    MLAConfig,
    ModelConfig,
    MoEConfig,
    QuantConfig,
    RopeConfig,
    read_config,
    read_draft_config,
)
from diptych.shared.loading.weight_names import expected_shapes
from diptych.shared.types.quant_scheme import QuantScheme

PUBLISHED = Path(__file__).parents[2] / "shared" / "assets" / "configs"

QWEN3_8B = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_qo_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    context_len=40960,
    rope=RopeConfig("default", 1e6, 128),
    dtype=torch.bfloat16,
    qk_norm=True,
    sliding_windows=(-1,) * 36,
    eos_token_ids=frozenset([151645]),
    bos_token_id=151643,
)
MISTRAL_7B = ModelConfig(
    architecture="MistralForCausalLM",
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_qo_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    context_len=32768,
    rope=RopeConfig("default", 1e4, 128),
    dtype=torch.bfloat16,
    sliding_windows=(4095,) * 32,
    eos_token_ids=frozenset([2]),
    bos_token_id=1,
)
GEMMA_2_2B = replace(
    MISTRAL_7B,
    architecture="Gemma2ForCausalLM",
    vocab_size=256000,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=26,
    num_qo_heads=8,
    num_kv_heads=4,
    head_dim=256,
    rms_norm_eps=1e-6,
    context_len=8192,
    rope=RopeConfig("default", 1e4, 256),
    tie_word_embeddings=True,
    hidden_act="gelu_tanh",
    norm_unit_offset=True,
    norms="both",
    attn_scale=256**-0.5,
    sliding_windows=(4095, -1) * 13,
    attn_logit_cap=50.0,
    final_logit_cap=30.0,
    eos_token_ids=frozenset([1]),
    bos_token_id=2,
)
EXPECTED = {
    "Qwen3-0.6B": replace(
        QWEN3_8B,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_qo_heads=16,
        sliding_windows=(-1,) * 28,
        tie_word_embeddings=True,
    ),
    "Qwen3-8B": QWEN3_8B,
    "Qwen3-14B": replace(
        QWEN3_8B,
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=40,
        num_qo_heads=40,
        sliding_windows=(-1,) * 40,
    ),
    "Qwen3-30B-A3B": replace(
        QWEN3_8B,
        architecture="Qwen3MoeForCausalLM",
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=48,
        num_kv_heads=4,
        sliding_windows=(-1,) * 48,
        moe=MoEConfig(128, 8, 768, norm_topk_prob=True),
        moe_layers=frozenset(range(48)),
    ),
    "Llama-3.1-8B": replace(
        MISTRAL_7B,
        architecture="LlamaForCausalLM",
        vocab_size=128256,
        context_len=131072,
        rope=RopeConfig(
            "llama3",
            500000.0,
            128,
            factor=8.0,
            original_max_position_embeddings=8192,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        ),
        sliding_windows=(-1,) * 32,
        eos_token_ids=frozenset([128001]),
        bos_token_id=128000,
    ),
    "Mistral-7B-v0.1": MISTRAL_7B,
    "Mixtral-8x7B-v0.1": replace(
        MISTRAL_7B,
        architecture="MixtralForCausalLM",
        rope=RopeConfig("default", 1e6, 128),
        sliding_windows=(-1,) * 32,
        moe=MoEConfig(8, 2, 14336, norm_topk_prob=True),
        moe_layers=frozenset(range(32)),
    ),
    "DeepSeek-V2-Lite": replace(
        QWEN3_8B,
        architecture="DeepseekV2ForCausalLM",
        vocab_size=102400,
        hidden_size=2048,
        intermediate_size=10944,
        num_hidden_layers=27,
        num_qo_heads=16,
        num_kv_heads=16,
        head_dim=192,
        context_len=163840,
        rope=RopeConfig(
            "yarn",
            1e4,
            64,
            factor=40.0,
            original_max_position_embeddings=4096,
            mscale=0.707,
            mscale_all_dim=0.707,
            is_interleaved=True,
        ),
        qk_norm=False,
        sliding_windows=(-1,) * 27,
        moe=MoEConfig(64, 6, 1408, norm_topk_prob=False, shared_intermediate_size=2816),
        moe_layers=frozenset(range(1, 27)),
        mla=MLAConfig(512, 128, 64, 128),
        eos_token_ids=frozenset([100001]),
        bos_token_id=100000,
    ),
    "Qwen2.5-7B": replace(
        QWEN3_8B,
        architecture="Qwen2ForCausalLM",
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_qo_heads=28,
        num_kv_heads=4,
        context_len=131072,
        qk_norm=False,
        qkv_bias=True,
        sliding_windows=(-1,) * 28,
        eos_token_ids=frozenset([151643]),
    ),
}
EXPECTED |= {
    "gpt-oss-20b": replace(
        MISTRAL_7B,
        architecture="GptOssForCausalLM",
        vocab_size=201088,
        hidden_size=2880,
        intermediate_size=2880,
        num_hidden_layers=24,
        num_qo_heads=64,
        head_dim=64,
        context_len=131072,
        rope=RopeConfig(
            "yarn", 150000.0, 64, factor=32.0, original_max_position_embeddings=4096, truncate=False
        ),
        qkv_bias=True,
        o_bias=True,
        attn_sinks=True,
        sliding_windows=(127, -1) * 12,
        moe=MoEConfig(32, 4, 2880, norm_topk_prob=True, bias=True, swiglu_limit=7.0),
        moe_layers=frozenset(range(24)),
        quantization=QuantConfig(
            "mxfp4",
            (("mlp.experts", QuantScheme("mxfp4", group_size=32)),),
            ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"),
        ),
        eos_token_ids=frozenset([200002]),
        bos_token_id=None,
    ),
    "gemma-2-2b": GEMMA_2_2B,
    "gemma-3-1b": replace(
        GEMMA_2_2B,
        architecture="Gemma3ForCausalLM",
        vocab_size=262144,
        hidden_size=1152,
        intermediate_size=6912,
        num_qo_heads=4,
        num_kv_heads=1,
        context_len=32768,
        rope=RopeConfig("default", 1e6, 256),
        local_rope=RopeConfig("default", 1e4, 256),
        qk_norm=True,
        sliding_windows=((511,) * 5 + (-1,)) * 4 + (511,) * 2,
        attn_logit_cap=0.0,
        final_logit_cap=0.0,
    ),
}
DRAFT_MODELS = {"Qwen3-8B-eagle3": ("Qwen3-8B", 32000, (2, 18, 33))}
"""name -> its target, the size of its vocabulary, and the layers whose inputs it takes"""
# As the publishers state them.
NUM_PARAMETERS = {
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Llama-3.1-8B": 8_030_261_248,
    "Mistral-7B-v0.1": 7_241_732_096,
    "Mixtral-8x7B-v0.1": 46_702_792_704,
    "Qwen2.5-7B": 7_615_616_512,
    "DeepSeek-V2-Lite": 15_706_484_224,
    "gpt-oss-20b": 20_914_757_184,
    "gemma-2-2b": 2_614_341_888,
    "gemma-3-1b": 999_885_952,
}
# Language models without their towers, as transformers counts them, and the number of layers.
HYBRID = {
    "Qwen3.5-4B": (4_205_751_296, 32),
    "Qwen3.5-9B": (8_953_803_264, 32),
    "Qwen3.5-35B-A3B": (34_660_610_688, 40),
}
NUM_PARAMETERS |= {name: num for name, (num, _) in HYBRID.items()}


@pytest.mark.parametrize("name", EXPECTED)
def test_published_configs(name: str) -> None:
    assert read_config(PUBLISHED / name) == EXPECTED[name]


def test_every_published_config_is_known() -> None:
    assert {path.name for path in PUBLISHED.iterdir()} == {*EXPECTED, *DRAFT_MODELS, *HYBRID}


@pytest.mark.parametrize("name", HYBRID)
def test_every_fourth_layer_has_attention(name: str) -> None:
    config, num_layers = read_config(PUBLISHED / name), HYBRID[name][1]
    assert config.linear_layers == {layer for layer in range(num_layers) if layer % 4 != 3}
    assert (config.num_qo_heads, config.head_dim, config.rope.rotary_dim) == (16, 256, 64)


@pytest.mark.parametrize("name", DRAFT_MODELS)
def test_shapes_of_draft_models_fit_their_targets(name: str) -> None:
    """Heads as they are published: one layer of the target's shape, over a part of its vocabulary."""
    target, vocab_size, layers = DRAFT_MODELS[name]
    config = read_draft_config(PUBLISHED / name, EXPECTED[target])
    assert config.draft_format == "eagle3"
    assert config.model.vocab_size == vocab_size
    assert config.target_layers == layers
    same = ("hidden_size", "num_qo_heads", "num_kv_heads", "head_dim", "intermediate_size", "rope", "dtype")
    for field in same:
        assert getattr(config.model, field) == getattr(config.target, field), field


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_shapes_add_up_to_the_published_number_of_parameters(name: str) -> None:
    shapes = expected_shapes(read_config(PUBLISHED / name))
    assert sum(prod(shape) for shape in shapes.values()) == NUM_PARAMETERS[name]
