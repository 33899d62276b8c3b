"""Builds an engine from its configuration: chooses components, loads the model, sizes the pools."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from diptych.shared import registry
from diptych.shared.config import EngineConfig, ModelConfig
from diptych.shared.config.deterministic_flags import check_deterministic_model
from diptych.shared.config.speculation_flags import check_windows
from diptych.shared.config.vision_config import read_vision_config
from diptych.shared.engine.build.component_check import problem_with
from diptych.shared.engine.requests.embedding import read_reward_head
from diptych.shared.engine.build.hicache import make_host_cache
from diptych.shared.engine.requests.images import takes_images
from diptych.shared.engine.requests.lora_adapters import LoraAdapters
from diptych.shared.grammar.compiler import GrammarCompiler
from diptych.shared.interfaces import (
    CausalLM,
    Collectives,
    Detokenizer,
    Drafter,
    DrafterParts,
    MoE,
    Scheduler,
    SchedulerParts,
    TokenToKVPool,
)
from diptych.shared.loading.kv_scales import kv_cache_of
from diptych.shared.loading.kv_sizing import (
    MemoryPlan,
    free_gpu_memory,
    num_rows,
    num_speculative_slots,
    plan_memory,
)
from diptych.shared.loading.load_model import load_model, local_model_config, manage_experts
from diptych.shared.loading.model_path import resolve_model_path
from diptych.shared.loading.quantize import with_quantization
from diptych.shared.loading.pipeline_stages import layers_of
from diptych.shared.modeling.forward import attention_layers
from diptych.shared.modeling.kv_pool import attention_component, build_kv_pool
from diptych.shared.parallel.agreement import AgreedDrafter, AgreedSampler
from diptych.shared.parallel.alone import ALONE
from diptych.shared.parallel.dp_attention import PassDispatch, in_lockstep
from diptych.shared.parallel.expert_manager import ExpertManager
from diptych.shared.parallel.first_use import warm_up
from diptych.shared.scheduling.host_cache import tiered
from diptych.shared.text.tokenizer import TOKENIZER_FILES, Tokenizer


@dataclass(frozen=True)
class Assembly:
    """The parts of an engine. `config` is resolved: no relevant field is None."""

    config: EngineConfig
    model_config: ModelConfig
    dtype: torch.dtype  # of activations
    selection: dict[str, str]  # component -> implementation
    model: CausalLM
    kv_pool: TokenToKVPool
    memory: MemoryPlan
    tokenizer: Tokenizer | None  # None: the model has none; the engine takes and gives token ids
    detokenizer: type[Detokenizer]
    parts: SchedulerParts
    scheduler: Scheduler
    grammars: GrammarCompiler
    eos_token_ids: frozenset[int]  # tokens that end an answer, of the model and of the tokenizer
    seconds: dict[str, float]  # phase of the start -> how long it took
    experts: ExpertManager | None = None  # with expert parallelism
    lora: LoraAdapters | None = None  # None: the engine takes no adapters
    vision: Any = None  # diptych.reference.modes.vision.VisionTower; None: the engine takes no images
    tp: Collectives = ALONE  # the ranks of tensor parallelism


class Phases:
    """Seconds of the successive phases of a start."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def end(self, name: str) -> None:
        """Record the time since the last call as the phase `name`."""
        now = time.perf_counter()
        self.seconds[name], self._last = now - self._last, now


