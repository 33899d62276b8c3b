"""The MoE runners of `--moe-runner-backend`, what each needs, and two tables that say which can be used.

`PERMUTED` has the runners that change the order of a dispatch format's rows and back. `FUSED` has those that
do everything in one function, for one way of bringing tokens to experts. A runner in neither is refused when
an engine starts.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any, NamedTuple

import torch
from torch import nn

from diptych.optimized.kernels.moe.moe_mxfp4_gemv import MAX_TOKENS
from diptych.optimized.moe import FusedExperts
from diptych.optimized.moe_runners.base import MoeRunner
from diptych.optimized.moe_runners.layouts import FP8_BLOCKS, MXFP4
from diptych.optimized.quantized.quantized_moe import QuantizedExperts
from diptych.shared.config import EngineConfig
from diptych.shared.types.quant_scheme import QuantScheme

OWN = ("auto", "triton")
"""Names that work everywhere. triton: the kernels of `diptych.optimized.moe` and
`diptych.optimized.quantized.quantized_moe`."""


class Choice(NamedTuple):
    """What auto takes in place of the own kernels, if it can be used."""

    scheme: QuantScheme
    name: str
    min_tokens: int  # in a call
    min_requests: int  # that the engine runs at once


AUTO = (
    Choice(FP8_BLOCKS, "cutlass", 512, 1),
    Choice(FP8_BLOCKS, "deep_gemm", 1024, 1),
    Choice(MXFP4, "triton_kernel", 1, MAX_TOKENS + 1),
)
"""In order of preference, from measurements on an H200 with 1, 16, 64, 512 and 4,096 tokens, which
docs/components/moe.md has. deep_gemm was about as fast as the own kernels with 512 tokens, and 2.4 times as
fast with 4,096. MXFP4 weights have one layout; the own kernels have GEMVs for up to `MAX_TOKENS` tokens."""
AUTO_MAJOR = 9
"""The compute capability of that GPU."""


class Needs(NamedTuple):
    weights: str
    majors: tuple[int, ...]  # of the compute capability
    library: str
    install: str
    note: str = ""  # printed when an engine starts with it


COMPILES = "FlashInfer compiles its MoE module once, up to an hour; flashinfer-jit-cache has it compiled"
NEEDS = {
    "triton_kernel": Needs("16 bits, MXFP4", (9, 10), "triton_kernels", "sglang-kernel==0.4.4"),
    "deep_gemm": Needs("FP8 blocks", (9, 10), "deep_gemm", "sgl-deep-gemm==0.1.3"),
    "cutlass": Needs("FP8 blocks", (9, 10), "sgl_kernel", "sglang-kernel==0.4.4"),
    "flashinfer_cutlass": Needs("16 bits, FP8 blocks", (9, 10), "flashinfer", "flashinfer-python", COMPILES),
    "flashinfer_mxfp4": Needs("MXFP4", (9,), "flashinfer", "flashinfer-python", COMPILES),
    "flashinfer_trtllm": Needs("FP8 blocks, FP4", (10,), "flashinfer", "flashinfer-python"),
    "flashinfer_cutedsl": Needs("FP4", (10,), "flashinfer", "flashinfer-python"),
}

DISPATCH_FORMATS = {"none": "whole"} | dict.fromkeys(("reference", "optimized", "all_to_all"), "standard")
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


def use_runner(model: nn.Module, config: EngineConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Let the runner of `config` compute the experts of a model, whose weights need not be there. Raises
    `ValueError` for one that cannot be used, with what it needs."""
    name = config.moe_runner_backend
    layers = expert_layers(model)
    if not layers and name != "auto":
        raise ValueError(f"moe_runner_backend={name}: the model has no experts of the optimized panel")
    if name == "triton":
        return
    dispatch = "none"
    if config.ep > 1 or config.dp_attention:
        dispatch = config.use.get("expert_dispatch", "optimized")
    if name == "auto":
        if dispatch == "none" and not config.deterministic:
            for experts in layers:
                experts.runner = choose(experts, config, device, dtype)
        return
    if config.deterministic:
        raise ValueError(f"deterministic=True works with moe_runner_backend {' or '.join(OWN)}, not {name}")
    acts = {getattr(experts, "hidden_act", "silu") for experts in layers} - {"silu"}
    if acts:
        raise ValueError(
            f"moe_runner_backend={name} computes silu(gate) * up, and the model's experts have "
            f"{acts.pop()}; choose triton"
        )
    runner_class = find_runner(name, dispatch, device)
    if NEEDS[name].note:
        print(f"moe_runner_backend={name}: {NEEDS[name].note}", file=sys.stderr, flush=True)
    for experts in layers:
        experts.runner = runner_class(experts)
        experts.runner.check_dtype(dtype)


def choose(
    experts: FusedExperts | QuantizedExperts, config: EngineConfig, device: torch.device, dtype: torch.dtype
) -> MoeRunner | None:
    """What `AUTO` has for these experts; None: their own kernels."""
    if compute_capability_major(device) != AUTO_MAJOR or not isinstance(experts, QuantizedExperts):
        return None
    for scheme, name, min_tokens, min_requests in AUTO:
        if scheme != experts.scheme or config.max_running_requests < min_requests:
            continue
        try:
            runner: MoeRunner = find_runner(name, "none", device)(experts)
            runner.check_dtype(dtype)
        except ValueError:  # a library that is missing, or sizes that it cannot compute
            continue
        runner.min_tokens = min_tokens
        return runner
    return None


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
    return getattr(importlib.import_module(f"diptych.optimized.moe_runners.{module}"), class_name)


def compute_capability_major(device: torch.device) -> int:
    """The major compute capability; 0: no CUDA GPU."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
