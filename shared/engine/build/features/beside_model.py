"""Features that put tensors beside the model's weights."""

from __future__ import annotations

import sys
from typing import Any

import torch

from diptych.shared.config import EngineConfig, draft_shape
from diptych.shared.config.speculation_flags import check_windows
from diptych.shared.config.vision_config import VisionConfig, read_vision_config
from diptych.shared.engine.build.features import Extras, Feature, Pools
from diptych.shared.engine.build.plan import Plan
from diptych.shared.engine.requests.embedding import read_reward_head
from diptych.shared.engine.requests.images import takes_images
from diptych.shared.engine.requests.lora_adapters import LoraAdapters
from diptych.shared.engine.requests.tower_rows import TowerRows
from diptych.shared.interfaces import CausalLM, Drafter, DrafterParts, SchedulerFeature, StatePool
from diptych.shared.loading.kv_sizing import check_memory, num_rows
from diptych.shared.loading.vision_weights import load_vision
from diptych.shared.parallel.agreement import AgreedDrafter
from diptych.shared.scheduling.lora_slots import LoraSlots
from diptych.shared.scheduling.state_checkpoints import StateCheckpoints, with_states


class RewardHead(Feature):
    """The head of a reward model, which gives scores and no tokens."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.head = read_reward_head(plan.folder, plan.model_config, plan.config.load_format == "dummy")

    def beside_model(self, model: CausalLM) -> dict[str, Any]:
        return {"reward_head": self.head}


class Vision(Feature):
    """The vision tower of a model that takes images."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.config = read_vision_config(plan.folder) if takes_images(plan.config) else None

    def check(self) -> None:
        model, dynamic = self.plan.model_config, self.config and self.config.dynamic
        if not dynamic:
            return
        if not model.rope.mrope_section:
            half = model.rope.rotary_dim // 2
            raise ValueError(
                f"images of this model need a mrope_section of three integers whose sum is {half}"
            )
        if len(dynamic.deepstack_layers) >= model.num_hidden_layers:
            raise ValueError(
                f"deepstack_visual_indexes has {len(dynamic.deepstack_layers)} layers; with "
                f"{model.num_hidden_layers} layers of text at most {model.num_hidden_layers - 1}"
            )

    def beside_model(self, model: CausalLM) -> dict[str, Any]:
        return {} if self.config is None else self._with_tower(self.config)

    def _with_tower(self, config: VisionConfig) -> dict[str, Any]:
        plan, size = self.plan, self.plan.model_config.hidden_size
        tower = load_vision(plan.component("vision"), plan.folder, config, size, plan.device, plan.dtype)
        if tower is None:
            print("the checkpoint has no vision tower: images are refused", file=sys.stderr, flush=True)
            return {}
        if plan.device.type == "cuda" and config.dynamic:
            for side in (4, 12):  # kernels have other tiles for few patches
                tower([torch.zeros(3, *[side * config.image_size] * 2, dtype=torch.uint8)])
        tower.known = TowerRows()
        return {"vision": tower}


def num_kept_states(config: EngineConfig) -> int:
    """States for the prefix cache: by default as many as requests may run."""
    if config.disable_radix_cache:
        return 0
    return config.max_running_requests if config.max_kept_states is None else config.max_kept_states


def refuse_flags(plan: Plan, what: str, **more: Any) -> None:
    """Raise `ValueError` for a flag that does not work with `what` of a model. more: further flags, by name,
    and whether each is set."""
    config = plan.config
    refused = {"pp": config.pp > 1, "dp_attention": config.dp_attention, **more}
    for name, is_set in refused.items():
        if is_set:
            raise ValueError(f"{name} does not work with {what} of {plan.model_config.architecture}")


class LayersThatDiffer(Feature):
    """Layers with heads of several sizes, some of which read the KV of an earlier layer. The engine needs
    nothing for them: what moves or cuts KV and layers takes all layers as alike."""

    def check(self) -> None:
        config = self.plan.config
        refuse_flags(
            self.plan,
            "the layers",
            hicache_tokens=config.hicache_tokens,
            disaggregation=config.disaggregation,
            disaggregation_mode=config.disaggregation_mode,
            lora_paths=config.lora_paths or config.max_loras_per_batch,
            tp=config.tp > 1,
            deterministic=config.deterministic,
            speculative=config.speculative,
            quantization=self.plan.model_config.quantization,
        )


