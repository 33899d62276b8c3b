"""Clauses of the scheduler: each request gets the sampling results that it gets alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from diptych.shared.interfaces import Scheduler
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case, grid, table
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal
from diptych.shared.tools.conformance.contracts.scheduler.schedules import PROMPT, harness_for
from diptych.shared.tools.conformance.oracles.answer_alone import EveryThird
from diptych.shared.tools.conformance.oracles.ledger import expected_tokens
from diptych.shared.tools.conformance.oracles.scheduler_harness import VOCAB_SIZE, SchedulerHarness
from diptych.shared.tools.conformance.oracles.schedules import Schedule, random_schedule, run_schedule
from diptych.shared.types import FinishString

NUM_RANDOM_SCHEDULES = 24


@contract(
    "Under any schedule, whatever requests ask: the tokens, log-probabilities and end that each gets alone.",
    tuple(random_schedule(seed, is_spread=True) for seed in range(NUM_RANDOM_SCHEDULES)),
)
def any_schedule_of_any_requests(impl: type[Scheduler], case: Schedule) -> None:
    run_schedule(case, {"scheduler": impl})


LOGPROBS: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0}
ASKED: dict[str, Any] = {**LOGPROBS, "top_logprobs_num": 0, "token_ids_logprob": (9, 1, 30)}


@contract(
    "A sampling parameter applies to its request, from its first token to its last, and to no other.",
    table(
        "params flags",
        ("frequency penalty", {"frequency_penalty": 1.5}),
        ("presence penalty", {"presence_penalty": 1.5}),
        ("repetition penalty", {"repetition_penalty": 2.0}),
        ("bias", {"logit_bias": {3: 2.5, 7: -float("inf")}}),
        ("temperature", {"temperature": 1.2, "top_p": 0.9}),
        ("stop string over two tokens", {"stop": ("><2", "><3")}),
        ("log-probabilities", LOGPROBS),
        ("log-probabilities of named tokens", ASKED, {"chunked_prefill_size": 4}),
        ("log-probabilities in chunks", LOGPROBS, {"chunked_prefill_size": 4, "page_size": 4}),
        (
            "log-probabilities in mixed chunks",
            LOGPROBS,
            {"chunked_prefill_size": 5, "enable_mixed_chunk": True},
        ),
        flags={},
    ),
)
def parameters_of_one_request(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl, is_spread=True, **case.flags)
    rids = []
    for i in range(6):
        params = case.params if i % 2 == 0 else {}
        rids.append(harness.submit([*PROMPT[i:], i, i, 1], 12, seed=i, **params))
        harness.step()
    _expect_all(harness, rids)


@contract(
    "A stop string is found though tokens without text are inside it and its last token is long.", EXAMPLE
)
def stop_string_around_tokens_without_text(impl: type[Scheduler], case: Case) -> None:
    tokens = expected_tokens(PROMPT, 60, VOCAB_SIZE)
    last = max(i for i in range(60) if tokens[i] not in (*PROMPT, *tokens[:i]))
    first = max(
        i for i in range(last - 15) if tokens[i] not in PROMPT and tokens[:last].count(tokens[i]) == 1
    )
    texts = {tokens[first]: "a", tokens[last]: "b" + 30 * "-"}
    harness = harness_for(impl, decode_text=lambda ids: "".join(texts.get(i, "") for i in ids))
    rid = harness.submit(PROMPT, 60, stop=("ab",))
    harness.run()
    harness.expect(rid, last + 1)
    expect_equal("its reason", harness.ended[rid], FinishString("ab"))
    harness.expect_idle()


@contract("No stop token comes before min_new_tokens, and one may come right after.", EXAMPLE)
def min_new_tokens(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl, is_spread=True, chunked_prefill_size=4)
    eos = frozenset(range(5, VOCAB_SIZE))
    rids = [harness.submit([i, *PROMPT], 12, eos=eos, min_new_tokens=i) for i in range(8)]
    _expect_all(harness, rids)
    for i, rid in enumerate(rids):
        num_tokens = len(harness.tokens[rid])
        expect_equal(f"{rid} has at least {i} tokens", num_tokens >= i, True)


@contract(
    "A request that is retracted before min_new_tokens still has its stop tokens banned afterwards.", EXAMPLE
)
def min_new_tokens_after_retraction(impl: type[Scheduler], case: Case) -> None:
    for num_steps in range(2, 9):
        harness = harness_for(impl, is_spread=True)
        rid = harness.submit(PROMPT, 12, eos=frozenset(range(VOCAB_SIZE)), min_new_tokens=5)
        for _ in range(num_steps):
            harness.step()
        harness.scheduler.retract(rid)
        _expect_all(harness, [rid])


class Asked(EveryThird):
    """Records its calls."""

    def __init__(self) -> None:
        self.questions: list[list[int]] = []

    def next_tokens(self, output_ids: Sequence[int], vocab_size: int) -> torch.Tensor:
        self.questions.append(list(output_ids))
        return super().next_tokens(output_ids, vocab_size)


@contract(
    "A grammar is asked before each token, about all tokens before it; others go on beside it.", EXAMPLE
)
def grammar(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl, is_spread=True, chunked_prefill_size=6)
    asked = [Asked(), Asked()]
    rids = [harness.submit(PROMPT, 9, grammar=asked[0], frequency_penalty=1.0)]
    rids += [harness.submit([i, 2], 14, frequency_penalty=1.5, presence_penalty=0.5) for i in range(3)]
    harness.step()
    rids.append(harness.submit([4, 4], 5, grammar=asked[1], temperature=1.0, seed=5))
    _expect_all(harness, rids)
    for one, rid in zip(asked, (rids[0], rids[-1])):
        tokens = harness.tokens[rid]
        questions = [question for question in one.questions if len(question) < len(tokens)]
        for num_tokens in range(len(tokens)):
            expect_equal(f"{rid}: asked about {num_tokens} tokens", tokens[:num_tokens] in questions, True)


MOMENTS = grid(
    "{what} after {num_steps} steps, pages of {page_size}",
    what=("abort", "retract", "retract and abort", "retract twice"),
    num_steps=(1, 2, 3, 5),
    page_size=(1, 4),
)


@contract("Whenever a request is retracted or aborted: its tokens so far, then the rest or none.", MOMENTS)
def any_moment(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl, is_spread=True, page_size=case.page_size, chunked_prefill_size=8)
    rid = harness.submit([*PROMPT, *PROMPT], 10, temperature=0.8, seed=3, **LOGPROBS)
    other = harness.submit([9, 8], 14, frequency_penalty=1.5, **LOGPROBS)
    for _ in range(case.num_steps):
        harness.step()
    if "retract" in case.what:
        harness.scheduler.retract(rid)
    if case.what == "retract twice":
        harness.step()
        harness.scheduler.retract(rid)
    if "abort" in case.what:
        harness.scheduler.abort(rid)
    again = harness.submit([*PROMPT, *PROMPT], 4)
    harness.run()
    harness.expect_what_it_gets_alone(rid, may_be_aborted="abort" in case.what)
    harness.expect_what_it_gets_alone(other)
    harness.expect_what_it_gets_alone(again)
    harness.expect_idle()


def _expect_all(harness: SchedulerHarness, rids: list[str]) -> None:
    harness.run()
    for rid in rids:
        harness.expect_what_it_gets_alone(rid)
    harness.expect_idle()
