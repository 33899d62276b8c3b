"""What is decided before an engine takes memory: its resolved configuration, and the choice of components."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from diptych.shared import registry
from diptych.shared.config import EngineConfig, ModelConfig, read_config
from diptych.shared.config.hf_rope import for_context
from diptych.shared.engine.build.settings import default_device, default_panel
from diptych.shared.interfaces import Collectives
from diptych.shared.loading.gguf_weights import as_in_file
from diptych.shared.loading.kv_scales import kv_cache_of
from diptych.shared.loading.kv_sizing import check_row_memory
from diptych.shared.loading.load_model import local_model_config, with_draft_block
from diptych.shared.loading.model_path import load_tokenizer, resolve_model_path
from diptych.shared.loading.quantize import with_quantization
from diptych.shared.parallel.grid import groups_of, tp_of
from diptych.shared.text.tokenizer import Tokenizer
from diptych.shared.types.attention import KVScales


@dataclass(frozen=True)
class Plan:
    """The facts from which all parts of an engine are made."""

    config: EngineConfig  # resolved: no relevant field is None
    folder: Path  # of the model's files
    model_config: ModelConfig
    selection: dict[str, str]  # component -> implementation
    given: Mapping[str, Any]  # component -> the implementation in place of the registry's
    tokenizer: Tokenizer | None
    device: torch.device
    dtype: torch.dtype  # of activations
    kv_dtype: torch.dtype  # of the KV pool
    kv_scales: Sequence[KVScales] | None  # of all layers; None: 1
    num_token_ids: int  # ids [0, num_token_ids) have a token; further rows of the head are padding
    eos_token_ids: frozenset[int]  # tokens that end an answer, of the model and of the tokenizer
    ranks: Collectives | None  # all ranks of the model; None: this one works alone
    tp: Collectives | None  # those of which each has a part of the layers that this rank has

    def groups(self, ranks: Collectives) -> list[tuple[Collectives, torch.device]]:
        """The groups, and the device whose memory each sends: all ranks of a pipeline send that of the
        CPU."""
        if self.config.pp == 1:
            return [(group, self.device) for group in groups_of(ranks)]
        of_stage = [] if self.tp is None else [(self.tp, self.device)]
        return [(ranks, torch.device("cpu")), *of_stage]

    @cached_property
    def local_config(self) -> ModelConfig:
        """The part of the model that this rank has."""
        if self.ranks is None:
            return self.model_config
        return local_model_config(self.model_config, self.config, self.ranks)

    def component(self, name: str) -> Any:
        """The chosen implementation of a component, loaded now."""
        if name in self.given:
            return self.given[name]
        of_mode = None
        if self.config.deterministic:
            of_mode = registry.load_deterministic(str(self.config.panel), name)
        return of_mode or registry.load(name, self.selection[name])


def make_plan(
    config: EngineConfig, given: Mapping[str, Any] | None = None, ranks: Collectives | None = None
) -> Plan:
    """Read the model's config and tokenizer, and choose components. Raises `ValueError`."""
    folder = resolve_model_path(config.model, config.load_format)
    model_config = read_config(folder)
    if config.quantization is not None:
        model_config = with_quantization(model_config, config.quantization)
    config = resolve_config(config, model_config)
    assert config.panel is not None
    assert config.context_len is not None
    if str(config.device).startswith("cuda") and config.panel == "optimized":  # whose kernels multiply blocks
        model_config = as_in_file(model_config, folder)
    model_config = replace(model_config, rope=for_context(model_config.rope, config.context_len))
    selection = registry.select(config.panel, config.use)
    registry.check_device(selection, str(config.device))
    if config.disable_radix_cache:
        selection["radix_cache"] = selection["chunk_cache"]
    given = {**_load_user_components(selection), **(given or {})}
    if "kv_cache" in config.use and "attention" not in config.use:
        given["attention"] = registry.load_part("contiguous_attention")(
            given.get("kv_cache") or registry.load("kv_cache", selection["kv_cache"])
        )
    tokenizer = load_tokenizer(config, folder)
    device, dtype = torch.device(str(config.device)), dtype_of(config, model_config)
    check_row_memory(config, device)
    kv_dtype, kv_scales = torch.bfloat16 if config.kv_cache_dtype == "bfloat16" else dtype, None
    if config.kv_cache_dtype not in ("auto", "bfloat16"):
        kv_dtype, kv_scales = kv_cache_of(folder, model_config, config)
    num_token_ids, eos_token_ids = model_config.vocab_size, model_config.eos_token_ids
    if tokenizer is not None:
        num_token_ids = min(num_token_ids, tokenizer.vocab_size)
        eos_token_ids |= tokenizer.eos_token_ids
    return Plan(
        config, folder, model_config, selection, given, tokenizer, device, dtype, kv_dtype, kv_scales,
        num_token_ids, eos_token_ids, ranks,
        None if ranks is None else tp_of(ranks, config),
    )  # fmt: skip


def _load_user_components(selection: Mapping[str, str]) -> dict[str, Any]:
    """Load user-provided components. Raises `ValueError` for one that does not implement its interface, with
    the message of `diptych check`."""
    theirs: dict[str, Any] = {}
    for name, choice in selection.items():
        if not registry.is_target(choice):
            continue
        from diptych.shared.engine.build.component_check import problem_with

        theirs[name] = registry.load(name, choice)
        problem = problem_with(name, theirs[name])
        if problem is not None:
            raise ValueError(f"{name}={choice}: {problem}")
    return theirs


def resolve_config(config: EngineConfig, model_config: ModelConfig) -> EngineConfig:
    """Replace None in flags by values that follow from the model and the machine."""
    device = config.device or default_device()
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device={device}: this torch ({torch.__version__}) sees no CUDA GPU")
    if device == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"device=mps: this torch ({torch.__version__}) sees no Apple GPU")
    if not device.startswith("cuda") and device not in ("cpu", "mps"):
        raise ValueError(f"device must be cpu, mps, cuda or cuda:N, got {device!r}")
    if device == "mps" and config.kv_cache_dtype.startswith("fp8"):
        raise ValueError(
            f"kv_cache_dtype={config.kv_cache_dtype}: Apple GPUs have no FP8; use kv_cache_dtype=auto"
        )
    context_len = config.context_len or model_config.context_len
    if context_len > model_config.context_len:
        raise ValueError(
            f"context_len={context_len} exceeds the model's {model_config.context_len} positions"
        )
    panel = config.panel or default_panel(device)
    if panel == "optimized" and not registry.runs_triton(device):
        raise ValueError(f"panel=optimized {registry.NO_TRITON}, and the device is {device}")
    config = with_draft_block(config, model_config)
    return config.updated(device=device, panel=panel, context_len=context_len)


def dtype_of(config: EngineConfig, model_config: ModelConfig) -> torch.dtype:
    """The dtype of activations."""
    if config.dtype != "auto":
        dtype = getattr(torch, config.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype
    return torch.float32 if config.device == "cpu" else model_config.dtype
