"""Component name + choice -> implementation. Nothing is imported until it is chosen.

A choice is a name of the table below, a user-provided package.module:Class or file.py:Class, or, for
attention, two names of the table joined by a plus sign: the first for prefill, the second for decode.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

PANELS = ("reference", "optimized")

IMPLEMENTATIONS: dict[str, dict[str, str]] = {
    "scheduler": {
        "reference": "reference.scheduler:Scheduler",
        "optimized": "optimized.scheduler:Scheduler",
    },
    "schedule_policy": {
        "reference": "reference.schedule_policy:SchedulePolicy",
        "optimized": "optimized.schedule_policy:SchedulePolicy",
    },
    "prefill_adder": {
        "reference": "reference.prefill_adder:PrefillAdder",
        "optimized": "optimized.prefill_adder:PrefillAdder",
    },
    "radix_cache": {
        "reference": "reference.radix_cache:RadixCache",
        "optimized": "optimized.radix_cache:RadixCache",
    },
    "chunk_cache": {"reference": "reference.chunk_cache:ChunkCache"},
    "host_pool": {
        "reference": "reference.host_pool:HostPool",
        "optimized": "optimized.host_pool:HostPool",
    },
    "memory_pool": {"reference": "reference.memory_pool", "optimized": "optimized.memory_pool"},
    "mla_memory_pool": {
        "reference": "reference.mla_memory_pool:MLATokenToKVPool",
        "optimized": "optimized.mla_memory_pool:MLATokenToKVPool",
    },
    "attention": {
        "reference": "reference.attention:TorchAttention",
        "optimized": "optimized.attention.default:DefaultAttention",
        "triton": "optimized.attention.triton:TritonAttention",
        "flashinfer": "optimized.attention.flashinfer:FlashInferAttention",
        "fa3": "optimized.attention.fa3:FA3Attention",
        "flex_attention": "optimized.attention.flex:FlexAttention",
        "deterministic": "optimized.attention.deterministic:DeterministicAttention",
    },
    "mla_attention": {
        "reference": "reference.mla_attention:ExpandedMLA",
        "optimized": "optimized.attention.mla_triton:TritonMLA",
        "absorbed": "reference.mla_attention:AbsorbedMLA",
        "triton": "optimized.attention.mla_triton:TritonMLA",
        "flashinfer": "optimized.attention.mla_flashinfer:FlashInferMLA",
    },
    "layers": {"reference": "reference.layers", "optimized": "optimized.layers"},
    "quantization": {"reference": "reference.quantization", "optimized": "optimized.quantization"},
    "quantized_experts": {
        "reference": "reference.quantized_moe:QuantizedExperts",
        "optimized": "optimized.quantized_moe:QuantizedExperts",
    },
    "lora": {"reference": "reference.lora:LoraPool", "optimized": "optimized.lora:LoraPool"},
    "moe": {"reference": "reference.moe:MoE", "optimized": "optimized.moe:MoE"},
    "models": {"reference": "reference.models", "optimized": "optimized.models"},
    "draft_models": {
        "reference": "reference.speculative.draft_models",
        "optimized": "optimized.speculative.draft_models",
    },
    "model_runner": {
        "reference": "reference.model_runner:ModelRunner",
        "optimized": "optimized.model_runner:ModelRunner",
    },
    "sampler": {"reference": "reference.sampler:Sampler", "optimized": "optimized.sampler:Sampler"},
    "drafter": {"reference": "reference.speculative", "optimized": "optimized.speculative"},
    "detokenizer": {"reference": "shared.text.detokenizer:IncrementalDetokenizer"},
    "draft_tree": {
        "reference": "reference.speculative.draft_tree:DraftTreeOps",
        "optimized": "optimized.speculative.draft_tree:DraftTreeOps",
    },
    "expert_balancer": {"reference": "reference.expert_balancer:ExpertBalancer"},
    "transport": {
        "reference": "reference.transport:Transport",
        "shared_memory": "reference.transport:SharedMemoryTransport",
    },
    "expert_dispatch": {
        "reference": "reference.expert_dispatch:AllGather",
        "optimized": "optimized.expert_dispatch:AllGather",
        "all_to_all": "reference.expert_all_to_all:AllToAll",
    },
    "collectives": {
        "reference": "reference.collectives:Collectives",
        "optimized": "optimized.collectives:Collectives",
        "nccl": "optimized.collectives:NcclCollectives",
    },
}
"""component -> choice -> "module" or "module:attribute". A choice is a panel's name or a backend's."""

DETERMINISTIC: dict[str, dict[str, str]] = {
    "reference": {
        "model_runner": "reference.deterministic:DeterministicModelRunner",
        "sampler": "reference.deterministic:DeterministicSampler",
    },
    "optimized": {
        "attention": "optimized.attention.deterministic:DeterministicAttention",
        "model_runner": "optimized.deterministic:DeterministicModelRunner",
        "sampler": "optimized.deterministic:DeterministicSampler",
    },
}
"""panel -> component -> what takes its place with the flag `deterministic`"""

NEEDS_CUDA: dict[str, tuple[str, ...]] = {
    "attention": ("flashinfer", "fa3"),
    "mla_attention": ("flashinfer",),
}
"""component -> choices that run on CUDA GPUs only."""

NEEDS_TRITON: dict[str, tuple[str, ...]] = {
    "attention": ("optimized", "triton", "deterministic"),
    "mla_attention": ("optimized", "triton"),
    **dict.fromkeys(
        (
            "layers",
            "lora",
            "quantization",
            "quantized_experts",
            "moe",
            "models",
            "draft_models",
            "expert_dispatch",
            "sampler",
            "draft_tree",
        ),
        ("optimized",),
    ),
}
"""component -> choices that Triton's kernels compute: on GPUs, or in its interpreter, for tests."""

