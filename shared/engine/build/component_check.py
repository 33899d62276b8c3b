"""Checks that an object can implement a component: a complete class of its interface, or a module of such
classes."""

from __future__ import annotations

from inspect import isclass
from types import ModuleType
from typing import Any

from diptych.shared import interfaces

_CLASSES: dict[str, type] = {
    "scheduler": interfaces.Scheduler,
    "schedule_policy": interfaces.SchedulePolicy,
    "prefill_adder": interfaces.PrefillAdder,
    "radix_cache": interfaces.PrefixCache,
    "chunk_cache": interfaces.PrefixCache,
    "kv_cache": interfaces.KVCache,
    "attention": interfaces.AttentionBackend,
    "mla_attention": interfaces.MLAAttentionBackend,
    "linear_attention": interfaces.LinearAttention,
    "mla_memory_pool": interfaces.MLATokenToKVPool,
    "host_pool": interfaces.HostPool,
    "disk_tier": interfaces.DiskTier,
    "lora": interfaces.LoraPool,
    "moe": interfaces.MoE,
    "quantized_experts": interfaces.QuantizedExperts,
    "model_runner": interfaces.ModelRunner,
    "sampler": interfaces.Sampler,
    "draft_tree": interfaces.DraftTreeOps,
    "detokenizer": interfaces.Detokenizer,
    "dialect": interfaces.Dialect,
    "expert_balancer": interfaces.ExpertBalancer,
    "expert_dispatch": interfaces.ExpertDispatch,
    "collectives": interfaces.Collectives,
    "transport": interfaces.Transport,
}
"""component -> the interface that its class implements"""

_MODULES: dict[str, tuple[type, ...]] = {
    "memory_pool": (
        interfaces.ReqToTokenPool,
        interfaces.TokenToKVPoolAllocator,
        interfaces.TokenToKVPool,
    ),
    "layers": (interfaces.RMSNorm, interfaces.RotaryEmbedding, interfaces.SiluAndMul),
    "quantization": (interfaces.QuantizedLinear,),
    "models": (),
    "draft_models": (),
    "drafter": (),
    "vision": (),
}
"""component that is a module -> the interfaces of which it holds a class each, under the same names"""

_FINDERS: dict[str, str] = {
    "quantization": "quantized",  # what a model has in place of a module
    "models": "model_class",  # by architecture
    "draft_models": "draft_model_class",  # by format
    "drafter": "drafter_class",  # by algorithm; or it is a class
    "vision": "tower_class",  # by the tower's config
}
"""component that is a module -> its function that finds a class"""


def interface_of(component: str) -> type | tuple[type, ...]:
    """The interface of a component; for a module of classes, all of their interfaces."""
    return _CLASSES[component] if component in _CLASSES else _MODULES[component]


def problem_with(component: str, impl: Any) -> str | None:
    """The reason, in one sentence, why `impl` cannot implement the component; None if it can."""
    if component in _CLASSES:
        return _problem_with_class(impl, _CLASSES[component])
    if component == "drafter" and isclass(impl):
        return _problem_with_class(impl, interfaces.Drafter)
    if component in _FINDERS and not hasattr(impl, _FINDERS[component]):
        return f"{_name(impl)} has no {_FINDERS[component]}"
    for interface in _MODULES[component]:
        if not hasattr(impl, interface.__name__):
            names = ", ".join(expected.__name__ for expected in _MODULES[component])
            return f"{_name(impl)} has no {interface.__name__}; it must hold {names}"
        problem = _problem_with_class(getattr(impl, interface.__name__), interface)
        if problem is not None:
            return problem
    return None


def _problem_with_class(impl: Any, interface: type) -> str | None:
    if isinstance(impl, ModuleType):
        return f"{_name(impl)} is a module: name the class in it, {_spelling(impl)}:Class"
    if not isclass(impl):
        return f"{_name(impl)} is no class"
    missing = sorted(
        method
        for method in getattr(interface, "__abstractmethods__", ())
        if getattr(impl, method, None) in (None, getattr(interface, method))
        or method in getattr(impl, "__abstractmethods__", ())
        or (method == "__init__" and impl.__init__ is object.__init__)
    )
    is_subclass = issubclass(impl, interface)
    if is_subclass and not missing:
        return None
    parts = [] if is_subclass else [f"is no subclass of diptych.shared.interfaces.{interface.__name__}"]
    if missing:
        parts.append(f"lacks {', '.join(missing)}")
    return f"{impl.__name__} {' and '.join(parts)}"


def _name(impl: Any) -> str:
    return getattr(impl, "__name__", None) or type(impl).__name__


def _spelling(module: ModuleType) -> str:
    is_file = module.__name__.startswith("diptych_user_")
    return (module.__file__ or module.__name__) if is_file else module.__name__