def assemble(
    config: EngineConfig,
    clock: Callable[[], float] = time.monotonic,
    replace: Mapping[str, Any] | None = None,
    tp: Collectives | None = None,
) -> Assembly:
    """Assemble an engine. `replace`: component -> the implementation to use in place of the registry's. `tp`:
    the group of this rank, with config.num_ranks > 1 or config.dp_attention: tensor-parallel ranks, pipeline
    stages, or replicas that share the experts.

    Raises `ValueError` for errors of the configuration, the model's files or the tokenizer, before memory for
    weights or pools is allocated."""
    phases = Phases()
    folder = resolve_model_path(config.model, config.load_format)
    model_config = with_quantization(ModelConfig.from_pretrained(folder), config.quantization)
    config = resolve_config(config, model_config)
    assert config.panel is not None
    check_windows(config, model_config)
    if config.disaggregation and model_config.mla is not None:
        raise ValueError(
            "disaggregation transfers K and V of one shape, and "
            f"{model_config.architecture} caches latent rows; it runs in one engine"
        )
    check_deterministic_model(config, model_config)
    selection = registry.select(config.panel, config.use)
    registry.check_device(selection, str(config.device))
    if config.disable_radix_cache:
        selection["radix_cache"] = selection["chunk_cache"]
    theirs = _load_user_components(selection)
    if config.deterministic:
        theirs |= registry.load_deterministic(config.panel)
    tokenizer = load_tokenizer(config, folder)
    device, dtype = torch.device(str(config.device)), _dtype(config, model_config)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # kernels run on the thread's current device
    kv_dtype, kv_scales = kv_cache_of(folder, model_config, config, dtype)

    def component(name: str) -> Any:
        return (replace or {}).get(name) or theirs.get(name) or registry.load(name, selection[name])

    if config.num_ranks > 1:
        assert tp is not None
        check_parallel(config, selection)
    ranks, pp, dispatch = tp, None, None
    if config.pp > 1:
        tp, pp = None, ranks
    if config.dp_attention:
        assert ranks is not None
        check_dp_attention(config, model_config, selection)
        tp, dispatch = None, PassDispatch(ranks, config.ep)
    local_config = local_model_config(model_config, config, ranks)
    if kv_scales is not None and pp is not None:
        layers = layers_of(model_config.num_hidden_layers, pp.rank, pp.size)
        kv_scales = kv_scales[layers.start : layers.stop]
    phases.end("tokenizer")
    if ranks is not None:
        # A group's first collective may take memory. Pipelines send from the memory of the CPU.
        warm_up(ranks, torch.device("cpu") if pp is not None else device, moves_experts=config.ep > 1)
    free_before = free_gpu_memory(device)
    reward_head = read_reward_head(folder, model_config, config.load_format == "dummy")
    model = load_model(folder, model_config, config, component, device, dtype, ranks)
    vision_config = read_vision_config(folder)
    vision = None
    if vision_config is not None and takes_images(config):
        towers: Any = import_module("diptych.reference.modes.vision")
        vision = towers.load_vision(folder, vision_config, model_config.hidden_size, device, dtype)
    model_runner = component("model_runner")
    if dispatch is not None:
        model_runner = in_lockstep(model_runner, dispatch)
        for module in model.modules():
            if isinstance(module, MoE):
                module.expert_parallel = dispatch
    experts = None
    if config.ep > 1 and not config.dp_attention:
        assert tp is not None
        experts = manage_experts(model, folder, model_config, config, component, device, tp)
    num_token_ids = min(
        model_config.vocab_size, tokenizer.vocab_size if tokenizer is not None else model_config.vocab_size
    )
    adapters = None
    if config.num_lora_slots:
        adapters = LoraAdapters.of_engine(config, model, component("lora"), selection["models"])
    drafter: Drafter | None = None
    if config.speculative is not None:
        drafter_parts = DrafterParts(model, model_config, component, device, dtype, num_token_ids)
        drafter = drafter_class(component("drafter"), config)(config, drafter_parts)
        if tp is not None:
            drafter = AgreedDrafter(drafter, tp)
    phases.end("weights")
    pools = component("memory_pool")
    free_gpu_memory(device)  # temporary memory of loading does not count as weights
    weight_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    draft_bytes = drafter.num_kv_bytes_per_token if drafter is not None else 0
    memory = plan_memory(
        config, local_config, dtype, device, free_before, weight_bytes, draft_bytes, kv_dtype
    )
    num_tokens = memory.num_tokens
    if ranks is not None:  # every rank has the slots of the rank with the least memory
        num_tokens = int(ranks.all_gather(torch.tensor([num_tokens])).min())
    if device.type == "cuda" and (ranks is None or ranks.rank == 0):
        print_memory(memory)
    assert config.context_len is not None
    row_len = config.context_len + num_speculative_slots(config, drafter)
    req_to_token_pool = pools.ReqToTokenPool(num_rows(config), row_len, device)
    allocator = pools.TokenToKVPoolAllocator(num_tokens, config.page_size, device)
    kv_pool = build_kv_pool(
        component, local_config, num_tokens, config.page_size, kv_dtype, device, kv_scales
    )
    cache_component = "chunk_cache" if config.disable_radix_cache else "radix_cache"
    cache_class = component(cache_component)
    if config.hicache_tokens is not None:
        cache_class = tiered(cache_class)
    tree_cache = cache_class(
        config.page_size,
        allocator,
        req_to_token_pool,
        config.eviction_policy,
        is_bigram=drafter is not None and drafter.is_bigram,
    )
    if config.hicache_tokens is not None:
        tree_cache.host = make_host_cache(config, folder, component("host_pool"), kv_pool, drafter)
    if drafter is not None:
        drafter.allocate(req_to_token_pool, num_tokens)
    attention = component(attention_component(model_config))(req_to_token_pool, kv_pool)
    for layer in attention_layers(model):
        attention.check_layer(layer)
    sampler = component("sampler")()
    parts = SchedulerParts(
        model_runner=model_runner(model, attention, kv_pool),
        sampler=sampler if tp is None else AgreedSampler(sampler, tp),
        req_to_token_pool=req_to_token_pool,
        allocator=allocator,
        tree_cache=tree_cache,
        policy=component("schedule_policy")(config, tree_cache),
        prefill_adder=component("prefill_adder"),
        num_token_ids=num_token_ids,
        decode_text=tokenizer.decode if tokenizer is not None else _no_text,
        clock=clock,
        drafter=drafter,
        draft_tree=component("draft_tree")() if drafter is not None else None,
        kv_pool=kv_pool,
        reward_head=reward_head,
        lora=adapters.pool if adapters is not None else None,
    )
    if config.hicache_tokens is not None:
        parts.model_runner.host_pool = tree_cache.host.pool
    parts.model_runner.expert_manager = experts
    if adapters is not None:
        parts.model_runner.lora = adapters.pool
    if drafter is not None:
        parts.model_runner.capture_hidden = drafter.hidden_layers
    phases.end("pools")
    parts.model_runner.prepare(config, parts.sampler, parts.num_token_ids)
    phases.end("kernels and graphs")
    if pp is None:
        scheduler = component("scheduler")(config, model_config, parts)
    else:
        pipeline: Any = import_module("diptych.reference.parallel.pipeline")
        stage = pipeline.Stage(model, attention, kv_pool, pp)
        scheduler = pipeline.PipelineScheduler(config, model_config, parts, stage)
    config = config.updated(max_total_tokens=num_tokens)
    eos_token_ids = model_config.eos_token_ids
    if tokenizer is not None:
        eos_token_ids |= tokenizer.eos_token_ids
    grammars = GrammarCompiler(tokenizer, num_token_ids, eos_token_ids)
    return Assembly(
        config, model_config, dtype, selection, model, kv_pool, memory, tokenizer, component("detokenizer"),
        parts, scheduler, grammars, eos_token_ids, phases.seconds, experts, adapters, vision, tp or ALONE,
    )  # fmt: skip