NO_TRITON = "needs a CUDA GPU (for tests on a CPU, Triton's interpreter: TRITON_INTERPRET=1)"

UNAVAILABLE: dict[str, dict[str, str]] = {
    "mla_attention": {
        "flashmla": "needs a Hopper GPU, pages of 64 tokens and the kernels of FlashMLA",
        "cutlass_mla": "needs an sm_100 GPU, pages of 128 tokens and CUTLASS's kernel for latent attention",
        "trtllm_mla": "needs an sm_100 GPU and TensorRT-LLM's kernels for latent attention",
        "nsa": "needs a model with sparse attention, as DeepSeek-V3.2, and the kernels of its indexer",
    }
}
"""component -> choices of other engines -> what they need. They are refused: Diptych does not call them."""

PAIRS: dict[str, str] = {"attention": "optimized.attention.hybrid:hybrid_of"}
"""component -> what makes one implementation of two choices"""


def choices(component: str) -> list[str]:
    """Names that may stand behind `component=`; an unknown component raises `ValueError`."""
    if component not in IMPLEMENTATIONS:
        raise ValueError(f"unknown component {component!r}; the components are {', '.join(IMPLEMENTATIONS)}")
    return list(IMPLEMENTATIONS[component])


def parse_use(text: str) -> dict[str, str]:
    """ "attention=triton,sampler=reference" -> a mapping. Raises `ValueError` on anything else."""
    chosen: dict[str, str] = {}
    for item in filter(None, (piece.strip() for piece in text.split(","))):
        component, equals, choice = item.partition("=")
        if not equals or not choice:
            raise ValueError(f"--use takes component=implementation, got {item!r}")
        choices(component)
        chosen[component] = choice
    return chosen


def needs_cuda(component: str, choice: str) -> bool:
    """Whether an implementation of ours runs on a CUDA GPU only."""
    return _is_in(NEEDS_CUDA, component, choice)


def check_device(selection: Mapping[str, str], device: str) -> None:
    """Raise `ValueError` for a choice that cannot run on the device."""
    for component, choice in selection.items():
        if needs_cuda(component, choice) and not device.startswith("cuda"):
            raise ValueError(f"{component}={choice} needs a CUDA GPU, and the device is {device}")
        if _is_in(NEEDS_TRITON, component, choice) and not runs_triton(device):
            raise ValueError(f"{component}={choice} {NO_TRITON}, and the device is {device}")


