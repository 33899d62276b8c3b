"""Clauses of the scheduler, fourth part: limits of speculation. A request ends among accepted drafts, the
context or the pool is full, or a call fails."""

from __future__ import annotations

from itertools import product
from typing import Any

from diptych.shared.interfaces import Scheduler
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case, grid, table
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal, expect_true
from diptych.shared.tools.conformance.oracles.ledger import expected_tokens
from diptych.shared.tools.conformance.oracles.ledger_drafter import erratic, perfect
from diptych.shared.tools.conformance.oracles.scheduler_harness import VOCAB_SIZE
from diptych.shared.tools.conformance.oracles.speculative_harness import PROMPT, TREE, harness_for
from diptych.shared.types import DraftShape, FinishError, FinishLength, FinishToken


@contract(
    "An end inside an accepted run counts at its token; what follows is dropped, log-probabilities too.",
    table(
        "page_size num_tokens by_text",
        *(
            (p, n, text)
            for p in (1, 4)
            for n in range(1, 13)
            for text in ((False, True) if p == 4 else (False,))
        ),
        name=lambda page_size, num_tokens, by_text: (
            f"{num_tokens} tokens, page {page_size}{', by text' * by_text}"
        ),
    ),
)
def end_inside(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl, perfect, TREE, page_size=case.page_size)
    if harness is None:
        return
    last = expected_tokens(PROMPT, case.num_tokens, VOCAB_SIZE)[-1]
    num_tokens = expected_tokens(PROMPT, 20, VOCAB_SIZE).index(last) + 1
    how: dict[str, Any] = {"stop": (f"<{last}>",)} if case.by_text else {"eos": frozenset([last])}
    rid = harness.submit(PROMPT, 20, return_logprob=True, **how)
    mate = harness.submit([*PROMPT, 1], 20)
    harness.run()
    harness.expect(rid, num_tokens)
    harness.expect(mate, 20)
    if not case.by_text:
        expect_equal("its reason", harness.ended[rid], FinishToken(last))
    logprobs = [entry for output in harness.log if output.rid == rid for entry in output.output_logprobs]
    expect_equal("tokens of its log-probabilities", [e.token_id for e in logprobs], harness.tokens[rid])
    harness.expect_idle()
    again = harness.submit([*PROMPT, *harness.tokens[rid], 2], 5)
    harness.run()
    harness.expect(again, 5)


@contract(
    "Up to the last position of the context, and not beyond.",
    grid(
        "context {context_len}, {shape}, page {page_size}",
        shape=[DraftShape(5, 1, 6), TREE, DraftShape(5, 4, 16)],
        page_size=(1, 16),
        context_len=(9, 17, 18, 19, 20, 21),
    ),
)
def context_end(impl: type[Scheduler], case: Case) -> None:
    for guess, runs_ahead in product((perfect, erratic(2)), (False, True)):
        harness = harness_for(
            impl,
            guess,
            case.shape,
            page_size=case.page_size,
            context_len=case.context_len,
            pool_tokens=128,
            runs_ahead=runs_ahead,
        )
        if harness is None:
            return
        rids = [harness.submit(PROMPT, 500), harness.submit(PROMPT[:5], 500)]
        harness.run()
        harness.expect(rids[0], case.context_len - 7)
        harness.expect(rids[1], case.context_len - 5)
        harness.expect_idle()


@contract(
    "Without room for drafts a step is a decode step; requests are retracted only if that does not fit.",
    table(
        "page_size pool_tokens num_reqs num_prompt max_new_tokens is_retracted",
        ("alone, to the pool's last slot", 1, 32, 1, 3, 30, False),
        ("alone, to the pool's last page", 16, 32, 1, 3, 30, False),
        ("two to the last slot", 1, 64, 2, 3, 30, False),
        ("eight of 28 tokens in 64 slots", 1, 64, 8, 3, 25, True),
        ("pages of 4 run out, not tokens", 4, 16, 4, 3, 3, True),
        ("pages of 16 run out", 16, 64, 4, 14, 10, True),
    ),
)
def shortage(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(
        impl,
        erratic(3),
        TREE,
        pool_tokens=case.pool_tokens,
        page_size=case.page_size,
        schedule_conservativeness=0.01,
    )
    if harness is None:
        return
    rids = [
        harness.submit(list(range(i, i + case.num_prompt)), case.max_new_tokens) for i in range(case.num_reqs)
    ]
    harness.run()
    for rid in rids:
        harness.expect(rid, case.max_new_tokens)
    if not case.is_retracted:
        expect_equal("retractions", harness.scheduler.stats().num_retractions, 0)
    harness.expect_idle()


@contract("Drafts take no cached prefix when they would not fit even then.", EXAMPLE)
def no_eviction_in_vain(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl, perfect, TREE, pool_tokens=48)
    if harness is None:
        return
    harness.submit([1, 2, 3, 4], 2)
    harness.run()
    cached = harness.tree_cache.evictable_size()
    harness.submit(list(range(5, 44)), 9)
    harness.step()
    harness.step()
    expect_equal("what stays cached", harness.tree_cache.evictable_size(), cached)
    harness.run()
    harness.expect_idle()


@contract(
    "A NaN inside a drafted path ends its own request, after the tokens before it, and no other.", EXAMPLE
)
def nan_inside(impl: type[Scheduler], case: Case) -> None:
    tokens = expected_tokens(PROMPT, 12, VOCAB_SIZE)
    others = [[1, 2], [3, 4, 5]]
    for position in (2, 3, 4, 6):
        assert all(tokens[position] not in expected_tokens(prompt, 5, VOCAB_SIZE) for prompt in others)
        harness = harness_for(impl, perfect, TREE, nan_token=tokens[position])
        if harness is None:
            return
        rid = harness.submit(PROMPT, 12, return_logprob=True)
        rids = [harness.submit(prompt, 5) for prompt in others]
        harness.run()
        reason = harness.ended[rid]
        expect_true("it ends with FinishError", isinstance(reason, FinishError), reason)
        expect_equal("its tokens", harness.tokens[rid], tokens[: tokens.index(tokens[position]) + 1])
        for other in rids:
            harness.expect(other, 5)
        harness.expect_idle()


@contract(
    "An exception from the drafter or the model ends the requests of its batch, and frees what they held.",
    table(
        "method call",
        ("while drafting", "draft", 2),
        ("after a prefill", "extend", 0),
        ("after verification", "extend", 2),
        ("in verification", "forward", 2),
    ),
)
def failure_inside(impl: type[Scheduler], case: Case) -> None:
    """`call`: the number of the call that fails."""
    harness = harness_for(impl, perfect, TREE, page_size=4, max_running_requests=2)
    if harness is None:
        return
    target = harness.model_runner if case.method == "forward" else harness.drafter
    works = getattr(target, case.method)
    calls: list[int] = []

    def fails(*args: Any) -> Any:
        calls.append(len(calls))
        if calls[-1] == case.call:
            raise RuntimeError("fails on purpose")
        return works(*args)

    setattr(target, case.method, fails)
    rids = [harness.submit([i, 1, 2], 20) for i in range(2)]
    later = harness.submit([9, 8], 20)
    harness.run()
    for rid in rids:
        reason = harness.ended[rid]
        expect_true(f"{rid} ends with FinishError", isinstance(reason, FinishError), reason)
    expect_equal("the later one's reason", harness.ended[later], FinishLength(20))
    harness.expect(later, 20)
    harness.expect_idle()
    assert harness.drafter is not None
    expect_equal("requests that the drafter still holds", harness.drafter.known, set())
