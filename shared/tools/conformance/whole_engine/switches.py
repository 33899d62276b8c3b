"""Level L3: the answers are the same for every setting of the engine's switches.

Real text on the built-in models, greedy, with the invariants checked after every step. In float32 the answers
are equal to the token; in a half type they may differ where two tokens are nearly equally likely.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from diptych.shared.engine.llm import LLM
from diptych.shared.tools.conformance.clauses.compare import Mismatch, expect_equal
from diptych.shared.tools.conformance.clauses.tolerance import NEAR_TIE
from diptych.shared.types import GenerateOutput, SamplingParams

NUM_NEW_TOKENS = 32
GREEDY = SamplingParams(max_new_tokens=NUM_NEW_TOKENS, temperature=0.0, ignore_eos=True)

STORY = (
    "Mia has a red kite and three apples. Tom went to the harbour with a green box. "
    "Later Mia gave one apple to Tom. The old baker lives near the mill and owns a blue cart. "
)
QUESTIONS = (
    "Who has the kite?",
    "What colour is the box?",
    "How many apples does Mia have now?",
    "Where does the baker live?",
    "Write the facts about Tom as a list.",
    "What is 17 + 25?",
)

SWITCHES: tuple[dict[str, Any], ...] = (
    {},
    {"disable_radix_cache": True},
    {"page_size": 4},
    {"page_size": 16},
    {"page_size": 16, "disable_radix_cache": True, "chunked_prefill_size": 64},
    {"chunked_prefill_size": 1},
    {"chunked_prefill_size": 7},
    {"chunked_prefill_size": 64},
    {"chunked_prefill_size": None},
    {"chunked_prefill_size": 7, "enable_mixed_chunk": True, "max_running_requests": 4},
    {"chunked_prefill_size": 64, "enable_mixed_chunk": True, "page_size": 4},
    {"chunked_prefill_size": 64, "enable_mixed_chunk": True, "disable_radix_cache": True},
    {"schedule_policy": "lpm"},
    {"schedule_policy": "dfs-weight", "page_size": 4},
    {"schedule_policy": "random", "max_running_requests": 3},
    {"max_running_requests": 1},
    {"num_continuous_decode_steps": 4, "page_size": 4},
    {"disable_cuda_graph": True},
    {"cuda_graph_bs": (1, 3, 6), "max_running_requests": 7},  # padding, and a batch beyond the largest
    {"max_total_tokens": 256, "schedule_conservativeness": 0.01},  # memory is short: retraction
    {
        "max_total_tokens": 256,
        "schedule_conservativeness": 0.01,
        "page_size": 16,
        "chunked_prefill_size": 32,
    },
)
"""flags of EngineConfig; the rest as it comes"""

NGRAM, STANDALONE = (
    {"speculative": "ngram"},
    {"speculative": "standalone", "speculative_draft_model": "tiny-dense"},
)
TREES = {"speculative_num_steps": 5, "speculative_topk": 4, "speculative_num_draft_tokens": 16}

SPECULATION_SWITCHES: tuple[dict[str, Any], ...] = (
    {**NGRAM, "speculative_topk": 1, "page_size": 16, "chunked_prefill_size": 64},
    {**NGRAM, "max_total_tokens": 256, "schedule_conservativeness": 0.01},  # memory is short: retraction
    {**STANDALONE, **TREES, "page_size": 4, "chunked_prefill_size": 7},
    {**STANDALONE, **TREES, "speculative_auto": True, "disable_radix_cache": True},
)
"""Those of speculative decoding, for schedulers that speculate."""

GRAPH_SWITCHES: tuple[dict[str, Any], ...] = (
    {"disable_cuda_graph": True},
    {"cuda_graph_bs": (3, 8)},  # every batch but two is padded
    {"cuda_graph_bs": (1,)},  # larger batches run without
    {"cuda_graph_max_tokens": 0},
    {"cuda_graph_max_tokens": 64, "chunked_prefill_size": 150},  # larger prefill steps run without
)
"""Those that mean something where steps are replayed from CUDA graphs."""

NUM_ALTERNATIVES = 5


def prompts(llm: LLM) -> list[list[int]]:
    """Chats that share a long prefix, one that shares nothing, and one of a single token."""
    assert llm.tokenizer is not None
    chats = [llm.tokenizer.chat([{"role": "user", "content": STORY + q}]) for q in QUESTIONS]
    return [*chats, llm.tokenizer.encode("1 2 3 4 5 6 7"), chats[0][:1]]


@cache
def answers_alone(model: str, **flags: Any) -> list[list[int]]:
    """The answer of each prompt alone, without cache and chunks, which every setting must give. Computed
    once."""
    plain = {"disable_radix_cache": True, "chunked_prefill_size": None, "dtype": "float32"}
    llm = LLM(model=model, **{**plain, **flags})
    return [llm.generate(prompt, GREEDY, progress=False).output_ids for prompt in prompts(llm)]  # type: ignore[union-attr]


def expect_answers(model: str, expected: list[list[int]], **flags: Any) -> None:
    """Answer all prompts concurrently under these flags. Raises `Mismatch` unless each has its expected
    output ids."""
    for i, (ids, wanted) in enumerate(zip(_answers(model, flags), expected)):
        expect_equal(f"prompt {i} with {flags}", ids, wanted)


def answers_with_alternatives(model: str, **flags: Any) -> list[GenerateOutput]:
    """Answer all prompts concurrently; each token with its logprob and those of the likeliest
    alternatives."""
    llm = LLM(model=model, **flags)
    params = replace(GREEDY, return_logprob=True, top_logprobs_num=NUM_ALTERNATIVES)
    return llm.generate(prompts(llm), params, progress=False)  # type: ignore[return-value]


def expect_near_answers(model: str, expected: list[GenerateOutput], dtype: str, **flags: Any) -> int:
    """Like `expect_answers`, in a half type: where an answer differs from the expected one
    (`answers_with_alternatives`), its token must be nearly as likely. The rest of that answer is not
    compared. Returns how many answers differ. In deterministic mode none may."""
    num_near_ties = 0
    for i, (ids, wanted) in enumerate(zip(_answers(model, {**flags, "dtype": dtype}), expected)):
        if ids == wanted.output_ids:
            continue
        place = next(k for k, pair in enumerate(zip(ids, wanted.output_ids)) if pair[0] != pair[1])
        taken = wanted.output_logprobs[place]
        gaps = {other: (taken.logprob or 0.0) - logprob for other, logprob in taken.top}
        gap = gaps.get(ids[place], math.inf)
        if gap >= NEAR_TIE[getattr(torch, dtype)] or flags.get("deterministic"):
            where = f"prompt {i}, output token {place} with {flags}: logits {gap:.3g} apart"
            raise Mismatch(where, wanted.output_ids[place], ids[place])
        num_near_ties += 1
    return num_near_ties


def _answers(model: str, flags: dict[str, Any]) -> list[list[int]]:
    """The answers of all prompts, run concurrently."""
    plain = {"max_total_tokens": 8192, "check_invariants": True, "dtype": "float32"}
    llm = LLM(model=model, **{**plain, **flags})
    outputs = llm.generate(prompts(llm), GREEDY, progress=False)
    assert isinstance(outputs, list)
    assert len(outputs) == len(QUESTIONS) + 2
    return [output.output_ids for output in outputs]
