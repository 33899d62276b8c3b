"""The roofline bound of a workload: by hand, by a loop over every step, and as published."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from diptych.shared.config import ModelConfig, read_config
from diptych.shared.loading.model_path import ASSETS
from diptych.shared.tools.bench import peers
from diptych.shared.tools.bench.peers import CEILINGS, ROWS
from diptych.shared.tools.bench.step_cost import Ceilings, step_cost
from diptych.shared.tools.bench.workload_bound import stream_bound, workload_bound
from diptych.shared.tools.bench.workloads import Offline256, Request

BF16 = torch.bfloat16


def config_of(name: str) -> ModelConfig:
    return read_config(ASSETS / "configs" / name)


def requests(*lens: tuple[int, int]) -> list[Request]:
    return [Request([0] * prompt_len, output_len) for prompt_len, output_len in lens]


def test_two_requests_by_hand() -> None:
    """Qwen3-8B: 7,568,405,504 weights without the embedding table, 36 layers of 8 KV heads of 128."""
    weights, kv = 2 * 7_568_405_504, 2 * 2 * 36 * 8 * 128
    # Outputs of 1 and 3: the first is done after its prompt; the other has two steps, over 11 and 12 tokens.
    bound = workload_bound(config_of("Qwen3-8B"), requests((20, 1), (10, 3)), BF16, Ceilings(1e12, 1e15))
    assert bound.decode * 1e12 == pytest.approx(2 * weights + (11 + 12) * kv)
    of_layer = 4096 * (32 + 8 + 8) * 128 + 32 * 128 * 4096 + 3 * 4096 * 12288
    attention = 4 * 36 * 32 * 128 * (20 * 21 // 2 + 10 * 11 // 2)
    assert bound.prefill * 1e15 == pytest.approx(2 * 36 * of_layer * 30 + 2 * 2 * 151936 * 4096 + attention)
    assert bound.num_output_tokens == 4
    assert bound.tokens_per_second == pytest.approx(4 / (bound.prefill + bound.decode))


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "Mistral-7B-v0.1", "Qwen3-0.6B"])
def test_each_step_costs_what_a_step_costs(name: str) -> None:
    """Experts by batch size, a window (of 8 tokens) and a tied head: every step asked by itself."""
    config = config_of(name)
    if name.startswith("Mistral"):
        config = replace(config, sliding_windows=(7, -1) * (config.num_hidden_layers // 2))
    asked = requests((5, 4), (9, 2), (3, 7), (12, 1))
    num_bytes = 0.0
    for n in range(1, 7):
        seq_lens = [len(r.prompt) + n for r in asked if r.output_len > n]
        num_bytes += step_cost(config, seq_lens, [1] * len(seq_lens), BF16).num_bytes
    assert workload_bound(config, asked, BF16, Ceilings(1.0, 1.0)).decode == pytest.approx(num_bytes)


@pytest.mark.parametrize("name", ROWS)
def test_the_published_bounds(name: str) -> None:
    """They are rounded to five tokens a second, or to ten, and to a hundredth of a millisecond."""
    config, row = config_of(name), ROWS[name]
    asked = Offline256().cases(config.vocab_size)[0].requests
    found = workload_bound(config, asked, BF16, CEILINGS)
    assert found.tokens_per_second == pytest.approx(row.offline_bound, abs=5)
    context_len = peers.STREAM_INPUT_LEN + peers.STREAM_OUTPUT_LEN // 2
    stream = stream_bound(config, 1, context_len, BF16, CEILINGS)
    assert stream * 1e3 == pytest.approx(row.stream_bound, abs=0.01)


def test_the_best_peer_is_the_fastest() -> None:
    row = ROWS["Qwen3-8B"]
    assert row.best_offline() == ("vLLM 0.24.0", 9390)
    assert row.best_stream() == ("SGLang 0.5.14", 5.15)
    assert ROWS["Qwen3-30B-A3B"].best_offline() == ("SGLang 0.5.14", 5990)


@pytest.mark.parametrize(
    ("model", "dtype", "gpus", "is_found"),
    [
        ("Qwen3-8B", "bfloat16", ["NVIDIA H200"], True),
        ("/models/Qwen3-8B", "bfloat16", ["NVIDIA H200"], True),
        ("Qwen3-8B", "float16", ["NVIDIA H200"], False),
        ("Qwen3-8B", "bfloat16", ["NVIDIA H100 80GB HBM3"], False),
        ("Qwen3-8B", "bfloat16", [], False),
        ("tiny-dense", "bfloat16", ["NVIDIA H200"], False),
    ],
)
def test_peers_are_named_only_for_their_own_case(
    model: str, dtype: str, gpus: list[str], is_found: bool
) -> None:
    assert (peers.row_for(model, dtype, gpus) is not None) == is_found
