"""The MoE runners of `--moe-runner-backend`, what each needs, and two tables that say which can be used.

`PERMUTED` has the runners that change the order of a dispatch format's rows and back. `FUSED` has those that
do everything in one function, for one way of bringing tokens to experts. A runner in neither is refused when
an engine starts.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, NamedTuple

import torch
from torch import nn

from optimized.moe import FusedExperts
from optimized.quantized_moe import QuantizedExperts
from shared.config import EngineConfig

OWN = ("auto", "triton")
"""The kernels of `optimized.moe` and `optimized.quantized_moe`. auto chooses them, because no other runner
was measured as faster."""


class Needs(NamedTuple):
    weights: str
    majors: tuple[int, ...]  # of the compute capability
    library: str
    install: str


NEEDS = {
    "triton_kernel": Needs("16 bits, MXFP4", (9, 10), "triton_kernels", "sglang-kernel==0.4.4"),
    "deep_gemm": Needs("FP8 blocks", (9, 10), "deep_gemm", "sgl-deep-gemm==0.1.3"),
    "cutlass": Needs("FP8 blocks", (9, 10), "sgl_kernel", "sglang-kernel==0.4.4"),
    "flashinfer_cutlass": Needs("16 bits, FP8 blocks", (9, 10), "flashinfer", "flashinfer-python"),
    "flashinfer_mxfp4": Needs("MXFP4", (9,), "flashinfer", "flashinfer-python"),
    "flashinfer_trtllm": Needs("FP8 blocks, FP4", (10,), "flashinfer", "flashinfer-python"),
    "flashinfer_cutedsl": Needs("FP4", (10,), "flashinfer", "flashinfer-python"),
}

DISPATCH_FORMATS = {"none": "whole", "reference": "standard", "all_to_all": "standard"}
"""Implementation of expert_dispatch -> dispatch format: x and TopKOutput. whole: all experts are here.
standard: a choice of -1 is of an expert of another rank, and experts move between ranks."""

PERMUTED = {
    ("whole", "triton_kernel"): ("triton_kernel", "TritonKernelRunner"),
    ("whole", "deep_gemm"): ("deep_gemm", "DeepGemmRunner"),
    ("standard", "deep_gemm"): ("deep_gemm", "DeepGemmRunner"),
    ("whole", "cutlass"): ("cutlass", "CutlassRunner"),
    ("standard", "cutlass"): ("cutlass", "CutlassRunner"),
}
"""(dispatch format, runner) -> module and class of a `PermutedRunner`. One that changes the layout of
parameters is not in the rows of standard."""

FUSED = {
    ("none", "flashinfer_cutlass"): ("flashinfer_cutlass", "FlashInferCutlassRunner"),
    ("none", "flashinfer_mxfp4"): ("flashinfer_mxfp4", "FlashInferMxfp4Runner"),
}
"""(expert dispatch, runner) -> module and class of a `MoeRunner`"""


def use_runner(model: nn.Module, config: EngineConfig, device: torch.device) -> None:
    """Let the runner of `config` compute the experts of a model, whose weights need not be there. Raises
    `ValueError` for one that cannot be used, with what it needs."""
    name = config.moe_runner_backend
    layers = expert_layers(model)
    if not layers:
        raise ValueError(f"moe_runner_backend={name}: the model has no experts of the optimized panel")
    if name in OWN:
        return
    if config.deterministic:
        raise ValueError(f"deterministic=True works with moe_runner_backend {' or '.join(OWN)}, not {name}")
    dispatch = "none"
    if config.ep > 1 or config.dp_attention:
        dispatch = config.use.get("expert_dispatch", "reference")
    runner_class = find_runner(name, dispatch, device)
    for experts in layers:
        experts.runner = runner_class(experts)


def prepare(model: nn.Module) -> None:
    """Change the loaded weights of a model to the layout of its runner."""
    for experts in expert_layers(model):
        if experts.runner is not None:
            experts.runner.prepare()


def expert_layers(model: nn.Module) -> list[FusedExperts | QuantizedExperts]:
    return [module for module in model.modules() if isinstance(module, (FusedExperts, QuantizedExperts))]


def find_runner(name: str, dispatch: str, device: torch.device) -> Any:
    """The class of a runner. Its library is imported when it runs."""
    needs = NEEDS[name]
    major = compute_capability_major(device)
    if major not in needs.majors:
        wanted = " or ".join(f"{number}.x" for number in needs.majors)
        found = "no CUDA GPU" if major == 0 else f"{major}.x"
        raise ValueError(
            f"moe_runner_backend={name} needs a GPU of compute capability {wanted}; this is {found}"
        )
    if importlib.util.find_spec(needs.library) is None:
        raise ValueError(f"moe_runner_backend={name} needs {needs.library}: pip install {needs.install}")
    entry = FUSED.get((dispatch, name)) or PERMUTED.get((DISPATCH_FORMATS.get(dispatch, dispatch), name))
    if entry is None:
        others = sorted({of for *_, of in (*FUSED, *PERMUTED) if of in NEEDS})
        raise ValueError(
            f"moe_runner_backend={name} has no adapter for expert_dispatch {dispatch}; supported: "
            f"{', '.join((*OWN, *others))}"
        )
    module, class_name = entry
    return getattr(importlib.import_module(f"optimized.moe_runners.{module}"), class_name)


def compute_capability_major(device: torch.device) -> int:
    """The major compute capability; 0: no CUDA GPU."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