def check_parallel(config: EngineConfig, selection: Mapping[str, str]) -> None:
    """Raise `ValueError` for settings that do not work with several ranks."""
    device, collectives = str(config.device), selection["collectives"]
    if device == "mps":
        raise ValueError(f"tp={config.tp}, pp={config.pp} run on device=cpu or cuda; the device is mps")
    if device != "cpu" and collectives == "reference" and config.tp > 1:
        raise ValueError(
            f"collectives=reference run over gloo on device=cpu, and the device is {device}; choose "
            "panel=optimized or use collectives=optimized"
        )
    if config.pp > 1 and (config.panel != "reference" or config.use):
        raise ValueError(
            f"pp={config.pp} runs in panel=reference without use; these are {config.panel} and "
            f"{dict(config.use)}; choose panel=reference"
        )


def check_dp_attention(config: EngineConfig, model_config: ModelConfig, selection: Mapping[str, str]) -> None:
    """Raise `ValueError` for settings that do not work with data-parallel attention."""
    if model_config.moe is None:
        raise ValueError(f"dp_attention shares experts, and {model_config.architecture} has none")
    if str(config.device) != "cpu" or selection["models"] != "reference":
        raise ValueError(
            "dp_attention runs over gloo, on device=cpu with models=reference; these are "
            f"{config.device} and {selection['models']}"
        )


