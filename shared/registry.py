"""Component name + choice -> implementation. Nothing is imported until it is chosen.

A choice is a name of the table below, a user-provided package.module:Class or file.py:Class, a lab of the
course (lab07), or, for attention, two names of the table joined by a plus sign: the first for prefill, the
second for decode.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

PANELS = ("reference", "optimized")
PAIRED = "attention"  # the component of which two choices may be joined

IMPLEMENTATIONS: dict[str, dict[str, str]] = {
    "scheduler": {
        "reference": "diptych.reference.scheduler:Scheduler",
        "optimized": "diptych.optimized.scheduler:Scheduler",
    },
    "schedule_policy": {
        "reference": "diptych.reference.schedule_policy:SchedulePolicy",
        "optimized": "diptych.optimized.schedule_policy:SchedulePolicy",
    },
    "prefill_adder": {
        "reference": "diptych.reference.prefill_adder:PrefillAdder",
        "optimized": "diptych.optimized.prefill_adder:PrefillAdder",
    },
    "radix_cache": {
        "reference": "diptych.reference.radix_cache:RadixCache",
        "optimized": "diptych.optimized.radix_cache:RadixCache",
    },
    "kv_cache": {"reference": "diptych.reference.kv_cache:KVCache"},
    "chunk_cache": {"reference": "diptych.reference.chunk_cache:ChunkCache"},
    "host_pool": {
        "reference": "diptych.reference.tiers.host_pool:HostPool",
        "optimized": "diptych.optimized.tiers.host_pool:HostPool",
    },
    "disk_tier": {
        "reference": "diptych.reference.tiers.disk_tier:DiskTier",
        "optimized": "diptych.optimized.tiers.disk_tier:DiskTier",
    },
    "memory_pool": {
        "reference": "diptych.reference.memory_pool",
        "optimized": "diptych.optimized.memory_pool",
    },
    "mla_memory_pool": {
        "reference": "diptych.reference.mla.mla_memory_pool:MLATokenToKVPool",
        "optimized": "diptych.optimized.mla.mla_memory_pool:MLATokenToKVPool",
    },
    "attention": {
        "reference": "diptych.reference.attention:TorchAttention",
        "optimized": "diptych.optimized.attention.default:DefaultAttention",
        "triton": "diptych.optimized.attention.triton:TritonAttention",
        "flashinfer": "diptych.optimized.attention.flashinfer:FlashInferAttention",
        "fa3": "diptych.optimized.attention.fa3:FA3Attention",
        "flex_attention": "diptych.optimized.attention.flex:FlexAttention",
        "deterministic": "diptych.optimized.attention.fixed_split:DeterministicAttention",
    },
    "mla_attention": {
        "reference": "diptych.reference.mla.mla_attention:ExpandedMLA",
        "optimized": "diptych.optimized.mla.mla_triton:TritonMLA",
        "absorbed": "diptych.reference.mla.mla_attention:AbsorbedMLA",
        "triton": "diptych.optimized.mla.mla_triton:TritonMLA",
    },
    "linear_attention": {
        "reference": "diptych.reference.linear_attention:LinearAttention",
        "optimized": "diptych.optimized.linear_attention:LinearAttention",
        "deterministic": "diptych.optimized.modes.deterministic:DeterministicLinearAttention",
    },
    "layers": {"reference": "diptych.reference.layers", "optimized": "diptych.optimized.layers"},
    "quantization": {
        "reference": "diptych.reference.quantized.quantized_layers",
        "optimized": "diptych.optimized.quantized.quantized_layers",
    },
    "quantized_experts": {
        "reference": "diptych.reference.quantized.quantized_moe:QuantizedExperts",
        "optimized": "diptych.optimized.quantized.quantized_moe:QuantizedExperts",
    },
    "lora": {
        "reference": "diptych.reference.modes.lora:LoraPool",
        "optimized": "diptych.optimized.modes.lora:LoraPool",
    },
    "moe": {"reference": "diptych.reference.moe:MoE", "optimized": "diptych.optimized.moe:MoE"},
    "models": {"reference": "diptych.reference.models", "optimized": "diptych.optimized.models"},
    "draft_models": {
        "reference": "diptych.reference.speculative.draft_models",
        "optimized": "diptych.optimized.speculative.draft_models",
    },
    "vision": {"reference": "diptych.reference.modes.vision", "optimized": "diptych.optimized.modes.vision"},
    "model_runner": {
        "reference": "diptych.reference.model_runner:ModelRunner",
        "optimized": "diptych.optimized.model_runner:ModelRunner",
    },
    "sampler": {
        "reference": "diptych.reference.sampler:Sampler",
        "optimized": "diptych.optimized.sampler:Sampler",
    },
    "drafter": {"reference": "diptych.reference.speculative", "optimized": "diptych.optimized.speculative"},
    "detokenizer": {"reference": "diptych.reference.detokenizer:IncrementalDetokenizer"},
    "dialect": {"reference": "diptych.shared.dialects.hermes:Hermes"},
    "draft_tree": {
        "reference": "diptych.reference.speculative.draft_tree:DraftTreeOps",
        "optimized": "diptych.optimized.speculative.draft_tree:DraftTreeOps",
    },
    "expert_balancer": {"reference": "diptych.reference.parallel.expert_balancer:ExpertBalancer"},
    "transport": {
        "reference": "diptych.reference.parallel.transport:Transport",
        "shared_memory": "diptych.reference.parallel.shared_memory_transport:SharedMemoryTransport",
    },
    "expert_dispatch": {
        "reference": "diptych.reference.parallel.expert_dispatch:AllGather",
        "optimized": "diptych.optimized.parallel.expert_dispatch:AllGather",
        "all_to_all": "diptych.reference.parallel.expert_all_to_all:AllToAll",
    },
    "collectives": {
        "reference": "diptych.reference.parallel.collectives:Collectives",
        "optimized": "diptych.optimized.parallel.collectives:Collectives",
        "nccl": "diptych.optimized.parallel.collectives:NcclCollectives",
    },
}
"""component -> choice -> "module" or "module:attribute". A choice is a panel's name or a backend's."""

DETERMINISTIC: dict[str, dict[str, str]] = {
    "reference": {
        "model_runner": "diptych.reference.modes.deterministic:DeterministicModelRunner",
        "sampler": "diptych.reference.modes.deterministic:DeterministicSampler",
    },
    "optimized": {
        "attention": "diptych.optimized.attention.fixed_split:DeterministicAttention",
        "linear_attention": "diptych.optimized.modes.deterministic:DeterministicLinearAttention",
        "model_runner": "diptych.optimized.modes.deterministic:DeterministicModelRunner",
        "sampler": "diptych.optimized.modes.deterministic:DeterministicSampler",
    },
}
"""panel -> component -> what takes its place with the flag `deterministic`"""

NEEDS_CUDA: dict[str, tuple[str, ...]] = {
    "attention": ("flashinfer", "fa3"),
}
"""component -> choices that run on CUDA GPUs only."""

TRITON_ONLY = (
    "layers", "lora", "quantization", "quantized_experts", "moe", "models", "draft_models", "expert_dispatch",
    "sampler", "draft_tree", "vision",
)  # fmt: skip
NEEDS_TRITON: dict[str, tuple[str, ...]] = {
    "attention": ("optimized", "triton", "deterministic"),
    "mla_attention": ("optimized", "triton"),
    "linear_attention": ("optimized", "deterministic"),
    **dict.fromkeys(TRITON_ONLY, ("optimized",)),
}
"""component -> choices that Triton's kernels compute: on GPUs, or in its interpreter, for tests."""

