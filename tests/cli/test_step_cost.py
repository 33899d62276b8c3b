"""What a step costs at least: numbers worked out by hand from the published configurations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from diptych.shared.config import ModelConfig, parse_config, read_config
from diptych.shared.loading.model_path import ASSETS
from diptych.shared.tools.bench.step_cost import Ceilings, StepCost, expected_experts_hit, step_cost
from diptych.shared.tools.conformance.oracles.hybrid_configs import HYBRID_CONFIGS

BF16 = torch.bfloat16


def config_of(name: str) -> ModelConfig:
    return read_config(ASSETS / "configs" / name)


def decode(name: str, batch_size: int, context_len: int, **more: float) -> StepCost:
    return step_cost(config_of(name), [context_len] * batch_size, [1] * batch_size, BF16, **more)


def test_qwen3_8b_by_hand() -> None:
    """hidden 4096, 36 layers, 32 query and 8 KV heads of 128, MLP 12288, vocabulary 151936, not tied."""
    attention = 4096 * (32 + 8 + 8) * 128 + 32 * 128 * 4096
    mlp = 3 * 4096 * 12288
    norms = 2 * 4096 + 2 * 128
    weights = 36 * (attention + mlp + norms) + 4096 + 151936 * 4096
    assert weights == 7_568_405_504
    kv_of_token = 2 * 36 * 8 * 128
    cost = decode("Qwen3-8B", 64, 1024)
    assert cost.weight_bytes == 2 * weights
    assert cost.kv_bytes == 2 * kv_of_token * 64 * 1024 == 9_663_676_416
    products = 2 * (36 * (attention + mlp) + 151936 * 4096)
    scores = 2 * 2 * 36 * 32 * 128 * 1024
    assert cost.flops == 64 * (products + scores)
    assert {phase.name for phase in cost.phases} == {
        "norms", "qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head", "attention",
    }  # fmt: skip


def test_the_limits_of_single_stream_decoding() -> None:
    """At 4.3 TB/s, in the middle of 512 tokens after a 512-token prompt: known for three shapes, in ms."""
    ceilings = Ceilings(4.3e12, 780e12)
    for name, milliseconds in (("Qwen3-0.6B", 0.29), ("Qwen3-14B", 6.53), ("Qwen3-30B-A3B", 1.42)):
        assert decode(name, 1, 768).bound(ceilings) * 1e3 == pytest.approx(milliseconds, rel=0.05), name


def test_a_tied_embedding_is_read_once_as_the_head() -> None:
    tied = config_of("Qwen3-0.6B")
    assert tied.tie_word_embeddings
    untied = replace(tied, tie_word_embeddings=False)
    costs = [step_cost(config, [10], [1], BF16) for config in (tied, untied)]
    assert sorted(costs[0].phases) == sorted(costs[1].phases)
    head = next(phase for phase in costs[0].phases if phase.name == "lm_head")
    assert head.num_bytes == 2 * 151936 * 1024


def test_only_experts_that_are_hit_are_read() -> None:
    """128 experts of 3 * 2048 * 768 in each of 48 layers, 8 for a token."""
    one_expert = 48 * 3 * 2048 * 768 * 2
    one, two = decode("Qwen3-30B-A3B", 1, 10), decode("Qwen3-30B-A3B", 2, 10, num_experts_hit=12.0)
    assert two.weight_bytes - one.weight_bytes == pytest.approx(4 * one_expert)
    experts = [phase for phase in one.phases if phase.name.startswith("experts.")]
    assert sum(phase.num_bytes for phase in experts) == pytest.approx(8 * one_expert)
    assert sum(phase.flops for phase in experts) == pytest.approx(8 * one_expert)  # 2 FLOPs, 2 bytes
    assert expected_experts_hit(config_of("Qwen3-30B-A3B"), 1) == pytest.approx(8)
    assert expected_experts_hit(config_of("Qwen3-30B-A3B"), 1000) == pytest.approx(128)
    assert expected_experts_hit(config_of("Mixtral-8x7B-v0.1"), 2) == pytest.approx(8 * (1 - 0.75**2))


@pytest.mark.parametrize(("cached", "new"), [(0, 1), (0, 7), (5, 4), (9, 1), (20, 6)])
@pytest.mark.parametrize("window", [-1, 0, 3, 8, 50])
def test_pairs_of_attention_by_counting_them(cached: int, new: int, window: int) -> None:
    config = replace(config_of("Qwen3-8B"), num_hidden_layers=1, sliding_windows=(window,))
    seen = [{j for j in range(p + 1) if window < 0 or j >= p - window} for p in range(cached, cached + new)]
    phase = next(p for p in step_cost(config, [cached + new], [new], BF16).phases if p.name == "attention")
    assert phase.flops == 4 * 32 * 128 * sum(map(len, seen))
    assert phase.num_bytes == 2 * 2 * 8 * 128 * len(set.union(*seen))


def test_a_long_prefill_is_bound_by_products_and_phases_add_up() -> None:
    ceilings = Ceilings(4e12, 800e12)
    config = config_of("Llama-3.1-8B")
    prefill = step_cost(config, [8192], [8192], BF16)
    assert prefill.bound(ceilings) == prefill.flops / 800e12
    assert prefill.roofline(ceilings) >= prefill.bound(ceilings)
    head = next(phase for phase in prefill.phases if phase.name == "lm_head")
    assert head.flops == 2 * 128256 * 4096  # of the last token alone
    decode = step_cost(config, [100], [1], BF16)
    assert decode.bound(ceilings) == decode.num_bytes / 4e12
    assert decode.roofline(ceilings) == pytest.approx(decode.bound(ceilings))


def test_states_of_linear_attention_are_read_and_written() -> None:
    """Qwen3.5-4B: 24 layers with a state of 32 heads of 128 x 128 and three inputs of 8192 channels, 8 layers
    with KV of 2 * 4 heads of 256."""
    shape = {"hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32, "head_dim": 256}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "layer_types": None}
    linear_heads = {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
    linear_dims = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    fields = {**HYBRID_CONFIGS["qwen3.5"], **shape, **heads, **linear_heads, **linear_dims}
    config = parse_config({name: value for name, value in fields.items() if value is not None})
    cost = step_cost(config, [1024] * 64, [1] * 64, BF16)
    state = 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert cost.kv_bytes == 64 * (2 * state + 8 * 1024 * 2 * 4 * 256 * 2)
    linear = next(phase for phase in cost.phases if phase.name == "linear attention")
    assert linear.flops == 64 * 24 * 6 * 32 * 128 * 128
