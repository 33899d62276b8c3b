"""Features of engines that work together: ranks of one model, and replicas that share experts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any

from diptych.shared import registry
from diptych.shared.config import EngineConfig, ModelConfig, read_config, read_draft_config
from diptych.shared.engine.build.features import Feature
from diptych.shared.interfaces import CausalLM, Collectives, MoE, RunModel, Sampler
from diptych.shared.loading.load_model import manage_experts
from diptych.shared.loading.model_path import resolve_model_path
from diptych.shared.modeling.two_batches import TwoBatches
from diptych.shared.parallel.agreement import AgreedSampler
from diptych.shared.parallel.grid import stages_of
from diptych.shared.parallel.in_step import can_be_cut
from diptych.shared.parallel.survivors import Survivors
from diptych.shared.parallel.turns import in_turns
from diptych.shared.types import ForwardBatch


class Ranks(Feature):
    """Several ranks of one model: all use the tokens of rank 0."""

    def check(self) -> None:
        assert self.plan.ranks is not None
        check_parallel(self.plan.config, self.plan.selection)

    def implementation(self, component: str, impl: Any) -> Any:
        tp = self.plan.tp
        if component != "sampler" or tp is None:
            return impl

        def agreed() -> Sampler:
            return AgreedSampler(impl(), tp)

        return agreed


class TwoHalves(Feature):
    """Large prefill passes run as two half batches."""

    def check(self) -> None:
        if self.plan.model_config.linear_attention:
            flag = f"two_batch_tokens={self.plan.config.two_batch_tokens}"
            raise ValueError(f"{flag} does not work with linear attention: states are of one batch at a time")

    def run_model(self) -> RunModel:
        assert self.plan.tp is not None
        assert self.plan.config.two_batch_tokens is not None
        least = self.plan.config.two_batch_tokens

        def takes(batch: ForwardBatch) -> bool:
            return batch.forward_mode.is_prefill and can_be_cut(batch) and batch.num_tokens >= least

        return TwoBatches(takes, partial(in_turns, self.plan.tp))


class Pipeline(Feature):
    """Each rank has some of the layers; batches go from one to the next."""

    def implementation(self, component: str, impl: Any) -> Any:
        assert self.plan.ranks is not None
        pipeline = registry.load_part(f"{self.plan.selection['scheduler']} pipeline")
        return pipeline.implementation(component, impl, self.plan.config, stages_of(self.plan.ranks))


class SharedExperts(Feature):
    """Data-parallel attention: replicas that share the experts, and step together."""

    @cached_property
    def dispatch(self) -> Any:
        dispatch = registry.load_part(f"{self.plan.selection['scheduler']} dp_attention")
        return dispatch(self.plan.ranks, self.plan.config.ep)

    def check(self) -> None:
        check_dp_attention(self.plan.config, self.plan.model_config, self.plan.selection)

    def implementation(self, component: str, impl: Any) -> Any:
        return self.dispatch.runner_in_step(impl) if component == "model_runner" else impl

    def beside_model(self, model: CausalLM) -> dict[str, Any]:
        plan = self.plan
        if plan.config.ep_num_redundant_experts or plan.config.eplb_rebalance_num_iterations:
            assert plan.ranks is not None
            self.dispatch.experts = manage_experts(
                model, plan.folder, plan.model_config, plan.config, plan.component, plan.device, plan.ranks,
                self.dispatch,
            )  # fmt: skip
            if plan.config.elastic_ep:
                self.dispatch.survivors = Survivors(
                    plan.ranks, self.dispatch.experts, self.dispatch.have_regrouped, plan.config.dist_timeout
                )
            return {}
        for module in model.modules():
            if isinstance(module, MoE):
                module.expert_parallel = self.dispatch
        return {}

    def run_model(self) -> RunModel | None:
        dispatch = self.dispatch
        dispatch.two_batch_tokens = self.plan.config.two_batch_tokens
        if dispatch.two_batch_tokens is None:
            return None
        return TwoBatches(lambda batch: dispatch.is_cut, dispatch.in_turns, dispatch.take_part)


class ExpertParallel(Feature):
    """Each part of the ranks has some of the experts."""

    def beside_model(self, model: CausalLM) -> dict[str, Any]:
        plan = self.plan
        assert plan.tp is not None
        experts = manage_experts(
            model, plan.folder, plan.model_config, plan.config, plan.component, plan.device, plan.tp
        )
        return {"experts": experts}


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
    if config.pp > 1:
        check_pipeline(config, selection)


IN_PIPELINES = ("scheduler", "model_runner", "models")
"""Components of a stage: it launches batches with the first, through the second, over layers of the third."""


def check_pipeline(config: EngineConfig, selection: Mapping[str, str]) -> None:
    """Raise `ValueError` for components of which there is no stage."""
    panel = selection["scheduler"]
    for component in IN_PIPELINES:
        allowed = ("reference", panel) if panel == "optimized" and component == "models" else (panel,)
        if panel not in registry.PANELS or selection[component] not in allowed:
            chosen = ", ".join(f"{name}={selection[name]}" for name in IN_PIPELINES)
            raise ValueError(
                f"pp={config.pp} runs with the scheduler, the model runner and the models of one panel; "
                f"these are {chosen}; choose panel=reference or panel=optimized, without use of them"
            )
    if panel == "reference" and config.enable_mixed_chunk:
        raise ValueError(
            f"pp={config.pp} does not work with enable_mixed_chunk=True in panel=reference, whose stages "
            "launch a decode step of one micro-batch alone; choose panel=optimized"
        )
    if selection["collectives"] == "reference" and panel == "optimized" and str(config.device) != "cpu":
        raise ValueError(
            f"pp={config.pp} with collectives=reference runs over gloo on device=cpu, and the device is "
            f"{config.device}; choose collectives=optimized"
        )


def check_elastic_ep(config: EngineConfig, num_experts: int, ranks: type[Collectives]) -> None:
    """Raise `ValueError` for replicas of which none can be missed."""
    if str(config.device) != "cpu":
        raise ValueError(
            f"elastic_ep=True runs over gloo on device=cpu, and the device is {config.device}: a kernel that "
            "waits for a GPU whose process has died does not end"
        )
    if Collectives.leave is ranks.leave or Collectives.rejoin is ranks.rejoin:  # both are optional
        raise ValueError(
            f"elastic_ep=True needs collectives whose ranks can leave and rejoin; {ranks.__name__} lacks one "
            "of these; choose use collectives=reference or optimized"
        )
    num_local = (num_experts + config.ep_num_redundant_experts) // config.ep
    num_left = config.ep - config.tp
    if num_local * num_left < num_experts:
        least = -(-num_experts // num_left) * config.ep - num_experts
        raise ValueError(
            f"elastic_ep=True with ep={config.ep}: {num_left} ranks with room for {num_local} experts "
            f"each cannot have {num_experts}; set ep_num_redundant_experts to at least {least}"
        )


def check_dp_attention(config: EngineConfig, model_config: ModelConfig, selection: Mapping[str, str]) -> None:
    """Raise `ValueError` for settings that do not work with data-parallel attention."""
    if model_config.moe is None:
        raise ValueError(f"dp_attention shares experts, and {model_config.architecture} has none")
    if "expert_dispatch" in config.use:
        raise ValueError(
            f"dp_attention does not work with use expert_dispatch={config.use['expert_dispatch']}: it has a "
            "dispatch of its own"
        )
    panel, device = selection["scheduler"], str(config.device)
    if panel not in registry.PANELS or selection["model_runner"] != panel:
        raise ValueError(
            "dp_attention runs with the scheduler and the model runner of one panel; these are "
            f"scheduler={panel}, model_runner={selection['model_runner']}; choose panel=reference or "
            "panel=optimized"
        )
    runs_here = device == "cpu" or (device.startswith("cuda") and selection["collectives"] != "reference")
    if not runs_here or (panel == "reference" and device != "cpu"):
        raise ValueError(
            f"dp_attention with panel={panel}, collectives={selection['collectives']} does not run on "
            f"device={device}: the reference runs over gloo on device=cpu; choose panel=optimized for CUDA"
        )
    if config.elastic_ep:
        check_elastic_ep(
            config, model_config.moe.num_experts, registry.load("collectives", selection["collectives"])
        )
    name = config.speculative_draft_model
    if name is not None:
        folder = resolve_model_path(name, config.load_format)
        if config.speculative == "standalone":
            draft = read_config(folder)
        else:
            assert config.speculative in ("eagle", "eagle3", "nextn", "dflash")
            draft = read_draft_config(folder, model_config, config.speculative).model
        if draft.moe is not None:
            raise ValueError(
                f"dp_attention does not work with speculative_draft_model={name}: it has experts, and the "
                "replicas share those of the target alone"
            )
