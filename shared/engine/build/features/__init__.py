"""Optional parts of an engine: when a configuration has each, what it checks, and what it adds.

To add a feature, write a subclass of `Feature` and give it a row of `FEATURES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from diptych.shared.config.vision_config import has_tower
from diptych.shared.engine.build.plan import Plan
from diptych.shared.interfaces import (
    CausalLM,
    Drafter,
    LinearAttention,
    PrefixCache,
    ReqToTokenPool,
    RunModel,
    SchedulerFeature,
    TokenToKVPool,
    TokenToKVPoolAllocator,
)
from diptych.shared.loading.kv_sizing import MemoryPlan

if TYPE_CHECKING:  # loaded by engines that have them
    from diptych.shared.engine.requests.lora_adapters import LoraAdapters
    from diptych.shared.parallel.expert_manager import ExpertManager
    from diptych.shared.scheduling.host_cache import HostCache
    from diptych.shared.scheduling.state_checkpoints import StateCheckpoints

FEATURES: tuple[tuple[str, Callable[[Plan], Any]], ...] = (
    (
        "changed_parts:CompiledKernels",
        lambda plan: plan.config.kernel_cache is not None and plan.device.type == "cuda",
    ),
    ("changed_parts:Deterministic", lambda plan: plan.config.deterministic),
    ("together:Ranks", lambda plan: plan.config.tp > 1 or plan.config.pp > 1),
    ("together:TwoHalves", lambda plan: plan.config.two_batch_tokens and not plan.config.dp_attention),
    ("together:Pipeline", lambda plan: plan.config.pp > 1),
    ("together:SharedExperts", lambda plan: plan.config.dp_attention),
    ("together:ExpertParallel", lambda plan: plan.config.ep > 1 and not plan.config.dp_attention),
    ("beside_model:RewardHead", lambda plan: plan.model_config.num_labels),
    ("beside_model:LinearStates", lambda plan: plan.model_config.linear_attention),
    ("beside_model:LayersThatDiffer", lambda plan: plan.model_config.kv_heads),
    ("beside_model:Vision", lambda plan: has_tower(plan.folder)),
    ("beside_model:Lora", lambda plan: plan.config.lora_paths or plan.config.max_loras_per_batch),
    ("beside_model:Speculation", lambda plan: plan.config.speculative),
    (
        "split:Prefill",
        lambda plan: plan.config.disaggregation or plan.config.disaggregation_mode == "prefill",
    ),
    ("host_tier:HostTier", lambda plan: plan.config.hicache_tokens is not None),
)
"""file:class of each feature -> whether an engine has it, in the order in which they add what they add"""


@dataclass(frozen=True)
class Extras:
    """What features put beside the model. None: the engine does not have the feature."""

    reward_head: torch.Tensor | None = None  # [num_labels, hidden_size] float32 on the CPU
    vision: Any = None  # a `VisionTower`
    experts: ExpertManager | None = None
    lora: LoraAdapters | None = None
    drafter: Drafter | None = None
    linear_attention: LinearAttention | None = None
    states: StateCheckpoints | None = None  # of linear attention


@dataclass(frozen=True)
class Pools:
    """The memory of tokens."""

    memory: MemoryPlan
    req_to_token_pool: ReqToTokenPool
    allocator: TokenToKVPoolAllocator
    kv_pool: TokenToKVPool
    tree_cache: PrefixCache
    host: HostCache | None  # the tier below the cache


class Feature:
    """An optional part of one engine. Its methods are called in this order."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    # --8<-- [start:feature]
    def check(self) -> None:
        """Raise `ValueError` for what it does not work with, before memory is taken."""

    def implementation(self, component: str, impl: Any) -> Any:
        """The implementation to use in place of `impl`."""
        return impl

    def beside_model(self, model: CausalLM) -> dict[str, Any]:
        """Fields of `Extras`: made after the weights, before the pools are sized."""
        return {}

    def run_model(self) -> RunModel | None:
        """What runs the model, if not the runner's own."""
        return None

    def host_tier(self, kv_pool: TokenToKVPool, extras: Extras) -> HostCache | None:
        """The tier below the prefix cache."""
        return None

    def in_scheduler(self, extras: Extras, pools: Pools) -> list[SchedulerFeature]:
        """What decides with the scheduler, at its named moments."""
        return []

    # --8<-- [end:feature]


class Features:
    """The features of an engine. Raises `ValueError` if one does not work with the plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.features: list[Feature] = [_load(name)(plan) for name, is_on in FEATURES if is_on(plan)]
        for feature in self.features:
            feature.check()

    def component(self, name: str) -> Any:
        """The implementation of a component, as the features change it."""
        impl = self.plan.component(name)
        for feature in self.features:
            impl = feature.implementation(name, impl)
        return impl

    def beside_model(self, model: CausalLM) -> Extras:
        found: dict[str, Any] = {}
        for feature in self.features:
            found |= feature.beside_model(model)
        return Extras(**found)


def _load(name: str) -> type[Feature]:
    module, _, class_name = name.partition(":")
    found: type[Feature] = getattr(import_module(f"{__name__}.{module}"), class_name)
    return found
