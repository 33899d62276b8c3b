"""Builds an engine from its configuration.

Five steps: choose components (`plan.py`), load the model and what features put beside it (`load_model`,
`features/`), size and make the pools (`pools.py`), make the parts that run on them, and prepare kernels and
graphs. Every object is complete when it is made; features change what is made, not what is there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from diptych.shared.config import EngineConfig, ModelConfig
from diptych.shared.config.vision_config import has_tower
from diptych.shared.engine.build.cpu_threads import choose_threads
from diptych.shared.engine.build.features import Extras, Features, Pools
from diptych.shared.engine.build.plan import Plan, make_plan
from diptych.shared.engine.build.pools import make_pools
from diptych.shared.engine.compilations import Compilations
from diptych.shared.engine.compilations import watch as watch_compilers
from diptych.shared.engine.requests.images import takes_images
from diptych.shared.engine.requests.lora_adapters import LoraAdapters
from diptych.shared.grammar.compiler import GrammarCompiler
from diptych.shared.interfaces import (
    CausalLM,
    Collectives,
    Detokenizer,
    RunnerFeatures,
    Scheduler,
    SchedulerParts,
    TokenToKVPool,
)
from diptych.shared.loading.kv_sizing import MemoryPlan, free_gpu_memory, must_fit
from diptych.shared.loading.live_weights import LiveWeights
from diptych.shared.loading.load_model import load_model
from diptych.shared.modeling.forward import attention_layers
from diptych.shared.modeling.kv_pool import attention_component
from diptych.shared.parallel.alone import ALONE
from diptych.shared.parallel.expert_manager import ExpertManager
from diptych.shared.parallel.first_use import warm_up
from diptych.shared.text.tokenizer import Tokenizer


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
    weights: LiveWeights  # of this rank's model
    experts: ExpertManager | None = None  # with expert parallelism
    lora: LoraAdapters | None = None  # None: the engine takes no adapters
    vision: Any = None  # a `VisionTower`; None: the engine takes no images
    compilations: Compilations = field(default_factory=Compilations)  # of this process
    tp: Collectives = ALONE  # the ranks of tensor parallelism


@dataclass
class Phases:
    """Seconds of the successive phases of a start."""

    seconds: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def end(self, name: str, **before: float) -> None:
        """Record the time since the last call as the phase `name`, without phases before it whose time is
        known."""
        now = time.perf_counter()
        self.seconds |= before
        self.seconds[name], self._last = now - self._last - sum(before.values()), now


def assemble(
    config: EngineConfig,
    clock: Callable[[], float] = time.monotonic,
    replace: Mapping[str, Any] | None = None,
    tp: Collectives | None = None,
) -> Assembly:
    """Assemble an engine. `replace`: component -> what to use in place of the registry's. `tp`: the group of
    this rank, where there is one: of tensor parallelism, pipelines or both; replicas that share the experts.

    Raises `ValueError` for errors of the configuration, the model's files or the tokenizer, before memory for
    weights or pools is allocated."""
    phases, compilations = Phases(), Compilations()
    plan = make_plan(config, replace, tp)
    if plan.device.type == "cuda" and plan.device.index is not None:
        torch.cuda.set_device(plan.device)  # kernels run on the thread's current device
    features = Features(plan)
    phases.end("tokenizer")
    for group, device in () if plan.ranks is None else plan.groups(plan.ranks):  # a first sum takes memory
        warm_up(group, device, moves_experts=plan.config.ep > 1 or plan.config.dp_attention)
    free_before = free_gpu_memory(plan.device)
    with must_fit(plan.config.model):
        model = load_model(
            plan.folder, plan.model_config, plan.config, plan.component, plan.device, plan.dtype, plan.ranks,
            has_tower(plan.folder) and takes_images(plan.config),
        )  # fmt: skip
        extras = features.beside_model(model)
        choose_threads(model, plan.config)
        phases.end("weights")
        pools = make_pools(plan, features, model, extras, free_before)
        parts = make_parts(plan, features, model, extras, pools, clock)
        phases.end("pools")
        watch_compilers()  # all that compile are imported now
        parts.model_runner.prepare(plan.config, parts.sampler, parts.num_token_ids)
        phases.end("graphs", kernels=parts.model_runner.compile_seconds)
    scheduler = features.component("scheduler")(plan.config, plan.model_config, parts)
    return Assembly(
        config=plan.config.updated(max_total_tokens=pools.memory.num_tokens),
        model_config=plan.model_config,
        dtype=plan.dtype,
        selection=plan.selection,
        model=model,
        kv_pool=pools.kv_pool,
        memory=pools.memory,
        tokenizer=plan.tokenizer,
        detokenizer=features.component("detokenizer"),
        parts=parts,
        scheduler=scheduler,
        grammars=GrammarCompiler(plan.tokenizer, plan.num_token_ids, plan.eos_token_ids),
        eos_token_ids=plan.eos_token_ids,
        seconds=phases.seconds,
        weights=LiveWeights(
            model, plan.model_config, plan.device, plan.config.quantization, plan.tp or ALONE, plan.config.ep,
            extras.experts,
        ),
        experts=extras.experts,
        lora=extras.lora,
        vision=extras.vision,
        compilations=compilations,
        tp=plan.tp or ALONE,
    )  # fmt: skip


def make_parts(
    plan: Plan,
    features: Features,
    model: CausalLM,
    extras: Extras,
    pools: Pools,
    clock: Callable[[], float],
) -> SchedulerParts:
    """The components that a scheduler uses, on pools that are there."""
    component, drafter, kv_pool = features.component, extras.drafter, pools.kv_pool
    attention = component(attention_component(plan.model_config))(pools.req_to_token_pool, kv_pool)
    for layer in attention_layers(model):
        attention.check_layer(layer)
    lora = extras.lora.pool if extras.lora is not None else None
    in_scheduler = [each for feature in features.features for each in feature.in_scheduler(extras, pools)]
    runner_features = RunnerFeatures(
        capture_hidden=drafter.hidden_layers if drafter is not None else None,
        lora=lora,
        host_pool=pools.host.pool if pools.host is not None else None,
        host_states=getattr(pools.host, "state_pool", None),
        expert_manager=extras.experts,
        linear_attention=extras.linear_attention,
        run_model=next(filter(None, (feature.run_model() for feature in features.features)), None),
    )
    return SchedulerParts(
        model_runner=component("model_runner")(model, attention, kv_pool, runner_features),
        sampler=component("sampler")(),
        req_to_token_pool=pools.req_to_token_pool,
        allocator=pools.allocator,
        tree_cache=pools.tree_cache,
        policy=component("schedule_policy")(plan.config, pools.tree_cache),
        prefill_adder=component("prefill_adder"),
        num_token_ids=plan.num_token_ids,
        decode_text=plan.tokenizer.decode if plan.tokenizer is not None else _no_text,
        clock=clock,
        drafter=drafter,
        draft_tree=component("draft_tree")() if drafter is not None else None,
        kv_pool=kv_pool,
        reward_head=extras.reward_head,
        features=tuple(in_scheduler),
    )


def _no_text(token_ids: list[int]) -> str:
    raise ValueError("this model has no tokenizer: stop strings and regexes need one")
