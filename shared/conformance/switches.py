"""Level L3: the engine's switches. Whatever they are set to, the answers are the same.

Real text on the built-in models, greedy, in float32, with the invariants checked after every step.
"""

from __future__ import annotations

from typing import Any

from shared.conformance.compare import expect_equal
from shared.engine import LLM
from shared.types import SamplingParams

NUM_NEW_TOKENS = 48
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
    {"max_total_tokens": 256, "schedule_conservativeness": 0.01},  # memory is short: retraction
    {
        "max_total_tokens": 256,
        "schedule_conservativeness": 0.01,
        "page_size": 16,
        "chunked_prefill_size": 32,
    },
)
"""flags of EngineConfig; the rest as it comes"""


def prompts(llm: LLM) -> list[list[int]]:
    """Chats that share a long prefix, one that shares nothing, and one of a single token."""
    assert llm.tokenizer is not None
    chats = [llm.tokenizer.chat([{"role": "user", "content": STORY + q}]) for q in QUESTIONS]
    return [*chats, llm.tokenizer.encode("1 2 3 4 5 6 7"), chats[0][:1]]


def answers_alone(model: str, **flags: Any) -> list[list[int]]:
    """Each prompt on its own, nothing cached, nothing cut: what every setting must give."""
    plain = {"disable_radix_cache": True, "chunked_prefill_size": None, "dtype": "float32"}
    llm = LLM(model=model, **{**plain, **flags})
    return [llm.generate(prompt, GREEDY, progress=False).output_ids for prompt in prompts(llm)]  # type: ignore[union-attr]


def expect_answers(model: str, expected: list[list[int]], **flags: Any) -> None:
    """All prompts at once under these flags: raise `Mismatch` unless each has its expected output ids."""
    plain = {"max_total_tokens": 8192, "check_invariants": True, "dtype": "float32"}
    llm = LLM(model=model, **{**plain, **flags})
    outputs = llm.generate(prompts(llm), GREEDY, progress=False)
    assert isinstance(outputs, list)
    for i, (output, ids) in enumerate(zip(outputs, expected)):
        expect_equal(f"prompt {i} with {flags}", output.output_ids, ids)
