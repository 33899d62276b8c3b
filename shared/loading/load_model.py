"""Models and draft models on their device, with their weights."""

from __future__ import annotations

import contextlib
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from tqdm.auto import tqdm

from diptych.shared import registry
from diptych.shared.config import DraftConfig, EngineConfig, ModelConfig, QuantConfig, read_draft_config
from diptych.shared.config.speculation_flags import check_windows, draft_shape
from diptych.shared.interfaces import CausalLM, Collectives, DrafterParts, DraftModel, ExpertMap
from diptych.shared.loading.draft_weights import (
    draft_shapes,
    dummy_draft_weights,
    iterate_draft_weights,
    refuse_language_model,
)
from diptych.shared.loading.gguf_weights import LINK as GGUF_LINK
from diptych.shared.loading.kv_sizing import check_memory
from diptych.shared.loading.model_path import resolve_model_path
from diptych.shared.loading.pipeline_stages import Stage, remove_foreign, stage_config
from diptych.shared.loading.quantize import num_weight_bytes, quantize_linears
from diptych.shared.loading.safetensors_file import ALL_DTYPES, read_checkpoint
from diptych.shared.loading.shards import Shards, shard_config
from diptych.shared.loading.weight_names import expected_shapes, unused_part
from diptych.shared.loading.weights import Weights, dummy_weights, iterate_weights, named_targets
from diptych.shared.parallel.expert_manager import ExpertManager
from diptych.shared.parallel.expert_map import in_order
from diptych.shared.parallel.expert_parallel import ExpertParallel
from diptych.shared.parallel.grid import tp_of
from diptych.shared.parallel.in_step import DispatchInStep, ExpertsInStep
from diptych.shared.parallel.meeting import num_computers

_Model = TypeVar("_Model", bound=nn.Module)


def load_model(
    folder: Path,
    model_config: ModelConfig,
    config: EngineConfig,
    component: Callable[[str], Any],
    device: torch.device,
    dtype: torch.dtype,
    ranks: Collectives | None = None,
    loads_tower: bool = False,
) -> CausalLM:
    """The model of a folder, or this rank's part of it, built from the chosen components. Raises
    `ValueError`, before the model takes memory, for files that do not fit and for weights that are larger
    than the free memory."""
    shards: Shards | None = None
    if ranks is not None and config.pp > 1:
        stage, part = divmod(ranks.rank, config.tp)
        shards = Stage(model_config, part, config.tp, stage=stage, num_stages=config.pp)
    elif ranks is not None:
        experts = first_experts(model_config, config)
        shards = Shards(model_config, ranks.rank, ranks.size, config.ep, experts, num_sharing(config))
    local_config = model_config if ranks is None else local_model_config(model_config, config, ranks)
    weights = checkpoint_weights(folder, model_config, config, device, shards)
    if config.load_format != "dummy" and (ranks is None or ranks.rank == 0):
        tell_unused(folder, model_config, loads_tower)
    check_weights(
        model_config.architecture, expected_shapes(local_config), device, dtype, model_config.quantization
    )
    model_class: type[CausalLM] = component("models").model_class(model_config.architecture)
    tp = tp_of(ranks, config) if ranks is not None else None
    # With quantized layers the model takes no memory before they are in place.
    where = device if model_config.quantization is None else "meta"
    model = build_model(model_class, local_config, component, where, dtype, tp)
    if isinstance(shards, Stage):
        remove_foreign(model, model_config, shards.stage, shards.num_stages)
    with building(dtype, device):
        if model_config.quantization is not None:
            tell_dequantized(model_config.quantization)
            with torch.device("meta"):
                of_experts = ranks if config.dp_attention else None
                quantize_linears(model, model_config.quantization, component, shards, tp or ranks, of_experts)
        runners: Any = None
        if config.moe_runner_backend != "auto" or any(hasattr(part, "runner") for part in model.modules()):
            runners = registry.load_part("moe_runners")
            runners.use_runner(model, config, device, dtype)
        model.load_weights(weights)
        if runners is not None:
            runners.prepare(model)
    return model.eval()