NO_TRITON = "needs a CUDA GPU (for tests on a CPU, Triton's interpreter: TRITON_INTERPRET=1)"

UNAVAILABLE: dict[str, str] = {
    "mla_attention=flashinfer": "needs FlashInfer's latent kernels, whose wrapper is not built in",
    "mla_attention=flashmla": "needs a Hopper GPU, pages of 64 tokens and the kernels of FlashMLA",
    "mla_attention=cutlass_mla": "needs an sm_100 GPU, pages of 128 tokens and a kernel of CUTLASS",
    "mla_attention=trtllm_mla": "needs an sm_100 GPU and TensorRT-LLM's kernels for latent attention",
    "mla_attention=nsa": "needs a model with sparse attention, as DeepSeek-V3.2, and its kernels",
}
"""component=choice of other engines -> what it needs. They are refused: Diptych does not call them."""

PARTS: dict[str, str] = {
    "contiguous_attention": "diptych.reference.contiguous_attention:attention_over",
    "hybrid_attention": "diptych.optimized.attention.hybrid:hybrid_of",
    "reference block diffusion": "diptych.reference.modes.block_diffusion",
    "optimized block diffusion": "diptych.optimized.modes.block_diffusion",
    "reference pipeline": "diptych.reference.parallel.pipeline",
    "optimized pipeline": "diptych.optimized.parallel.pipeline",
    "reference dp_attention": "diptych.reference.parallel.dp_attention:PassDispatch",
    "optimized dp_attention": "diptych.optimized.parallel.dp_attention:PassDispatch",
    "disaggregation": "diptych.reference.parallel.disaggregation",
    "split_servers": "diptych.reference.parallel.split_servers",
    "split_ranks": "diptych.reference.parallel.split_ranks",
    "whole_pages": "diptych.reference.parallel.whole_pages",
    "moe_runners": "diptych.optimized.moe_runners.table",
    "tune": "diptych.optimized.tune.tune",
    "decode_attention": "diptych.optimized.kernels.attention.decode_attention",
    "extend_attention": "diptych.optimized.kernels.attention.extend_attention",
    "mla_decode": "diptych.optimized.kernels.attention.mla_decode",
    "quantized_gemm": "diptych.optimized.kernels.linear.quantized_gemm",
    "moe_tiles": "diptych.optimized.kernels.moe.moe_tiles",
    "linear_choice": "diptych.optimized.kernels.linear.linear_choice",
    "one_shot_all_reduce": "diptych.optimized.kernels.collectives.one_shot_all_reduce",
    "symmetric_memory": "diptych.optimized.parallel.symmetric_memory",
}
"""Parts of one panel that are no component, because there is nothing to choose: name -> module."""

