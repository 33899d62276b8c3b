"""Flags of speculative decoding: valid combinations, and default shapes of each algorithm."""

from __future__ import annotations

from diptych.shared.config.model import ModelConfig
from diptych.shared.flags.engine_flags import EngineFlags
from diptych.shared.types.speculation import DraftShape

DEFAULT_SHAPES: dict[str, DraftShape] = {
    "eagle": DraftShape(5, 4, 16),
    "eagle3": DraftShape(5, 4, 16),
    "nextn": DraftShape(3, 1, 4),
    "standalone": DraftShape(3, 1, 4),
    "ngram": DraftShape(8, 4, 12),
    "dflash": DraftShape(15, 1, 16),  # the engine takes the block of the draft model
}

NEEDS_DRAFT_MODEL = ("eagle", "eagle3", "nextn", "standalone", "dflash")


def draft_shape(config: EngineFlags) -> DraftShape:
    """The shape to draft. A missing flag has the algorithm's default, limited by the other flags."""
    assert config.speculative is not None
    default = DEFAULT_SHAPES[config.speculative]
    num_steps = config.speculative_num_steps or default.num_steps
    top_k = config.speculative_topk or default.top_k
    num_draft_tokens = config.speculative_num_draft_tokens
    if config.speculative_num_steps is None and top_k == 1 and num_draft_tokens is not None:
        num_steps = max(num_draft_tokens - 1, 1)  # a chain is as deep as it is long
    most = DraftShape(num_steps, top_k, 0).max_nodes
    if num_draft_tokens is None:
        num_draft_tokens = most if top_k == 1 else min(default.num_draft_tokens, most)
    return DraftShape(num_steps, top_k, num_draft_tokens)


def possible_shapes(config: EngineFlags) -> list[DraftShape]:
    """The shapes that an engine may draft with, the largest first."""
    largest = draft_shape(config)
    return shapes_up_to(largest)[::-1] if config.speculative_auto else [largest]


def shapes_up_to(largest: DraftShape) -> list[DraftShape]:
    """Shapes of 1, 2, 4 ... steps, up to the largest, with nodes in proportion."""
    shapes = []
    num_steps = 1
    while num_steps < largest.num_steps:
        most = DraftShape(num_steps, largest.top_k, 0).max_nodes
        num_drafts = -(-(largest.num_draft_tokens - 1) * num_steps // largest.num_steps)
        num_nodes = most if largest.top_k == 1 else min(1 + num_drafts, most)
        shapes.append(DraftShape(num_steps, largest.top_k, num_nodes))
        num_steps *= 2
    return [*shapes, largest]


def check_speculation(config: EngineFlags) -> None:
    """Raise `ValueError` for flags that contradict each other."""
    given = [
        name
        for name in ("draft_model", "num_steps", "topk", "num_draft_tokens", "auto")
        if getattr(config, f"speculative_{name}")
    ]
    if config.speculative is None:
        if given:
            raise ValueError(
                f"speculative_{given[0]} needs speculative=eagle, eagle3, nextn, dflash, standalone or ngram"
            )
        return
    if config.enable_mixed_chunk:
        raise ValueError(
            f"enable_mixed_chunk does not work with speculative={config.speculative}: a step either computes "
            "prompts or verifies drafts"
        )
    if config.speculative in NEEDS_DRAFT_MODEL and config.speculative_draft_model is None:
        raise ValueError(
            f"speculative={config.speculative} needs speculative_draft_model: a local folder, a Hugging Face "
            "id, or a built-in one (tiny-dense-eagle3, an eagle3 head for tiny-dense)"
        )
    if config.speculative == "ngram" and config.speculative_draft_model is not None:
        raise ValueError("speculative=ngram drafts without a model: drop speculative_draft_model")
    shape = draft_shape(config)
    if config.speculative == "dflash" and shape.top_k > 1:
        raise ValueError(
            f"speculative_topk={shape.top_k}: speculative=dflash drafts chains only; set speculative_topk=1"
        )
    what = f"speculative_num_draft_tokens={shape.num_draft_tokens}"
    if shape.num_draft_tokens < 2:
        raise ValueError(f"{what}: one node is the request's newest token, so there must be at least 2")
    drafted = f"speculative_num_steps={shape.num_steps} and speculative_topk={shape.top_k}"
    if shape.top_k == 1 and shape.num_draft_tokens != shape.max_nodes:
        raise ValueError(f"{what} with {drafted}: a chain of that depth has exactly {shape.max_nodes} nodes")
    if shape.num_draft_tokens > shape.max_nodes:
        raise ValueError(f"{what}: {drafted} give at most {shape.max_nodes} nodes, the newest token included")


def check_windows(config: EngineFlags, model_config: ModelConfig) -> None:
    """Raise `ValueError` for trees over layers with a sliding window, if FlashInfer verifies them: it counts
    windows by slots, and in a tree the slots of siblings are between a node and its ancestors."""
    if config.speculative is None or draft_shape(config).top_k == 1:
        return
    attention = config.use.get("attention", "")
    layers = range(model_config.num_hidden_layers)
    has_windows = any(model_config.sliding_window(i) >= 0 for i in layers)
    if has_windows and attention.rpartition("+")[2] in ("flashinfer", "fa3"):
        raise ValueError(
            f"speculative_topk={draft_shape(config).top_k} with attention={attention}: FlashInfer verifies "
            "chains only in layers with a sliding window; set speculative_topk=1, or use attention=triton"
        )
