"""Clauses of the scheduler: stateful grammars and logit processors, in batches with requests without
either."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from diptych.shared.grammar.matcher import BaseGrammar, MatcherGrammar
from diptych.shared.interfaces import Scheduler
from diptych.shared.tools.conformance.clauses.case import Case, grid, table
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal
from diptych.shared.tools.conformance.contracts.scheduler import schedules
from diptych.shared.tools.conformance.oracles import speculative_harness
from diptych.shared.tools.conformance.oracles.answer_alone import EveryThird
from diptych.shared.tools.conformance.oracles.brackets import END, BracketMatcher, mask_of
from diptych.shared.tools.conformance.oracles.ledger_drafter import erratic, perfect
from diptych.shared.tools.conformance.oracles.scheduler_harness import VOCAB_SIZE, SchedulerHarness
from diptych.shared.tools.conformance.oracles.speculative_harness import CHAIN, PROMPT, TREE
from diptych.shared.types import FinishToken

SETTINGS = table(
    "shape flags",
    ("one by one", None, {}),
    ("chunks", None, {"chunked_prefill_size": 4, "page_size": 4}),
    ("mixed chunks", None, {"chunked_prefill_size": 5, "enable_mixed_chunk": True}),
    ("chains", CHAIN, {}),
    ("chains ahead", CHAIN, {"runs_ahead": True}),
    ("trees", TREE, {"page_size": 4}),
    ("trees ahead", TREE, {"runs_ahead": True}),
)


def harness_for(impl: type[Scheduler], case: Case) -> SchedulerHarness | None:
    if case.shape is None:
        return schedules.harness_for(impl, is_spread=True, **case.flags)
    guess = erratic(3, is_spread=True)
    return speculative_harness.harness_for(impl, guess, case.shape, is_spread=True, **case.flags)


class OneOfThree(BaseGrammar):
    """Allows the tokens of one residue class, which detects exchanged rows of a batch."""

    def __init__(self, residue: int) -> None:
        self.residue = residue

    def next_tokens(self, output_ids: Sequence[int], vocab_size: int) -> torch.Tensor:
        return mask_of([i for i in range(vocab_size) if i % 3 == self.residue], vocab_size)


def sum_of_outputs(output_ids: Sequence[Sequence[int]], logits: torch.Tensor) -> torch.Tensor:
    """Favours a token that depends on all previous tokens."""
    for row, ids in enumerate(output_ids):
        logits[row, sum((i + 1) * token_id for i, token_id in enumerate(ids)) % VOCAB_SIZE] += 3.0
    return logits


def no_odd_tokens(output_ids: Sequence[Sequence[int]], logits: torch.Tensor) -> torch.Tensor:
    return logits.masked_fill(torch.arange(VOCAB_SIZE) % 2 == 1, -torch.inf)


def constraints() -> list[dict[str, Any]]:
    """Constraints of each kind, grouped by kind."""
    return [
        {"grammar": OneOfThree(0)},
        {"grammar": OneOfThree(1), "temperature": 1.0},
        {"grammar": OneOfThree(2)},
        {"grammar": MatcherGrammar(BracketMatcher()), "eos": frozenset([END]), "temperature": 1.0},
        {"grammar": MatcherGrammar(BracketMatcher()), "temperature": 1.0, "ignore_eos": True},
        {},
        {"logit_processor": sum_of_outputs},
        {"logit_processor": no_odd_tokens, "temperature": 1.0},
        {"logit_processor": sum_of_outputs, "grammar": EveryThird(), "frequency_penalty": 0.5},
        {"temperature": 1.0},
    ]


@contract("Each request has its own grammar and processor; those without go on beside them.", SETTINGS)
def constrained_beside_free(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl, case)
    if harness is None:
        return
    rids = []
    for i, constraint in enumerate(constraints()):
        rids.append(harness.submit([*PROMPT[: i % 5 + 1], i], 12, seed=i + 1, **constraint))
        if i % 3 == 0:
            harness.step()
    harness.run()
    for rid in rids:
        harness.expect_what_it_gets_alone(rid)
    harness.expect_idle()


@contract("A processor is called for each token, with all tokens before it.", SETTINGS)
def processors_alone(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl, case)
    if harness is None:
        return
    rids = [
        harness.submit([*PROMPT, i], 14, seed=i + 1, logit_processor=sum_of_outputs, temperature=float(i % 2))
        for i in range(4)
    ]
    harness.run()
    for rid in rids:
        harness.expect_what_it_gets_alone(rid)
    harness.expect_idle()


@contract("A retracted request goes on under its grammar and processor as if nothing had happened.", SETTINGS)
def constrained_and_retracted(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl, case)
    if harness is None:
        return
    asked = constraints()
    rids = [harness.submit([*PROMPT, i], 10, seed=i + 1, **constraint) for i, constraint in enumerate(asked)]
    for num_steps in range(24):
        harness.step()
        harness.scheduler.retract(rids[num_steps % len(rids)])
    harness.run()
    for rid in rids:
        harness.expect_what_it_gets_alone(rid)
    harness.expect_idle()


PAIRS = tuple((i, j) for i in range(VOCAB_SIZE) for j in range(VOCAB_SIZE) if (i + 2 * j) % 5 == 0)
BANS: tuple[dict[str, Any], ...] = (
    {"bad_word_ids": PAIRS},
    {"bad_word_ids": (*PAIRS, (3,)), "temperature": 1.0},
    {"bad_word_ids": PAIRS, "logit_processor": sum_of_outputs},
    {"allowed_token_ids": tuple(range(1, VOCAB_SIZE, 2)), "eos": frozenset([7, 8, 9]), "min_new_tokens": 4},
    {"allowed_token_ids": tuple(range(0, VOCAB_SIZE, 2)), "temperature": 1.0, "logit_bias": {4: 9.0, 5: 9.0}},
    {"temperature": 1.0},
)


@contract(
    "No answer has a token that its request does not allow, nor a bad word of one or several.", SETTINGS
)
def tokens_that_are_not_allowed(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl, case)
    if harness is None:
        return
    rids = [harness.submit([*PROMPT, i], 14, seed=i + 1, **bans) for i, bans in enumerate(BANS)]
    harness.run()
    for rid, bans in zip(rids, BANS):
        harness.expect_what_it_gets_alone(rid)
        ids = harness.tokens[rid]
        bad = set(bans.get("bad_word_ids", ())) & {(i,) for i in ids}.union(pairwise(ids))
        expect_equal("bad words in the answer", bad, set())
        expect_equal("not allowed", set(ids) - set(bans.get("allowed_token_ids", ids)), set())
    harness.expect_idle()


class EndsAfter(BaseGrammar):
    """Allows any tokens, up to a maximum number."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def next_tokens(self, output_ids: Sequence[int], vocab_size: int) -> torch.Tensor:
        allowed = range(vocab_size) if len(output_ids) < self.num_tokens else ()
        return mask_of(list(allowed), vocab_size)

    def is_terminated(self, output_ids: Sequence[int]) -> bool:
        return len(output_ids) >= self.num_tokens


@contract(
    "The end of a grammar's text ends its request, also inside an accepted run: what is behind is dropped.",
    grid(
        "{length} tokens, {kind}, page {page_size}",
        length=range(1, 10),
        kind=("plain", "chain", "tree"),
        page_size=(1, 4),
    ),
)
def end_of_a_grammar(impl: type[Scheduler], case: Case) -> None:
    if case.kind == "plain":
        harness: SchedulerHarness | None = schedules.harness_for(impl, page_size=case.page_size)
    else:
        shape = CHAIN if case.kind == "chain" else TREE
        harness = speculative_harness.harness_for(impl, perfect, shape, page_size=case.page_size)
    if harness is None:
        return
    rid = harness.submit(PROMPT, 20, grammar=EndsAfter(case.length), ignore_eos=True)
    mate = harness.submit([*PROMPT, 1], 20)
    harness.run()
    harness.expect(rid, case.length)
    harness.expect(mate, 20)
    expect_equal("its reason", harness.ended[rid], FinishToken(harness.tokens[rid][-1]))
    again = harness.submit([*PROMPT, *harness.tokens[rid], 2], 5)
    harness.run()
    harness.expect(again, 5)
    harness.expect_idle()
