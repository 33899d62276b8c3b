"""Checks deterministic mode: a request's tokens and log-probabilities have the same bits in any batch.

No near tie is accepted in this mode, in any dtype: level L3 requires equal bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from diptych.shared.engine.llm import LLM
from diptych.shared.tools.conformance.clauses.compare import expect_equal
from diptych.shared.tools.conformance.whole_engine.switches import prompts
from diptych.shared.types import GenerateOutput, SamplingParams

LOGPROBS: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 3, "ignore_eos": True}
PARAMS = (
    SamplingParams(temperature=0.0, **LOGPROBS),
    SamplingParams(temperature=0.8, top_p=0.9, seed=3, **LOGPROBS),
    SamplingParams(temperature=1.2, seed=4, logprob_start_len=0, **LOGPROBS),
    SamplingParams(temperature=1.0, top_k=20, frequency_penalty=0.5, seed=5, **LOGPROBS),
)
"""One of these for each prompt, in turn."""

NUM_PROMPTS = 4
"""The last of those of level L3: two that share a prefix, and two short ones."""

DETERMINISTIC_SWITCHES: tuple[dict[str, Any], ...] = (
    {
        "chunked_prefill_size": 32,
        "enable_mixed_chunk": True,
        "max_total_tokens": 92,  # memory is short: retraction
        "schedule_conservativeness": 0.01,
    },
    {"page_size": 16, "chunked_prefill_size": 16},
    {"chunked_prefill_size": None, "disable_radix_cache": True, "disable_cuda_graph": True},
    {"max_running_requests": 3, "schedule_policy": "random", "cuda_graph_bs": (3,)},
    {"speculative": "ngram", "speculative_topk": 1, "chunked_prefill_size": 64},
)
"""flags of EngineConfig that must not change a bit"""


def engine(model: str, **flags: Any) -> LLM:
    return LLM(
        model=model,
        **{"deterministic": True, "max_total_tokens": 4096, "check_invariants": True, **flags},
    )


def all_at_once(llm: LLM, num_new_tokens: int, num_prompts: int = NUM_PROMPTS) -> list[GenerateOutput]:
    todo = prompts(llm)[-num_prompts:]
    outputs = llm.generate(todo, _params(len(todo), num_new_tokens), progress=False)
    assert isinstance(outputs, list)
    return outputs


def one_by_one(llm: LLM, num_new_tokens: int, num_prompts: int = NUM_PROMPTS) -> list[GenerateOutput]:
    """Answer the prompts one by one, each with an empty cache."""
    todo = prompts(llm)[-num_prompts:]
    outputs = []
    for prompt, params in zip(todo, _params(len(todo), num_new_tokens)):
        assert llm.flush_cache()
        outputs.append(llm.generate(prompt, params, progress=False))
    return outputs  # type: ignore[return-value]


def expect_same_bits(what: str, found: Sequence[GenerateOutput], expected: Sequence[GenerateOutput]) -> None:
    """Raise `Mismatch` unless tokens and all log-probabilities are equal."""
    expect_equal(f"{what}: number of answers", len(found), len(expected))
    for i, (output, wanted) in enumerate(zip(found, expected)):
        for name in ("output_ids", "output_logprobs", "input_logprobs"):
            ours, theirs = getattr(output, name), getattr(wanted, name)
            expect_equal(f"{what}: {name} of prompt {i}", ours, theirs)


def _params(num: int, num_new_tokens: int) -> list[SamplingParams]:
    return [replace(PARAMS[i % len(PARAMS)], max_new_tokens=num_new_tokens) for i in range(num)]