class LinearStates(Feature):
    """The states of a model with linear attention: one for each row of req_to_token, and those of the prefix
    cache."""

    def check(self) -> None:
        plan, config = self.plan, self.plan.config
        refuse_flags(plan, "the linear attention", cuda_graph_block_len=config.cuda_graph_block_len)
        impl, linear = plan.component("linear_attention"), plan.model_config.linear_attention
        if linear is not None and linear.channel_decay:
            refuse_flags(
                plan,
                "the linear attention",
                quantization=plan.model_config.quantization,
                lora_paths=config.lora_paths or config.max_loras_per_batch,
            )
            if not impl.supports_channel_decay:
                raise ValueError(f"{impl.__name__} has no decay for each channel, which KDA has")
        if config.speculative is None:
            return
        if not impl.supports_drafts:
            raise ValueError(f"speculative={config.speculative}: {impl.__name__} does not verify drafts")
        top_k = draft_shape(config).top_k
        if top_k > 1:
            raise ValueError(
                f"speculative={config.speculative} with speculative_topk={top_k}: linear attention verifies "
                "chains of drafts, and no trees; set speculative_topk=1"
            )

    @property
    def num_nodes(self) -> int:
        """The most that a verify step has of a request."""
        config = self.plan.config
        return draft_shape(config).num_draft_tokens if config.speculative is not None else 0

    def implementation(self, component: str, impl: Any) -> Any:
        """KV alone is no prefix: a request needs the state at its end, too."""
        return impl if component != "radix_cache" else with_states(impl, self.checkpoints)

    def in_scheduler(self, extras: Extras, pools: Pools) -> list[SchedulerFeature]:
        return [] if pools.tree_cache.disable else [self.checkpoints]

    def beside_model(self, model: CausalLM) -> dict[str, Any]:
        plan, linear = self.plan, self.plan.local_config.linear_attention  # of this rank's heads
        assert linear is not None
        num_layers, num = len(plan.model_config.linear_layers), num_rows(plan.config)
        num_checkpoints, bytes_per_row = num_kept_states(plan.config), StatePool.bytes_per_row
        num_bytes = (num + 1) * bytes_per_row(num_layers, linear, plan.dtype, self.num_nodes)
        num_bytes += num_checkpoints * bytes_per_row(num_layers, linear, plan.dtype)
        what = f"states for max_running_requests={plan.config.max_running_requests} and the prefix cache"
        check_memory(what, num_bytes, plan.device)
        pool = StatePool(num, num_layers, linear, plan.dtype, plan.device, num_checkpoints, self.num_nodes)
        self.checkpoints = StateCheckpoints(pool, plan.config.page_size)
        return {"linear_attention": plan.component("linear_attention")(pool), "states": self.checkpoints}


class Lora(Feature):
    """LoRA adapters: those of `lora_paths`, and a pool for those of the running requests."""

    def beside_model(self, model: CausalLM) -> dict[str, Any]:
        pool_class, models = self.plan.component("lora"), self.plan.selection["models"]
        return {"lora": LoraAdapters.of_engine(self.plan.config, model, pool_class, models)}

    def in_scheduler(self, extras: Extras, pools: Pools) -> list[SchedulerFeature]:
        assert extras.lora is not None
        return [LoraSlots(extras.lora.pool)]


class Speculation(Feature):
    """A drafter, whose tokens the model verifies."""

    def check(self) -> None:
        check_windows(self.plan.config, self.plan.model_config)

    def beside_model(self, model: CausalLM) -> dict[str, Any]:
        plan = self.plan
        parts = DrafterParts(
            model, plan.model_config, plan.component, plan.device, plan.dtype, plan.num_token_ids
        )
        drafter = drafter_class(plan.component("drafter"), plan.config)(plan.config, parts)
        return {"drafter": drafter if plan.tp is None else AgreedDrafter(drafter, plan.tp)}


def drafter_class(implementation: Any, config: EngineConfig) -> type[Drafter]:
    """The drafter class: a panel's module has one per algorithm; a user-provided drafter is a class."""
    if isinstance(implementation, type):
        return implementation
    chosen: type[Drafter] = implementation.drafter_class(config.speculative)
    return chosen
