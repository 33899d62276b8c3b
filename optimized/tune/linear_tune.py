"""Measures the kernels of linear layers on this GPU, for `diptych tune`: each layer alone, over the weights
of enough layers that they come from memory and not from the L2 cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from tqdm.auto import tqdm

from diptych.optimized.kernels.compile_ahead import compile_ahead
from diptych.optimized.kernels.gpu_table import GpuTable
from diptych.optimized.kernels.linear import linear_choice, small_batch_linear
from diptych.optimized.tune.moe_tune import graph_time
from diptych.shared.config import ModelConfig

TOKENS = (1, 2, 4, 8, 16, 32, 64)
L2_BYTES = 64 * 2**20
"""More than the L2 cache of any GPU except for a B200's 126 MB, which is less than three times this."""


class LinearShape(NamedTuple):
    out_features: int  # of the weight: gate's and up's rows if gated
    in_features: int
    gated: bool = False
    added: bool = False  # to the residual


def shapes_of(config: ModelConfig) -> list[LinearShape]:
    """The weights of a decoder layer and the head in the optimized model."""
    shapes = [*decoder_shapes_of(config), LinearShape(config.vocab_size, config.hidden_size)]
    if config.moe is not None:
        shapes.append(LinearShape(config.moe.num_experts, config.hidden_size))
    return shapes


def decoder_shapes_of(config: ModelConfig) -> list[LinearShape]:
    """The shapes without the head and the router, which are never quantized."""
    hidden, inter, dim = config.hidden_size, config.intermediate_size, config.head_dim
    shapes = [
        LinearShape((config.num_qo_heads + 2 * config.num_kv_heads) * dim, hidden),
        LinearShape(hidden, config.num_qo_heads * dim, added=True),
    ]
    if len(config.moe_layers) < config.num_hidden_layers or (config.moe and config.moe.beside_mlp):
        shapes += [LinearShape(2 * inter, hidden, gated=True), LinearShape(hidden, inter, added=True)]
    return shapes


def tune(table: GpuTable, shape: LinearShape, all_tokens: Sequence[int]) -> Iterator[GpuTable]:
    """Yields the table after each measurement, with the fastest kernel for one more number of tokens."""
    name = linear_choice.shape_name(shape[:2], shape.gated)
    weights = _weights(shape)
    compile_all(weights[0], all_tokens, shape.gated)
    for num_tokens in tqdm(all_tokens, desc=name, unit="size", leave=False):
        times = {kernel: time_kernel(kernel, weights, num_tokens, shape.gated)
                 for kernel in _candidates(weights[0], num_tokens, shape.gated)}  # fmt: skip
        best = min(times, key=lambda kernel: times[kernel])
        listed = ", ".join(f"{kernel} {time:.1f}" for kernel, time in sorted(times.items()))
        tqdm.write(f"{name}, {num_tokens:2} tokens  {best:13}  us: {listed}")
        kernels = {**table.linear.get(name, {}), str(num_tokens): best}
        table = replace(table, linear={**table.linear, name: kernels})
        yield table


def compile_all(weight: torch.Tensor, all_tokens: Sequence[int], gated: bool) -> None:
    with compile_ahead():
        for num_tokens in all_tokens:
            for kernel in _candidates(weight, num_tokens, gated):
                _launch(kernel, _inputs(num_tokens, weight), weight, gated)


def time_kernel(kernel: str, weights: list[torch.Tensor], num_tokens: int, gated: bool) -> float:
    """Microseconds of one layer."""
    x = _inputs(num_tokens, weights[0])
    return graph_time(lambda i: _launch(kernel, x, weights[i], gated), num_layers=len(weights))


def _inputs(num_tokens: int, weight: torch.Tensor) -> torch.Tensor:
    return torch.randn(num_tokens, weight.shape[1], device="cuda").to(weight.dtype)


def _launch(kernel: str, x: torch.Tensor, weight: torch.Tensor, gated: bool) -> torch.Tensor:
    if gated:
        return small_batch_linear.linear_silu_with(kernel, x, weight)
    return small_batch_linear.linear_with(kernel, x, weight)


def _weights(shape: LinearShape) -> list[torch.Tensor]:
    num_bytes = 2 * shape.out_features * shape.in_features
    size = shape.out_features, shape.in_features
    count = max(2, -(-3 * L2_BYTES // num_bytes))
    return [torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(min(count, 64))]


def _candidates(weight: torch.Tensor, num_tokens: int, gated: bool) -> list[str]:
    x = torch.empty(num_tokens, weight.shape[1], dtype=weight.dtype, device=weight.device)
    return linear_choice.candidates(x, weight, gated)
