"""EngineConfig: every flag of the engine, validated once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from diptych.shared.config.deterministic_flags import check_deterministic
from diptych.shared.config.parallel import check_decode_steps, check_parallel_flags
from diptych.shared.config.speculation_flags import check_speculation
from diptych.shared.flags.engine_flags import LORA, RANKS, SPECULATION, TIERS, EngineFlags
from diptych.shared.flags.flag import flags_of

FLAGS = flags_of(EngineFlags)


@dataclass(frozen=True, kw_only=True)
class EngineConfig(EngineFlags):
    """The flags, which shared/flags/engine_flags.py defines. A wrong type, a value out of range, and flags
    that exclude each other raise `ValueError` with flag, value and what is allowed."""

    def __post_init__(self) -> None:
        changed: set[str] = set()  # groups
        for name, flag in FLAGS.items():
            value = getattr(self, name)
            flag.check(value)
            if value != flag.default:
                changed.add(flag.group)
        if SPECULATION in changed:
            check_speculation(self)
        if self.num_continuous_decode_steps not in (None, 1):
            check_decode_steps(self)
        if changed & {RANKS, TIERS, LORA}:
            check_parallel_flags(self)
        if self.deterministic:
            check_deterministic(self)
        if self.cuda_graph_bs is not None and self.cuda_graph_max_bs is not None:
            raise ValueError(
                f"give cuda_graph_bs ({self.cuda_graph_bs!r}) or cuda_graph_max_bs "
                f"({self.cuda_graph_max_bs}), not both"
            )
        if self.cuda_graph_block_len is not None:
            check_block_len(self, self.cuda_graph_block_len)
        if self.chunked_prefill_size is not None and self.chunked_prefill_size < self.page_size:
            raise ValueError(
                f"chunked_prefill_size ({self.chunked_prefill_size}) must be at least page_size "
                f"({self.page_size}): a chunk ends on a page boundary"
            )
        if self.enable_priority_scheduling and self.schedule_policy not in ("fcfs", "lof"):
            raise ValueError(
                f"enable_priority_scheduling works with the policies fcfs and lof, not {self.schedule_policy}"
            )

    def updated(self, **changes: Any) -> EngineConfig:
        """A copy with some flags changed; an unknown flag raises `ValueError` with the list of flags."""
        unknown = sorted(changes.keys() - FLAGS.keys())
        if unknown:
            raise ValueError(f"unknown flag {', '.join(unknown)}; the flags are {', '.join(sorted(FLAGS))}")
        return replace(self, **changes)


MAX_BLOCK_LEN = 512
"""Passes of more tokens take longer than launching their kernels."""


def check_block_len(config: EngineConfig, block_len: int) -> None:
    """Raise `ValueError` for flags with which an engine refuses block diffusion: it would capture in vain."""
    plain = ("deterministic", "enable_mixed_chunk", "disaggregation", "dp_attention")
    alone: list[tuple[str, Any]] = [(name, False) for name in plain]
    alone += [(name, None) for name in ("speculative", "hicache_tokens", "disaggregation_mode")]
    for name, only in (*alone, ("tp", 1), ("pp", 1), ("dp", 1)):
        if getattr(config, name) != only:
            raise ValueError(
                f"cuda_graph_block_len ({block_len}) does not work with {name}={getattr(config, name)}: "
                "such an engine refuses block diffusion"
            )
    if block_len > MAX_BLOCK_LEN:
        raise ValueError(f"cuda_graph_block_len is at most {MAX_BLOCK_LEN}, got {block_len}")
    if config.page_size % block_len:
        raise ValueError(
            f"page_size ({config.page_size}) must be a multiple of cuda_graph_block_len ({block_len}): "
            "a page has whole blocks"
        )


def for_prompts(config: EngineConfig) -> EngineConfig:
    """The same configuration for an engine that computes prompts for another one. It drafts nothing, but has
    the drafter if the KV of a draft model is sent with the prompt."""
    if config.speculative not in (None, "ngram"):
        least = {"speculative_num_steps": 1, "speculative_topk": 1, "speculative_num_draft_tokens": 2}
        return config.updated(speculative_auto=False, **least)
    names = ("draft_model", "num_steps", "topk", "num_draft_tokens")
    shape: dict[str, Any] = {f"speculative_{name}": None for name in names}
    return config.updated(speculative=None, speculative_auto=False, **shape)
