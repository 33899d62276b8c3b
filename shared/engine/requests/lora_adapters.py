"""The LoRA adapters of an engine by name: loading and unloading while it serves."""

from __future__ import annotations

from typing import Any

from diptych.shared.config import EngineConfig, ModelConfig, draft_shape
from diptych.shared.interfaces import CausalLM, LoraPool, Scheduler
from diptych.shared.loading.kv_sizing import num_rows
from diptych.shared.loading.lora_adapter import adaptable_modules, check_modules, fit_model, read_adapter
from diptych.shared.types import DiffusionParams, LoraAdapter

DEFAULT_MAX_RANK = 16


class LoraAdapters:
    """All loaded adapters; the LoRA pool holds those of the running requests."""

    def __init__(self, pool: LoraPool, config: ModelConfig) -> None:
        self.pool, self.config = pool, config
        self.shapes = adaptable_modules(config)
        self.by_name: dict[str, LoraAdapter] = {}

    @staticmethod
    def of_engine(
        config: EngineConfig, model: CausalLM, pool_class: type[LoraPool], models: str
    ) -> LoraAdapters:
        """The adapters of `lora_paths` for an engine. models: the implementation of the model."""
        if pool_class.models != models:
            raise ValueError(
                f"LoRA adapters: {pool_class.__module__} changes models={pool_class.models}, and the engine "
                f"has models={models}"
            )
        model_config: ModelConfig = model.config
        at_start = [
            fit_model(read_adapter(path, name), model_config) for name, path in config.lora_paths.items()
        ]
        shapes = adaptable_modules(model_config)
        max_rank = config.max_lora_rank or max([DEFAULT_MAX_RANK, *(adapter.rank for adapter in at_start)])
        for adapter in at_start:
            check_modules(adapter, shapes, max_rank)
        pool = pool_class(model, config.num_lora_slots, max_rank, num_rows(config), _max_step_tokens(config))
        adapters = LoraAdapters(pool, model_config)
        adapters.by_name = {adapter.name: adapter for adapter in at_start}
        return adapters

    def get(self, name: str) -> LoraAdapter:
        """Raises `ValueError` for a name that is not loaded."""
        if name not in self.by_name:
            raise ValueError(
                f"no LoRA adapter {name!r} is loaded; there are {', '.join(sorted(self.by_name)) or 'none'}"
            )
        return self.by_name[name]

    def load(self, name: str, path: str, scheduler: Scheduler) -> None:
        """Load an adapter, also in place of one of this name that no request uses. The prefix cache is keyed
        by the adapter's content, so KV of another content is not found."""
        adapter = fit_model(read_adapter(path, name), self.config)
        check_modules(adapter, self.shapes, self.pool.max_rank)
        if name in self.by_name:
            self._check_unused(name, scheduler)
        self.by_name[name] = adapter

    def unload(self, name: str, scheduler: Scheduler) -> None:
        self.get(name)
        self._check_unused(name, scheduler)
        del self.by_name[name]

    def _check_unused(self, name: str, scheduler: Scheduler) -> None:
        adapter, state = self.by_name[name], scheduler.state()
        live = [*state.waiting_queue, *state.running, *([state.chunked_req] if state.chunked_req else [])]
        num_users = sum(req.lora is adapter for req in live)
        if num_users:
            raise ValueError(f"LoRA adapter {name!r} is in use by {num_users} requests")


def adapters_of(adapters: LoraAdapters | None) -> LoraAdapters:
    """The adapters of an engine. Raises `ValueError` if it takes none."""
    if adapters is None:
        raise ValueError("this engine takes no LoRA adapters: give lora_paths or max_loras_per_batch")
    return adapters


def cache_namespace(
    extra_key: str | None, adapter: LoraAdapter | None, diffusion: DiffusionParams | None = None
) -> tuple[Any, ...]:
    """`Req.extra_key` of a request with an adapter or with block diffusion: KV depends on the content of the
    adapter, and on all tokens of a block. It is a tuple, which cannot equal a text from a client."""
    return extra_key, adapter and adapter.content_id, diffusion and diffusion.block_len


def _max_step_tokens(config: EngineConfig) -> int:
    """The tokens of the largest step: prompts and decoding requests, or the nodes of all trees."""
    assert config.context_len is not None
    largest = max(config.chunked_prefill_size or 0, config.max_prefill_tokens, config.context_len)
    nodes = draft_shape(config).num_draft_tokens if config.speculative is not None else 0
    return max(largest + config.max_running_requests, config.max_running_requests * nodes)