def runs_triton(device: str) -> bool:
    return device.startswith("cuda") or os.environ.get("TRITON_INTERPRET") == "1"


def select(panel: str, use: Mapping[str, str]) -> dict[str, str]:
    """The choice for every component: what `use` says, else the panel's, else, where the optimized panel
    changes nothing, the reference's."""
    if panel == "optimized" and not has_optimized():
        raise ValueError("the optimized panel has no component yet; use panel=reference")
    selection: dict[str, str] = {}
    for component, available in IMPLEMENTATIONS.items():
        selection[component] = panel if panel in available else "reference"
    for component, choice in use.items():
        check_choice(component, choice)
        selection[component] = choice
    return selection


def check_choice(component: str, choice: str) -> None:
    """Raise `ValueError` listing the right ones for a name that stands for nothing."""
    if needed := UNAVAILABLE.get(component, {}).get(choice):
        usable = ", ".join(choices(component))
        raise ValueError(f"{component}={choice} {needed}; Diptych does not call them. Choose one of {usable}")
    if choice not in choices(component) and not _pair(component, choice) and not is_target(choice):
        pairs = "two of them as prefill+decode, " if component in PAIRS else ""
        raise ValueError(
            f"{component}={choice}: no such implementation; choose one of {', '.join(choices(component))}, "
            f"{pairs}or name one of yours as package.module:Class or file.py:Class"
        )


def has_optimized() -> bool:
    return any("optimized" in available for available in IMPLEMENTATIONS.values())


def load(component: str, choice: str) -> Any:
    """The class (or module of classes) behind a choice; imports it now. An exception of
    user-provided code becomes one `ValueError`; an exception of the engine's own code is not changed."""
    pair = _pair(component, choice)
    if pair is not None:
        return _load_target(component, choice, PAIRS[component])(*pair)
    return _load_target(component, choice, IMPLEMENTATIONS.get(component, {}).get(choice, choice))


def load_deterministic(panel: str) -> dict[str, Any]:
    """component -> class, of those that the flag `deterministic` replaces."""
    return {name: _load_target(name, panel, target) for name, target in DETERMINISTIC[panel].items()}


def _load_target(component: str, choice: str, target: str) -> Any:
    module_name, _, attribute = target.partition(":")
    is_file = module_name.endswith(".py")
    module = _load_file(choice, module_name) if is_file else _import(component, choice, module_name)
    if not attribute:
        return module
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ValueError(f"{component}={choice}: {module_name} has no {attribute!r}") from None


def _is_in(table: Mapping[str, tuple[str, ...]], component: str, choice: str) -> bool:
    """The choice, or one of the two that it joins."""
    names = _pair(component, choice) or (choice,)
    return any(name in table.get(component, ()) for name in names)


def _pair(component: str, choice: str) -> tuple[str, str] | None:
    """The two names of "first+second"; None for anything else."""
    first, plus, second = choice.partition("+")
    known = IMPLEMENTATIONS.get(component, {})
    if component in PAIRS and plus and first in known and second in known:
        return first, second
    return None


def is_target(choice: str) -> bool:
    """Whether a choice names user-provided code: package.module:Class or file.py:Class."""
    return ":" in choice or "." in choice


def _import(component: str, choice: str, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if missing in ("triton", "flashinfer"):
            raise ValueError(
                f"{component} from {module_name} needs {missing}: pip install 'diptych[gpu]'"
            ) from None
        raise ValueError(f"{component}: cannot import {module_name}: no module named {missing!r}") from None
    except (Exception, SystemExit) as error:
        if not is_target(choice):
            raise
        raise _cannot_load(choice, error) from error


def _load_file(choice: str, path: str) -> ModuleType:
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"no such file: {file}")
    name = f"diptych_user_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up by name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise _cannot_load(choice, error) from error
    return module


def _cannot_load(choice: str, error: BaseException) -> ValueError:
    return ValueError(f"cannot load {choice}: {type(error).__name__}: {error}")
