"""The size of the KV pool."""

from __future__ import annotations

import pytest
import torch

from shared.config import EngineConfig, ModelConfig
from shared.kv_sizing import MAX_CPU_TOKENS, kv_bytes_per_token, num_pool_tokens
from shared.model_path import ASSETS


@pytest.fixture
def qwen3_8b() -> ModelConfig:
    return ModelConfig.from_pretrained(ASSETS / "configs" / "Qwen3-8B")


def gpu_tokens(
    monkeypatch: pytest.MonkeyPatch, model_config: ModelConfig, free_gib: float, **flags: object
) -> int:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free_gib * 2**30), 140 * 2**30))
    return num_pool_tokens(EngineConfig(**flags), model_config, torch.bfloat16, torch.device("cuda"))


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


def test_on_a_cpu_the_flag_or_a_laptops_worth(qwen3_8b: ModelConfig) -> None:
    cpu = torch.device("cpu")
    assert (
        num_pool_tokens(EngineConfig(max_total_tokens=1003, page_size=4), qwen3_8b, torch.float32, cpu)
        == 1000
    )
    assert num_pool_tokens(EngineConfig(), qwen3_8b, torch.float32, cpu) <= MAX_CPU_TOKENS