def print_memory(memory: MemoryPlan) -> None:
    """Print the use of GPU memory when an engine starts."""
    from rich.console import Console
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    for name, value in memory.rows().items():
        grid.add_row(name, value)
    Console(stderr=True, highlight=False).print(grid)


def resolve_config(config: EngineConfig, model_config: ModelConfig) -> EngineConfig:
    """Replace None in flags by values that follow from the model and the machine."""
    device = config.device or default_device()
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device={device}: this torch ({torch.__version__}) sees no CUDA GPU")
    if device == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"device=mps: this torch ({torch.__version__}) sees no Apple GPU")
    if not device.startswith("cuda") and device not in ("cpu", "mps"):
        raise ValueError(f"device must be cpu, mps, cuda or cuda:N, got {device!r}")
    if device == "mps" and config.kv_cache_dtype == "fp8_e4m3":
        raise ValueError("kv_cache_dtype=fp8_e4m3: Apple GPUs have no FP8; use kv_cache_dtype=auto")
    context_len = config.context_len or model_config.context_len
    if context_len > model_config.context_len:
        raise ValueError(
            f"context_len={context_len} exceeds the model's {model_config.context_len} positions"
        )
    panel = config.panel or default_panel(device)
    if panel == "optimized" and not registry.runs_triton(device):
        raise ValueError(f"panel=optimized {registry.NO_TRITON}, and the device is {device}")
    return config.updated(device=device, panel=panel, context_len=context_len)


def default_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def default_panel(device: str) -> str:
    return "optimized" if device.startswith("cuda") and registry.has_optimized() else "reference"


def _load_user_components(selection: Mapping[str, str]) -> dict[str, Any]:
    """Load user-provided components. Raises `ValueError` for one that does not implement its interface, with
    the message of `diptych check`."""
    theirs: dict[str, Any] = {}
    for name, choice in selection.items():
        if not registry.is_target(choice):
            continue
        theirs[name] = registry.load(name, choice)
        problem = problem_with(name, theirs[name])
        if problem is not None:
            raise ValueError(f"{name}={choice}: {problem}")
    return theirs


def drafter_class(implementation: Any, config: EngineConfig) -> type[Drafter]:
    """The drafter class: a panel's module has one per algorithm; a user-provided drafter is a class."""
    if isinstance(implementation, type):
        return implementation
    chosen: type[Drafter] = implementation.drafter_class(config.speculative)
    return chosen


def _dtype(config: EngineConfig, model_config: ModelConfig) -> torch.dtype:
    if config.dtype != "auto":
        dtype = getattr(torch, config.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype
    return torch.float32 if config.device == "cpu" else model_config.dtype


def load_tokenizer(config: EngineConfig, folder: Any) -> Tokenizer | None:
    """The model's tokenizer, or the one that the flag names; None for a model without one."""
    if config.tokenizer is not None:
        tokenizer_folder = Path(config.tokenizer).expanduser()
        if not tokenizer_folder.is_dir():
            tokenizer_folder = resolve_model_path(config.tokenizer, "dummy")
        return Tokenizer.from_pretrained(tokenizer_folder)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    return Tokenizer.from_pretrained(folder)


def _no_text(token_ids: list[int]) -> str:
    raise ValueError("this model has no tokenizer: stop strings and regexes need one")
