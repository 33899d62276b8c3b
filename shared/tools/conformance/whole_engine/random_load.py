"""Random load for a whole engine, all from a seed: flags, requests, and which of them are aborted or
dropped."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal

from diptych.shared.text.tokenizer import Tokenizer
from diptych.shared.tools.conformance.oracles.flag_space import draw_flags, draw_params
from diptych.shared.types import SamplingParams

MAX_PROMPT_LEN, MAX_NEW_TOKENS = 60, 32
POOL_TOKENS = (96, 160, 320, 1024)
"""The smallest holds the longest request, and hardly more."""

TEXTS = (
    "Mara is a baker. Mara lives in Bergen. Otto bought 12 eggs. Otto has a red notebook. In which city does "
    "Mara live? Mara lives in Bergen. How many eggs did Otto buy? Otto bought 12 eggs.",
    "What is 12 + 30? 12 + 30 = 42. What is 7 + 8? 7 + 8 = 15. What is 20 - 6? 20 - 6 = 14. What is 9 + 9?",
    'Write a JSON record about a baker named Mara. {"name": "Mara", "job": "baker", "city": "Bergen"}',
)

NGRAM: dict[str, Any] = {"speculative": "ngram"}
STANDALONE: dict[str, Any] = {"speculative": "standalone", "speculative_draft_model": "tiny-dense"}
EAGLE3: dict[str, Any] = {"speculative": "eagle3", "speculative_draft_model": "tiny-dense-eagle3"}
TREE = {"speculative_num_steps": 4, "speculative_topk": 2, "speculative_num_draft_tokens": 8}


def random_flags(rng: random.Random, model: str) -> dict[str, Any]:
    """Flags of an engine with scarce or ample memory, in some rounds with speculation."""
    drafts = [NGRAM, STANDALONE, {**STANDALONE, **TREE}]
    if model == "tiny-dense":  # which has a head
        drafts += [EAGLE3, {**EAGLE3, **TREE}]
    speculation = rng.choice(drafts) if rng.random() < 0.3 else {}
    flags = draw_flags(
        rng.choice,
        max_total_tokens=POOL_TOKENS,
        max_running_requests=(1, 3, 8, 16),
        max_queued_requests=(None, None, 6),
        schedule_conservativeness=(0.05, 0.3, 1.0),
        chunked_prefill_size=(None, 16, 23, 64),
        enable_mixed_chunk=(False,) if speculation else (False, True),
        max_prefill_tokens=(24, 100, 16384),
        disable_cuda_graph=(False, False, False, True),
    )
    context_len = MAX_PROMPT_LEN + MAX_NEW_TOKENS + 2
    return {"context_len": context_len, "check_invariants": True, **flags, **speculation}


@dataclass(frozen=True)
class Question:
    prompt: list[int]
    params: SamplingParams
    names: dict[str, Any]  # rid, extra_key, priority, routing_key


def random_question(rng: random.Random, rid: str, tokenizer: Tokenizer, is_greedy: bool) -> Question:
    """A random request. Prompts often share a beginning, and every sampling parameter is used by some
    request."""
    text = tokenizer.encode(rng.choice(TEXTS))
    start = rng.choice([0, 0, 0, rng.randrange(len(text))])
    prompt = text[start : start + rng.randint(1, MAX_PROMPT_LEN)]
    if rng.random() < 0.5:
        prompt[-1] = rng.randrange(tokenizer.vocab_size)
    names = {
        "rid": rid,
        "extra_key": rng.choice([None, None, "a"]),
        "priority": rng.choice([0, 0, 5, 20, 40]),
        "routing_key": rng.choice([None, "x", "y"]),
    }
    return Question(prompt, SamplingParams(**_random_params(rng, len(prompt), tokenizer, is_greedy)), names)


def _random_params(
    rng: random.Random, prompt_len: int, tokenizer: Tokenizer, is_greedy: bool
) -> dict[str, Any]:
    params = draw_params(rng, tokenizer.vocab_size) | {
        "max_new_tokens": rng.choice([0, 1, 5, 20, MAX_NEW_TOKENS]),
        "n": rng.choice([1, 1, 1, 2]),
        "min_p": rng.choice([0.0, 0.0, 0.05]),
        "ignore_eos": rng.random() < 0.3,
        "no_stop_trim": rng.random() < 0.3,
    }
    if is_greedy:
        params["temperature"] = 0.0
    if params.get("return_logprob"):
        params["logprob_start_len"] = rng.choice([-1, 0, prompt_len - 1])
    if rng.random() < 0.3:
        params["stop"] = rng.choice([(".",), ("ar", "2 ="), (" is a",)])
    if rng.random() < 0.1:
        params["stop_regex"] = (r"\d+ =",)
    if rng.random() < 0.2:
        params["stop_token_ids"] = tuple(rng.sample(range(tokenizer.vocab_size), 5))
        params["min_new_tokens"] = min(3, params["max_new_tokens"])
    return params


Act = Literal["submit", "stream", "read", "step", "abort", "drop", "retract", "flush"]
WEIGHTS: dict[Act, int] = {
    "submit": 8, "stream": 4, "read": 10, "step": 10, "abort": 2, "drop": 1, "retract": 2, "flush": 1,
}  # fmt: skip
"""read: the next piece of a stream; drop: a stream whose reader leaves"""


def random_act(rng: random.Random) -> Act:
    return rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