def tell_unused(folder: Path, model_config: ModelConfig, loads_tower: bool) -> None:
    """Print a line for tensors of parts that are not loaded. loads_tower: the model's part for images is."""
    if (folder / GGUF_LINK).is_file():
        return
    names = read_checkpoint(folder, ALL_DTYPES)
    parts = Counter(part for name in names if (part := unused_part(name, model_config)) is not None)
    if loads_tower:
        del parts["images"]
    what = ", ".join(f"{number} for {part}" for part, number in sorted(parts.items()))
    if what:
        hint = " (speculative=nextn uses them)" if "drafting" in parts else ""
        print(f"tensors that are not of the language model: {what}{hint}", file=sys.stderr, flush=True)


def tell_dequantized(quantization: QuantConfig) -> None:
    """Print a line for weights that are stored smaller than they are in memory."""
    found = {str(scheme) for _, scheme in quantization.targets if scheme.is_dequantized}
    for scheme in sorted(found):
        print(
            f"weights in {scheme}: no kernel multiplies them, so they are dequantized when they are loaded; "
            "they take the memory of an unquantized model",
            file=sys.stderr, flush=True,
        )  # fmt: skip


def local_model_config(
    model_config: ModelConfig, config: EngineConfig, ranks: Collectives | None = None
) -> ModelConfig:
    """The model of one rank."""
    if config.num_ranks == config.dp == 1:
        return model_config
    if config.pp > 1:
        assert ranks is not None
        model_config = stage_config(model_config, ranks.rank // config.tp, config.pp)
    dp = num_sharing(config)
    return shard_config(model_config, dp * config.tp, config.ep, config.ep_num_redundant_experts, dp)


def num_sharing(config: EngineConfig) -> int:
    """Replicas that share experts."""
    return config.dp if config.dp_attention else 1


def first_experts(model_config: ModelConfig, config: EngineConfig) -> ExpertMap | None:
    """Where experts are when the engine starts; None: without expert parallelism."""
    local_model_config(model_config, config)  # refuses what cannot be placed
    if config.ep == 1:
        return None
    assert model_config.moe is not None
    num_experts = model_config.moe.num_experts
    num_layers = len(model_config.moe_layers)
    return in_order(num_layers, num_experts, num_experts + config.ep_num_redundant_experts)


def checkpoint_weights(
    folder: Path,
    model_config: ModelConfig,
    config: EngineConfig,
    device: torch.device,
    shards: Shards | None,
) -> Weights:
    """The weights of a folder, or made up, or a rank's parts of them."""
    if config.load_format == "dummy":
        return dummy_weights(model_config, config.random_seed, device, shards)
    return iterate_weights(folder, model_config, LoadingBar().update, shards, device)


def manage_experts(
    model: CausalLM,
    folder: Path,
    model_config: ModelConfig,
    config: EngineConfig,
    component: Callable[[str], Any],
    device: torch.device,
    ranks: Collectives,
    in_step: DispatchInStep | None = None,
) -> ExpertManager:
    """Expert parallelism for a model that `load_model` has returned. `in_step`: of replicas that share the
    experts."""
    experts = first_experts(model_config, config)
    assert experts is not None

    def reload(placed: ExpertMap) -> int:
        size = ranks.size  # less than at the start, where ranks have died
        shards = Shards(
            model_config, ranks.rank, size, min(config.ep, size), placed,
            size // config.tp if config.dp_attention else 1, has_rest=False,
        )  # fmt: skip
        targets, num_read = named_targets(model), 0
        for name, tensor in checkpoint_weights(folder, model_config, config, device, shards):
            targets[name].copy_(tensor)
            num_read += 1
        return num_read

    return ExpertManager(
        model,
        in_step or component("expert_dispatch")(ranks, config.ep),
        ranks,
        config.ep,
        experts,
        component("expert_balancer")(),
        config.eplb_rebalance_num_iterations,
        reload,
        ExpertsInStep if in_step else ExpertParallel,
        num_computers(ranks.size),
    )


def load_draft_model(config: EngineConfig, parts: DrafterParts) -> tuple[DraftConfig, DraftModel]:
    """The draft model of `config`, with the target's embedding and head where it has none of its own. Raises
    `ValueError` for one that is missing or does not fit the target."""
    assert config.speculative_draft_model is not None
    assert config.speculative in ("eagle", "eagle3", "nextn", "dflash")
    folder = resolve_model_path(config.speculative_draft_model, config.load_format)
    if config.load_format != "dummy":
        refuse_language_model(folder, config.speculative, config.speculative_draft_model)
    draft_config = read_draft_config(folder, parts.model_config, config.speculative)
    if config.load_format == "dummy":
        weights = dummy_draft_weights(draft_config, config.random_seed, parts.device)
    else:
        weights = iterate_draft_weights(folder, draft_config)
    check_weights(f"{config.speculative} head", draft_shapes(draft_config), parts.device, parts.dtype)
    model_class: type[DraftModel] = parts.component("draft_models").draft_model_class(
        draft_config.draft_format
    )
    model = build_model(model_class, draft_config, parts.component, parts.device, parts.dtype)
    model.load_weights(weights)
    model.share(parts.model)
    check_windows(config, draft_config.model)
    return draft_config, model.eval()


def with_draft_block(config: EngineConfig, model_config: ModelConfig) -> EngineConfig:
    """`config`, with drafts as long as the block of its DFlash head where no flag says how long. Raises
    `ValueError` for longer ones."""
    if config.speculative != "dflash":
        return config
    assert config.speculative_draft_model is not None
    folder = resolve_model_path(config.speculative_draft_model, config.load_format)
    if config.load_format != "dummy":
        refuse_language_model(folder, config.speculative, config.speculative_draft_model)
    block = read_draft_config(folder, model_config, config.speculative).block
    assert block is not None
    if config.speculative_num_steps is None and config.speculative_num_draft_tokens is None:
        return config.updated(speculative_num_steps=block.block_len - 1)
    shape = draft_shape(config)
    if shape.num_draft_tokens > block.block_len:
        raise ValueError(
            f"speculative_num_steps={shape.num_steps}: {config.speculative_draft_model} fills in blocks of "
            f"{block.block_len} tokens, the newest one included; set at most {block.block_len - 1}"
        )
    return config


def check_weights(
    what: str,
    shapes: Mapping[str, tuple[int, ...]],
    device: torch.device,
    dtype: torch.dtype,
    quantization: QuantConfig | None = None,
) -> None:
    """Raise `ValueError` if weights of these shapes are larger than the free memory of the device."""
    num_parameters = sum(math.prod(shape) for shape in shapes.values())
    num_bytes = num_parameters * dtype.itemsize
    if quantization is not None:
        num_bytes = num_weight_bytes(shapes, quantization, dtype)
    name = str(dtype).removeprefix("torch.")
    what = f"{what} of {num_parameters / 1e9:.2f} billion parameters in {name}"
    check_memory(what, num_bytes, device)


def build_model(
    model_class: Callable[..., _Model],
    config: ModelConfig | DraftConfig,
    component: Callable[[str], Any],
    device: torch.device | str,
    dtype: torch.dtype,
    tp: Collectives | None = None,
) -> _Model:
    """A model from the chosen layers and experts. Its parameters are allocated; `load_weights` fills them.
    `tp`: the ranks of which each has a part of the model."""
    parts = (component("layers"), component("moe"))
    with building(dtype, device):
        return model_class(config, *parts) if tp is None else model_class(config, *parts, tp)


@contextlib.contextmanager
def building(dtype: torch.dtype, device: torch.device | str) -> Iterator[None]:
    """Parameters that are made inside have this dtype and are on this device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


MIN_BYTES = 500_000_000
"""The loading bar appears for checkpoints from this size on: smaller ones are loaded in a moment."""


class LoadingBar:
    """On a terminal, shows how much of a checkpoint is read. `update`: the `on_progress` of
    `iterate_weights`."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None

    def update(self, num_bytes_read: int, num_bytes: int) -> None:
        if num_bytes < MIN_BYTES:
            return
        if self._bar is None:
            options = {"unit_scale": True, "leave": False, "disable": None}  # None: shown on a terminal only
            self._bar = tqdm(total=num_bytes, unit="B", desc="load weights", **options)
        self._bar.update(num_bytes_read - self._bar.n)
        if num_bytes_read == num_bytes:
            self._bar.close()