LABS = "diptych.shared.tools.course.labs:implementation"
IN_LABS = (
    "scheduler", "schedule_policy", "prefill_adder", "radix_cache", "memory_pool", "attention", "layers",
    "model_runner", "sampler", "detokenizer",
)  # fmt: skip
"""Components of which a lab of the course has one with a planted bug; the others are the reference's."""


def choices(component: str) -> list[str]:
    """Names that may stand behind `component=`; an unknown component raises `ValueError`."""
    if component not in IMPLEMENTATIONS:
        raise ValueError(f"unknown component {component!r}; the components are {', '.join(IMPLEMENTATIONS)}")
    return list(IMPLEMENTATIONS[component])


def parse_use(text: str) -> dict[str, str]:
    """ "attention=triton,sampler=reference" -> a mapping. Raises `ValueError` on anything else.

    "@FILE" stands for the choices in a file, one a line; files of code are relative to its folder. "lab07"
    stands for all components of this lab."""
    chosen: dict[str, str] = {}
    for item in filter(None, (piece.strip() for piece in text.split(","))):
        if item.startswith("@"):
            chosen |= _use_of_file(Path(item[1:]))
            continue
        if is_lab(item):
            chosen |= dict.fromkeys(IN_LABS, item)
            continue
        component, equals, choice = item.partition("=")
        if not equals or not choice:
            raise ValueError(f"--use takes component=implementation, got {item!r}")
        choices(component)
        chosen[component] = choice
    return chosen


def _use_of_file(file: Path) -> dict[str, str]:
    if not file.is_file():
        raise ValueError(f"no such file: {file}")
    lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    if any(line.startswith("@") for line in lines):
        raise ValueError(f"{file}: a file of choices names no other file")
    chosen = parse_use(",".join(lines))
    return {
        component: str(file.parent / choice) if ".py" in choice.partition(":")[0] else choice
        for component, choice in chosen.items()
    }


def needs_cuda(component: str, choice: str) -> bool:
    """Whether an implementation of ours runs on a CUDA GPU only."""
    return any(name in NEEDS_CUDA.get(component, ()) for name in choice.split("+"))


