"""The size of the KV pool."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from diptych.shared.config import EngineConfig, ModelConfig, read_config
from diptych.shared.config.hf_config import parse_config
from diptych.shared.interfaces import StatePool
from diptych.shared.loading.kv_sizing import (
    GIB,
    MAX_CPU_TOKENS,
    STAGING_BYTES,
    MemoryPlan,
    check_mask_memory,
    dequantized_bytes,
    kv_bytes_per_token,
    mask_bytes,
    plan_memory,
    reserve_for_steps,
)
from diptych.shared.loading.model_path import ASSETS
from diptych.shared.loading.quantize import with_quantization
from diptych.shared.tools.conformance.oracles.hybrid_configs import HYBRID_CONFIGS


@pytest.fixture
def qwen3_8b() -> ModelConfig:
    return read_config(ASSETS / "configs" / "Qwen3-8B")


def gpu_tokens(
    monkeypatch: pytest.MonkeyPatch, model_config: ModelConfig, free_gib: float, **flags: object
) -> int:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free_gib * 2**30), 140 * 2**30))
    plan = plan_memory(EngineConfig(**flags), model_config, torch.bfloat16, torch.device("cuda"))
    return plan.num_tokens


def test_bytes_per_token(qwen3_8b: ModelConfig) -> None:
    """36 layers, 8 KV heads of 128, K and V, two bytes each."""
    assert kv_bytes_per_token(qwen3_8b, torch.bfloat16) == 36 * 8 * 128 * 2 * 2


def test_what_is_free_after_the_weights_less_what_is_kept_back(
    monkeypatch: pytest.MonkeyPatch, qwen3_8b: ModelConfig
) -> None:
    tokens = gpu_tokens(monkeypatch, qwen3_8b, 120.0, mem_fraction_static=0.85)
    assert tokens == int(99 * 2**30 / 147456)
    assert gpu_tokens(monkeypatch, qwen3_8b, 120.0, page_size=16) % 16 == 0
    larger = gpu_tokens(monkeypatch, qwen3_8b, 120.0, mem_fraction_static=0.9)
    assert larger > tokens


def test_no_more_than_running_requests_can_fill(
    monkeypatch: pytest.MonkeyPatch, qwen3_8b: ModelConfig
) -> None:
    assert gpu_tokens(monkeypatch, qwen3_8b, 120.0, max_running_requests=4, context_len=1000) == 4000


def test_a_full_gpu_is_an_error_with_its_numbers(
    monkeypatch: pytest.MonkeyPatch, qwen3_8b: ModelConfig
) -> None:
    with pytest.raises(ValueError, match=r"of 140.0 GiB on the GPU 10.0 are free, and .* leaves 0.0 for it"):
        gpu_tokens(monkeypatch, qwen3_8b, 10.0)


def test_what_steps_need_is_left_whatever_the_fraction(
    monkeypatch: pytest.MonkeyPatch, qwen3_8b: ModelConfig
) -> None:
    """On a small GPU, or with nearly all of it asked for."""
    reserved = sum(reserve_for_steps(EngineConfig(), qwen3_8b, torch.bfloat16).values())
    tokens = gpu_tokens(monkeypatch, qwen3_8b, 120.0, mem_fraction_static=0.999)
    assert tokens == (120 * GIB - reserved) // 147456
    with pytest.raises(ValueError, match=r"are free, and steps need .* leaves 0.0 for it"):
        gpu_tokens(monkeypatch, qwen3_8b, 1.0, mem_fraction_static=0.999)


def test_what_steps_need_grows_with_them(qwen3_8b: ModelConfig) -> None:
    def reserve(**flags: object) -> dict[str, int]:
        return reserve_for_steps(EngineConfig(**flags), qwen3_8b, torch.bfloat16)

    plain = reserve()
    # Gate, up and their product, three hidden states, a norm in float32.
    assert plain["activations"] == (8192 + 256) * ((3 * 12288 + 3 * 4096) * 2 + 4096 * 8)
    assert plain["logits"] == 512 * 151936 * 24
    assert reserve(chunked_prefill_size=4096)["activations"] < plain["activations"]
    assert reserve(chunked_prefill_size=None)["activations"] > 4 * plain["activations"]  # the whole context
    assert reserve(max_running_requests=1024)["logits"] == 2 * plain["logits"]
    assert plain["req_to_token"] == (2 * 257 + 1) * 40960 * 4  # a row besides, for padding
    assert reserve(context_len=4096)["req_to_token"] == plain["req_to_token"] // 10
    assert reserve(disable_cuda_graph=True)["graphs"] == 0
    assert reserve(cuda_graph_bs=(1, 2))["graphs"] < plain["graphs"]
    assert reserve(cuda_graph_max_tokens=0)["graphs"] < plain["graphs"]
    assert reserve(cuda_graph_max_tokens=16)["graphs"] == plain["graphs"]
    more = reserve(cuda_graph_max_tokens=8192)["graphs"]
    assert (
        plain["graphs"]
        < more
        == reserve(cuda_graph_max_tokens=10**6, chunked_prefill_size=8192 - 256)["graphs"]
    )


def test_copies_to_cpu_memory_are_counted(qwen3_8b: ModelConfig) -> None:
    """As much as the optimized pool takes on the GPU: for KV, and for states, of which one may be larger."""
    hybrid = parse_config(HYBRID_CONFIGS["qwen3.5"])
    for model, num_pools in ((qwen3_8b, 1), (hybrid, 2)):
        assert "copies" not in reserve_for_steps(EngineConfig(), model, torch.bfloat16)
        reserved = reserve_for_steps(EngineConfig(hicache_tokens=64), model, torch.bfloat16)
        assert reserved["copies"] == num_pools * STAGING_BYTES
    assert hybrid.linear_attention is not None
    wide = replace(hybrid.linear_attention, num_v_heads=2**17)
    large = replace(hybrid, linear_attention=wide)
    size = StatePool.bytes_per_row(len(hybrid.linear_layers), wide, torch.bfloat16)
    assert size > STAGING_BYTES
    reserved = reserve_for_steps(EngineConfig(hicache_tokens=64), large, torch.bfloat16)
    assert reserved["copies"] == STAGING_BYTES + size


@pytest.mark.parametrize(
    ("model", "shape"),
    [("Qwen3-8B", (2 * 12288, 4096)), ("Qwen3-30B-A3B", ((32 + 2 * 4) * 128, 2048))],
)
def test_a_dequantized_layer_is_counted(model: str, shape: tuple[int, int]) -> None:
    """gate_up, and q, k and v: experts are not dequantized. With quantized inputs no layer is."""
    config = read_config(ASSETS / "configs" / model)

    def reserve(method: str | None) -> int:
        of_method = with_quantization(config, method)
        return reserve_for_steps(EngineConfig(), of_method, torch.bfloat16)["activations"]

    plain = reserve(None)
    assert reserve("int4") - plain == reserve("nvfp4") - plain == shape[0] * shape[1] * 2
    assert reserve("fp8") == plain


def test_the_projections_of_linear_attention_are_one_layer() -> None:
    config = with_quantization(parse_config(HYBRID_CONFIGS["qwen3-next"]), "int4")
    assert config.linear_attention is not None
    num_out = sum(config.linear_attention.projections.values())
    assert dequantized_bytes(config, torch.bfloat16) == num_out * config.hidden_size * 2


def test_masks_of_block_diffusion_are_planned_or_refused(
    monkeypatch: pytest.MonkeyPatch, qwen3_8b: ModelConfig
) -> None:
    def plan(**flags: object) -> tuple[MemoryPlan, EngineConfig, ModelConfig]:
        config = EngineConfig(page_size=4, context_len=32768, **flags)
        memory = plan_memory(config, qwen3_8b, torch.bfloat16, torch.device("cuda"))
        return memory, config, qwen3_8b

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (120 * GIB, 140 * GIB))
    flags = {"mem_fraction_static": 0.999, "max_running_requests": 512}
    kept = plan(**flags, cuda_graph_block_len=4)
    # Two masks of a byte for each token of a chunk and of the context, with two copies of a bit each.
    assert kept[0].reserved["masks"] == mask_bytes(*kept[1:]) == 2 * 8192 * 32768 * 5 // 4
    check_mask_memory(*kept)
    with pytest.raises(ValueError, match=r"need up to 0.62 GiB.* leave 0.00 GiB.*_size \(8192\)"):
        check_mask_memory(*plan(**flags))
    with pytest.raises(ValueError, match=r"need up to 0.62 GiB.* leave 0.00 GiB"):
        check_mask_memory(*plan(cuda_graph_block_len=4, max_total_tokens=870_000))
    check_mask_memory(*plan(mem_fraction_static=0.8))  # leaves more than steps need
    assert mask_bytes(EngineConfig(chunked_prefill_size=64), qwen3_8b) == 512 * 40960 * 5 // 2  # passes
    assert mask_bytes(EngineConfig(chunked_prefill_size=None), qwen3_8b) == 40960**2 * 5 // 2
    cpu = plan_memory(EngineConfig(), qwen3_8b, torch.float32, torch.device("cpu"))
    check_mask_memory(cpu, EngineConfig(chunked_prefill_size=None), qwen3_8b)


def test_shared_experts_compute_the_tokens_of_all_replicas() -> None:
    """Each token has gate, up, their product and the output of 8 experts, its row and its sum."""
    model = read_config(ASSETS / "configs" / "Qwen3-30B-A3B")

    def reserve(**flags: object) -> int:
        return reserve_for_steps(EngineConfig(**flags), model, torch.bfloat16)["activations"]

    routed = 8 * (3 * 768 + 2048)
    more = reserve(dp=4, dp_attention=True, ep=4) - reserve()
    assert more == (8192 + 256) * (3 * routed + 4 * 2 * 2048) * 2


def test_the_arithmetic_is_reported(monkeypatch: pytest.MonkeyPatch, qwen3_8b: ModelConfig) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(120 * GIB), 140 * GIB))
    config = EngineConfig(mem_fraction_static=0.85)
    device = torch.device("cuda")
    plan = plan_memory(config, qwen3_8b, torch.bfloat16, device, free_before=136 * GIB, weights=15 * GIB)
    rows = plan.rows()
    assert rows["GPU memory"] == "140.00 GiB: 136.00 GiB free before the weights, 120.00 GiB after"
    assert rows["weights"] == "15.00 GiB"
    assert rows["kept for steps"].startswith("4.91 GiB (activations 1.03 GiB, logits")
    assert rows["KV pool"].startswith("720,896 tokens of 144 KiB: 99.00 GiB (of 140.0 GiB on the GPU")


def test_a_pool_larger_than_the_free_memory_is_refused(qwen3_8b: ModelConfig) -> None:
    config = EngineConfig(max_total_tokens=10**9)
    with pytest.raises(ValueError, match=r"the KV pool \(max_total_tokens=1000000000\) needs 294912.0 GB, "):
        plan_memory(config, qwen3_8b, torch.float32, torch.device("cpu"))


def test_on_a_cpu_the_flag_or_a_laptops_worth(qwen3_8b: ModelConfig) -> None:
    cpu = torch.device("cpu")
    assert (
        plan_memory(EngineConfig(max_total_tokens=1003, page_size=4), qwen3_8b, torch.float32, cpu).num_tokens
        == 1000
    )
    plan = plan_memory(EngineConfig(), qwen3_8b, torch.float32, cpu)
    assert plan.num_tokens <= MAX_CPU_TOKENS
    assert list(plan.rows()) == ["KV pool"]
