"""A x of an adapter is computed beside the layer's own GEMM, and is complete before B times it is added."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diptych.optimized.kernels.moe.moe_align import align
from diptych.optimized.layers import Linear
from diptych.optimized.modes import lora
from diptych.shared.tools.conformance.clauses.device import building, check_device
from diptych.shared.tools.conformance.clauses.inputs import Inputs

NUM_SLOTS, RANK, NUM_TOKENS = 3, 16, 40


def adapted_layers(num_layers: int, size: int, dtype: torch.dtype) -> list[lora._LoraLinear]:
    """Linear layers with random adapters; rows have them in turns, or none."""
    inputs, device = Inputs(0), check_device()
    slots = (torch.arange(NUM_TOKENS, dtype=torch.int32, device=device) % (NUM_SLOTS + 1) - 1)[:, None]
    pool = lora.LoraPool.__new__(lora.LoraPool)
    pool.num_slots, pool.padded_rank = NUM_SLOTS, RANK
    pool.like = torch.empty(0, dtype=dtype, device=device)
    pool.blocks = align(slots, NUM_SLOTS, lora.BLOCK_M)
    pool.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    layers = []
    for _ in range(num_layers):
        with building(dtype):
            base = Linear(size, size)
        base.weight.data.copy_(inputs.normal(size, size) * size**-0.5)
        layer = lora._LoraLinear(base, pool, {"layer": (size, size)})
        layer.a.copy_(inputs.normal(*layer.a.shape) * size**-0.5)
        layer.b.copy_(inputs.normal(*layer.b.shape) * RANK**-0.5)
        layers.append(layer)
        layer.scales.fill_(1.0)
    return layers


def through(layers: list[lora._LoraLinear], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = torch.tanh(layer(x))
    return x


class Recorded:
    """A stream that records its waits."""

    device = None

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def wait_stream(self, other: Recorded) -> None:
        self.calls.append(f"{self.name} waits for {other.name}")


def test_the_order_of_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    main, second = Recorded("main", calls), Recorded("second", calls)
    current = [main]

    @contextmanager
    def on(stream: Recorded) -> Any:
        current.append(stream)
        yield
        current.pop()

    def recording(function: Any) -> Any:
        def call(*args: Any) -> Any:
            calls.append(f"{function.__name__} on {current[-1].name}")
            return function(*args)

        return call

    (layer,) = adapted_layers(1, 48, torch.float32)
    expected = through([layer], Inputs(1).normal(NUM_TOKENS, 48))
    layer.pool.stream = second  # type: ignore[assignment]
    layer.base.forward = recording(layer.base.forward)
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(current_stream=lambda _: current[-1], stream=on))
    for name in ("shrink", "expand_add"):
        monkeypatch.setattr(lora, name, recording(getattr(lora, name)))
    found = layer(Inputs(1).normal(NUM_TOKENS, 48))
    monkeypatch.undo()
    assert torch.equal(torch.tanh(found), expected)
    assert calls == [
        "second waits for main",
        "shrink on second",
        "forward on main",
        "main waits for second",
        "expand_add on main",
    ]


@pytest.mark.gpu
def test_a_graph_has_the_bits_of_one_stream() -> None:
    """Launched one by one too, for several inputs."""
    size, inputs = 4096, Inputs(1)
    with torch.inference_mode():
        layers = adapted_layers(6, size, torch.bfloat16)
        pool = layers[0].pool
        x = inputs.normal(NUM_TOKENS, size, dtype=torch.bfloat16)
        through(layers, x)  # compiles the kernels
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = through(layers, x)
        stream = pool.stream
        for _ in range(10):
            x.copy_(inputs.normal(NUM_TOKENS, size))
            pool.stream = None
            expected = through(layers, x)
            pool.stream = stream
            graph.replay()
            assert torch.equal(y, expected)
            assert torch.equal(through(layers, x), expected)