def check_device(selection: Mapping[str, str], device: str) -> None:
    """Raise `ValueError` for a choice that cannot run on the device."""
    for component, choice in selection.items():
        names = set(choice.split("+"))  # two, if they are joined
        if not names.isdisjoint(NEEDS_CUDA.get(component, ())) and not device.startswith("cuda"):
            raise ValueError(f"{component}={choice} needs a CUDA GPU, and the device is {device}")
        if not names.isdisjoint(NEEDS_TRITON.get(component, ())) and not runs_triton(device):
            raise ValueError(f"{component}={choice} {NO_TRITON}, and the device is {device}")


def runs_triton(device: str) -> bool:
    return device.startswith("cuda") or os.environ.get("TRITON_INTERPRET") == "1"


def optimized_without_gpu() -> dict[str, str]:
    """component -> "optimized", for the components of this panel that compute without Triton's kernels and
    can be imported here: several of their modules import Triton, which only Linux has."""
    chosen: dict[str, str] = {}
    for component, available in IMPLEMENTATIONS.items():
        if "optimized" in available and "optimized" not in NEEDS_TRITON.get(component, ()):
            with contextlib.suppress(ValueError):  # a package is missing
                load(component, "optimized")
                chosen[component] = "optimized"
    return chosen


def select(panel: str, use: Mapping[str, str]) -> dict[str, str]:
    """The choice for every component: what `use` says, else the panel's, else, where the optimized panel
    changes nothing, the reference's."""
    selection: dict[str, str] = {}
    for component, available in IMPLEMENTATIONS.items():
        selection[component] = panel if panel in available else "reference"
    for component, choice in use.items():
        check_choice(component, choice)
        selection[component] = choice
    return selection


def check_choice(component: str, choice: str) -> None:
    """Raise `ValueError` listing the right ones for a name that stands for nothing."""
    if needed := UNAVAILABLE.get(f"{component}={choice}"):
        usable = ", ".join(choices(component))
        raise ValueError(f"{component}={choice} {needed}; Diptych does not call them. Choose one of {usable}")
    is_known = choice in choices(component) or is_target(choice) or is_lab(choice)
    if not is_known and not _pair(component, choice):
        pairs = "two of them as prefill+decode, " if component == PAIRED else ""
        raise ValueError(
            f"{component}={choice}: no such implementation; choose one of {', '.join(choices(component))}, "
            f"{pairs}or name one of yours as package.module:Class or file.py:Class"
        )


def load(component: str, choice: str) -> Any:
    """The class (or module of classes) behind a choice; imports it now. An exception of
    user-provided code becomes one `ValueError`; an exception of the engine's own code is not changed."""
    if component == PAIRED and "+" in choice and (pair := _pair(component, choice)):
        return load_part("hybrid_attention")(*pair)
    if is_lab(choice):
        return _load_target(component, choice, LABS)(component, int(choice.removeprefix("lab")))
    return _load_target(component, choice, IMPLEMENTATIONS.get(component, {}).get(choice, choice))


def load_deterministic(panel: str, component: str) -> Any:
    """What takes the place of the component with the flag `deterministic`; None: nothing."""
    target = DETERMINISTIC[panel].get(component)
    return None if target is None else _load_target(component, panel, target)


def load_part(name: str) -> Any:
    """A part of `PARTS`."""
    return _load_target(name, name, PARTS[name])


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


def _pair(component: str, choice: str) -> tuple[str, str] | None:
    """The two names of "first+second"; None for anything else."""
    first, plus, second = choice.partition("+")
    known = IMPLEMENTATIONS.get(component, {})
    if component == PAIRED and plus and first in known and second in known:
        return first, second
    return None


def is_target(choice: str) -> bool:
    """Whether a choice names user-provided code: package.module:Class or file.py:Class."""
    return ":" in choice or "." in choice


def is_lab(choice: str) -> bool:
    """Whether a choice is a lab of the course, with a planted bug: lab01, lab02 ..."""
    return re.fullmatch(r"lab\d\d", choice) is not None


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
