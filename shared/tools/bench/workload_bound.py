"""Computes the roofline bound of a whole workload: the least time that bandwidth and GEMM rate allow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from diptych.shared.config import ModelConfig
from diptych.shared.tools.bench.step_cost import Ceilings, expected_experts_hit, step_cost
from diptych.shared.tools.bench.workloads import Request


@dataclass(frozen=True)
class WorkloadBound:
    """The bound in seconds. Prefill: the GEMMs of all prompts at the GEMM rate. Decode: each step reads all
    weights (the expected number of experts under uniform routing) and the KV of all running requests once, at
    the bandwidth. All requests run concurrently; at lower concurrency weights are read more often."""

    prefill: float
    decode: float
    num_output_tokens: int

    @property
    def tokens_per_second(self) -> float:
        return self.num_output_tokens / (self.prefill + self.decode)


def workload_bound(
    config: ModelConfig,
    requests: Sequence[Request],
    dtype: torch.dtype,
    ceilings: Ceilings,
    kv_dtype: torch.dtype | None = None,
) -> WorkloadBound:
    """The bound for prompts without a common prefix. `kv_dtype`: of the KV pool, if it is not `dtype`."""
    prompt_lens = [len(request.prompt) for request in requests]
    prefill = step_cost(config, prompt_lens, prompt_lens, dtype).flops
    weights = _WeightBytes(config, dtype)
    kv_bytes_of = _KvBytes(config, kv_dtype or dtype, max(len(r.prompt) + r.output_len for r in requests))
    ends = Counter(request.output_len for request in requests)
    num_running, num_bytes = len(requests), 0.0
    live = sorted(requests, key=lambda request: request.output_len)
    # The prefill step gives the first token; decode step n, counted from 1, gives token n + 1.
    for n in range(1, max(ends)):
        num_running -= ends[n]
        running = live[len(live) - num_running :]
        num_bytes += weights(num_running) + kv_bytes_of(len(request.prompt) + n for request in running)
    return WorkloadBound(
        prefill / ceilings.matrix_rate,
        num_bytes / ceilings.bandwidth,
        sum(request.output_len for request in requests),
    )


def stream_bound(
    config: ModelConfig,
    batch_size: int,
    context_len: int,
    dtype: torch.dtype,
    ceilings: Ceilings,
    kv_dtype: torch.dtype | None = None,
) -> float:
    """Seconds of a decode step of `batch_size` requests: its bytes at the bandwidth."""
    lens = [context_len] * batch_size
    cost = step_cost(config, lens, [1] * batch_size, dtype, kv_dtype=kv_dtype)
    return cost.num_bytes / ceilings.bandwidth


class _WeightBytes:
    """Bytes of weights by batch size. They are linear in the number of experts hit, so two costs determine
    them."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        def at(num_experts: float) -> float:
            return step_cost(config, [1], [1], dtype, num_experts_hit=num_experts).weight_bytes

        self.config = config
        self.without_experts = at(0)
        self.of_expert = at(1) - self.without_experts

    def __call__(self, batch_size: int) -> float:
        hit = expected_experts_hit(self.config, batch_size) if self.config.moe is not None else 0.0
        return self.without_experts + hit * self.of_expert


class _KvBytes:
    """Bytes of KV in one step, over all layers, for requests of these lengths after the step."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, max_len: int) -> None:
        layers = Counter(
            (config.sliding_window(layer_id), config.of_layer(layer_id).kv_size * dtype.itemsize)
            for layer_id in range(config.num_hidden_layers)
        )
        self.of_len = [
            sum(n * size * (seq_len if w < 0 else min(seq_len, w + 1)) for (w, size), n in layers.items())
            for seq_len in range(max_len + 1)
        ]

    def __call__(self, seq_lens: Iterable[int]) -> float:
        return sum(map(self.of_len.__getitem__, seq_lens))
