"""The clause of n-gram drafters about the requests that they draft from."""

from __future__ import annotations

from typing import Any, NamedTuple

from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal, expect_true
from diptych.shared.tools.conformance.contracts.drafter.drafting import PROMPTS, Branches, Setting, world
from diptych.shared.types import DraftShape, Req, SamplingParams

CASES = (
    Setting(
        "a chain", algorithm="ngram", shape=DraftShape(3, 1, 4), page_size=4, chunk=12, max_new_tokens=10
    ),
)


class Drafted(NamedTuple):
    """What was drafted for a request, and how much of it was accepted."""

    branches: Branches
    num_accepted: int


def drafted(impl: Any, case: Setting, *keys: str | None, is_private: bool = False) -> list[Drafted]:
    """Ask the same question under each key, one after the other."""
    assembly = world(impl, case, speculative_ngram_private=is_private, disable_radix_cache=True)
    assert assembly.tokenizer is not None
    drafter: Any = assembly.parts.drafter
    all_drafted = []
    for i, key in enumerate(keys):
        drafter.branches = set()
        req = Req(
            rid=f"r{i}",
            origin_input_ids=assembly.tokenizer.chat([{"role": "user", "content": PROMPTS[0]}]),
            sampling_params=SamplingParams(max_new_tokens=case.max_new_tokens, temperature=0.0),
            seed=i,
            eos_token_ids=assembly.model_config.eos_token_ids,
            extra_key=key,
        )
        assembly.scheduler.add_request(req)
        while assembly.scheduler.has_work():
            assembly.scheduler.step()
        all_drafted.append(Drafted(drafter.branches, req.num_accepted_tokens))
    return all_drafted


@contract(
    "What an ended request said is drafted for another one with the same `extra_key` (cache salt, adapter), "
    "and accepted where the model says it again. Requests with another `extra_key` change no draft, and with "
    "`speculative_ngram_private` no other request does.",
    CASES,
)
def ngrams_of_others(impl: Any, case: Setting) -> None:
    if isinstance(impl, type):
        return  # one drafter, whatever its algorithm
    _, first, second = drafted(impl, case, None, "a", "a")
    alone, again = drafted(impl, case, "a", "a", is_private=True)
    expect_equal("drafts after a request with another key", first, alone)
    expect_equal("private drafts, asked again", again, alone)
    expect_true("more is accepted", second.num_accepted > first.num_accepted, (second, first))
