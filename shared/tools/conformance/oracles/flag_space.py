"""The flags and sampling parameters from which random schedules and random load are drawn."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

POLICIES = ("fcfs", "lpm", "dfs-weight", "lof", "random", "routing-key")
EVICTION_POLICIES = ("lru", "lfu", "fifo", "priority")
PAGE = "page_size"
"""As a value of chunked_prefill_size: a page."""

FLAGS: dict[str, tuple[Any, ...]] = {
    "page_size": (1, 1, 4, 16),
    "chunked_prefill_size": (None, PAGE, 16, 23),
    "enable_mixed_chunk": (False, True),
    "disable_radix_cache": (False, False, False, True),
    "schedule_policy": POLICIES,
    "enable_priority_scheduling": (False, True),
    "eviction_policy": EVICTION_POLICIES,
    "max_running_requests": (1, 3, 8),
    "max_prefill_tokens": (8, 64, 1000),
    "schedule_conservativeness": (0.1, 1.0),
    "in_batch_prefix_check_threshold": (0, 32),
    "in_batch_prefix_deprioritize_threshold": (4, 32),
}
"""Flag -> values, some of them more often."""


def draw_flags(pick: Callable[[Sequence[Any]], Any], **other: tuple[Any, ...]) -> dict[str, Any]:
    """A valid combination. `pick` chooses a value; `other` are more flags, or other values of these."""
    flags = {name: pick(values) for name, values in {**FLAGS, **other}.items()}
    if flags["chunked_prefill_size"] == PAGE:
        flags["chunked_prefill_size"] = flags["page_size"]
    flags["enable_priority_scheduling"] &= flags["schedule_policy"] in ("fcfs", "lof")
    return flags


def draw_params(rng: random.Random, vocab_size: int) -> dict[str, Any]:
    """Fields of SamplingParams, valid together, for a prompt of at least one token."""
    params: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.7, 1.5]),
        "seed": rng.randrange(2**40),
        "top_k": rng.choice([-1, -1, 5]),
        "top_p": rng.choice([1.0, 1.0, 0.8]),
    }
    if rng.random() < 0.35:
        params["frequency_penalty"] = rng.choice([0.0, 1.3])
        params["presence_penalty"] = rng.choice([0.0, 0.9])
        params["repetition_penalty"] = rng.choice([1.0, 1.8])
    if rng.random() < 0.3:
        params["logit_bias"] = {rng.randrange(vocab_size): rng.choice([2.0, -float("inf")])}
    if rng.random() < 0.3:
        params["return_logprob"] = True
        params["top_logprobs_num"] = rng.choice([0, 2])
        params["logprob_start_len"] = rng.choice([-1, 0])
    return params
