"""Flags that deterministic mode excludes: what would let a row's bits depend on other rows."""

from __future__ import annotations

from diptych.shared.config.model import ModelConfig
from diptych.shared.config.speculation_flags import draft_shape
from diptych.shared.flags.engine_flags import EngineFlags

NUMERIC_COMPONENTS = (
    "attention",
    "linear_attention",
    "layers",
    "moe",
    "models",
    "model_runner",
    "sampler",
)
"""Components that compute logits or log-probabilities. The mode brings its own."""


def check_deterministic(flags: EngineFlags) -> None:
    """Raise `ValueError` for flags that deterministic mode excludes."""
    for name, only, why in (
        ("tp", 1, "a sum over ranks adds in an order that depends on the size of the batch"),
        ("pp", 1, "the stages of a pipeline run whole batches"),
        ("ep", 1, "experts on several ranks compute the tokens of all"),
        ("dp_attention", False, "experts on several ranks compute the tokens of all"),
    ):
        if getattr(flags, name) != only:
            raise ValueError(f"deterministic=True does not work with {name}={getattr(flags, name)}: {why}")
    for component in NUMERIC_COMPONENTS:
        if component in flags.use:
            raise ValueError(
                f"deterministic=True does not work with use {component}={flags.use[component]}: the mode has "
                f"its own {', '.join(NUMERIC_COMPONENTS)}"
            )
    if flags.speculative is not None and draft_shape(flags).top_k > 1:
        raise ValueError(
            f"deterministic=True does not work with speculative_topk={draft_shape(flags).top_k}: in a tree "
            "keys are not in the order of positions; set speculative_topk=1"
        )
    if flags.speculative == "dflash":
        raise ValueError(
            "deterministic=True does not work with speculative=dflash: its attention has a mask, and the "
            "mode's has none"
        )


def check_deterministic_model(flags: EngineFlags, model_config: ModelConfig) -> None:
    """Raise `ValueError` for models whose kernels in the optimized panel follow the batch."""
    if not flags.deterministic or flags.panel == "reference":
        return
    if "kv_cache" in flags.use:
        raise ValueError(
            f"deterministic=True does not work with use kv_cache={flags.use['kv_cache']}, whose attention "
            "follows the batch; choose panel=reference"
        )
    if model_config.mla is not None:
        raise ValueError("deterministic=True works with multi-head latent attention in panel=reference only")
