"""Requests that a server runs before the first one: kernels are compiled and tuned when they are first
launched, and the first client should not wait for that."""

from __future__ import annotations

import random

from diptych.shared.interfaces import Scheduler
from diptych.shared.types import FinishError, Req, SamplingParams

PROMPT_LENS = (1, 40, 500)
MAX_NEW_TOKENS = 4
PARAMS: tuple[dict[str, object], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 20},
    {"temperature": 0.8, "return_logprob": True, "top_logprobs_num": 1},
    {"temperature": 0.8, "frequency_penalty": 0.5},
)
"""One batch with each: kernels of sampling differ."""


def warm_up(scheduler: Scheduler, max_tokens: int, num_token_ids: int) -> None:
    """Leaves an empty prefix cache. `max_tokens`: for which a request has room. Raises `RuntimeError` if one
    of the requests ends in an error: so would those of clients."""
    limit = max_tokens - MAX_NEW_TOKENS
    dice = random.Random(0)
    for number, fields in enumerate(PARAMS):
        params = SamplingParams(max_new_tokens=MAX_NEW_TOKENS, ignore_eos=True, **fields)  # type: ignore[arg-type]
        for length in {max(min(length, limit), 1) for length in PROMPT_LENS}:
            ids = [dice.randrange(num_token_ids) for _ in range(length)]
            scheduler.add_request(Req(f"warm-up-{number}-{length}", ids, params, seed=number))
        while scheduler.has_work():
            for output in scheduler.step():
                if isinstance(output.finished_reason, FinishError):
                    raise RuntimeError(f"a warm-up request failed: {output.finished_reason.message}")
    scheduler.flush_cache()
