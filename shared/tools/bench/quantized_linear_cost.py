"""Times quantized linear layers, each alone, against the unquantized one. Weights are random."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from diptych.shared import registry
from diptych.shared.config import ModelConfig
from diptych.shared.config.quant_config import ONLINE
from diptych.shared.loading.load_model import building
from diptych.shared.loading.quantize import quantize_weight
from diptych.shared.tools.bench.workloads import check_least
from diptych.shared.types.quant_scheme import QuantScheme

PLAIN = "16 bits"
L2_BYTES = 64 * 2**20
"""More than the L2 cache of any GPU except for a B200's 126 MB, which is less than three times this."""


@dataclass(frozen=True)
class LinearCase:
    layer: str
    out_features: int
    in_features: int
    num_tokens: int

    def __post_init__(self) -> None:
        check_least(self, out_features=1, in_features=1, num_tokens=1)

    def __str__(self) -> str:
        return f"{self.layer}, {self.num_tokens} tokens"


@dataclass(frozen=True)
class LinearResult:
    case: LinearCase
    microseconds: dict[str, float]  # by scheme; PLAIN: the unquantized layer

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def cases_of(config: ModelConfig, all_tokens: Sequence[int]) -> list[LinearCase]:
    """The merged linear layers of a decoder layer with an MLP."""
    hidden, inter, dim = config.hidden_size, config.intermediate_size, config.head_dim
    shapes = {
        "qkv": ((config.num_qo_heads + 2 * config.num_kv_heads) * dim, hidden),
        "o": (hidden, config.num_qo_heads * dim),
        "gate_up": (2 * inter, hidden),
        "down": (hidden, inter),
    }
    return [
        LinearCase(name, *shape, num_tokens) for name, shape in shapes.items() for num_tokens in all_tokens
    ]


class LinearTimes:
    """Measures cases. `panel` computes the layers."""

    def __init__(
        self,
        panel: str,
        schemes: list[str],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        unknown = sorted(set(schemes) - set(ONLINE))
        if unknown:
            raise ValueError(f"no scheme {', '.join(unknown)}; there are {', '.join(ONLINE)}")
        registry.check_device({"layers": panel, "quantization": panel}, str(device))
        self.layers = registry.load("layers", panel)
        self.quantization = registry.load("quantization", panel)
        self.schemes, self.device, self.dtype = schemes, device, dtype

    @torch.inference_mode()
    def measure(self, case: LinearCase) -> LinearResult:
        x = torch.randn(case.num_tokens, case.in_features, device=self.device).to(self.dtype)
        times = {}
        for name in (PLAIN, *self.schemes):
            scheme = ONLINE.get(name)
            if scheme is not None:
                scheme.check(str(case), case.in_features)
            copies = self._copies(case, scheme)

            def run(i: int, copies: list[torch.nn.Module] = copies) -> torch.Tensor:
                y: torch.Tensor = copies[i](x)
                return y

            times[name] = microseconds(run, len(copies), self.device)
        return LinearResult(case, times)

    def _copies(self, case: LinearCase, scheme: QuantScheme | None) -> list[torch.nn.Module]:
        """Enough layers of the same random weight that their weights come from memory and not from a
        cache."""
        shape = (case.out_features, case.in_features)
        weight = (torch.randn(shape, device=self.device) * case.in_features**-0.5).to(self.dtype)
        tensors = {"weight": weight} if scheme is None else quantize_weight(weight, scheme)
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        count = 1 if self.device.type == "cpu" else max(2, min(-(-3 * L2_BYTES // num_bytes), 64))
        layers = []
        for _ in range(count):
            with building(self.dtype, self.device):
                copy = self.layers.Linear(case.in_features, case.out_features)
                copy = copy if scheme is None else self.quantization.quantized(copy, scheme)
            for name, tensor in tensors.items():
                getattr(copy, name).data.copy_(tensor)
            layers.append(copy)
        return layers


def microseconds(run: Callable[[int], object], num_layers: int, device: torch.device) -> float:
    """Microseconds of run(layer): the median over replays of a CUDA graph that cycles through the layers; on
    a CPU over calls."""
    run(0)
    if device.type != "cuda":
        times = []
        for _ in range(3):
            start = time.perf_counter()
            run(0)
            times.append(time.perf_counter() - start)
        return statistics.median(times) * 1e6
    torch.cuda.synchronize()
    graph, num_calls = torch.cuda.CUDAGraph(), max(2 * num_layers, 8)
    with torch.cuda.graph(graph):
        for i in range(num_calls):
            run(i % num_layers)
    times = []
    for _ in range(6):
        start_event, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start_event.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start_event.elapsed_time(end) / num_calls * 1e3)
    return statistics.median(times[1:])
