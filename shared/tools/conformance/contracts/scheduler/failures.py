"""Clauses of the scheduler: aborts and failures of requests and models leave no memory behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from diptych.shared.interfaces import Scheduler
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case, page_sizes, table
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal, expect_raises, expect_true
from diptych.shared.tools.conformance.contracts.scheduler.schedules import PROMPT, harness_for
from diptych.shared.tools.conformance.oracles.answer_alone import EveryThird
from diptych.shared.tools.conformance.oracles.ledger import expected_tokens
from diptych.shared.tools.conformance.oracles.scheduler_harness import VOCAB_SIZE, decode_text
from diptych.shared.types import FinishError, FinishToken

PAGES = page_sizes(1, 4)


@contract("What a request leaves in the cache when a stop token ends it is right, to its last token.", PAGES)
def stopped_request_is_cached(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl, page_size=case.page_size)
    tokens = expected_tokens(PROMPT, 20, VOCAB_SIZE)
    harness.submit([3, 2, 1], 30)
    for num_tokens in (1, 2, 5, 6):
        rid = harness.submit(PROMPT, 20, eos=frozenset([tokens[num_tokens - 1]]))
        while rid not in harness.ended:
            harness.step()
        expect_equal("its reason", harness.ended[rid], FinishToken(tokens[num_tokens - 1]))
        again = harness.submit([*PROMPT, *harness.tokens[rid], 5], 3)
        while again not in harness.ended:
            harness.step()
        harness.expect(again, 3)
    harness.run()
    harness.expect_idle()


@contract("A model that fails in the middle: tokens so far stay right, and so does what was cached.", PAGES)
def fails_in_the_middle(impl: type[Scheduler], case: Case) -> None:
    tokens = expected_tokens(PROMPT, 8, VOCAB_SIZE)
    harness = harness_for(impl, page_size=case.page_size, fail_token=tokens[3])
    rid = harness.submit(PROMPT, 30)
    harness.run()
    expect_true("it ends with FinishError", isinstance(harness.ended[rid], FinishError), harness.ended[rid])
    expect_equal("its tokens", harness.tokens[rid], tokens[:4])
    harness.model_runner.fail_token = None
    again = harness.submit([*PROMPT, *tokens[:4]], 4)
    harness.run()
    harness.expect(again, 4)
    harness.expect_idle()


@contract("A model that fails on a prompt: nothing of it is found afterwards.", PAGES)
def fails_on_a_prompt(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl, page_size=case.page_size, fail_token=60)
    rid = harness.submit([*PROMPT, 60], 4)
    harness.run()
    expect_true("it ends with FinishError", isinstance(harness.ended[rid], FinishError), harness.ended[rid])
    harness.model_runner.fail_token = None
    again = harness.submit([*PROMPT, 60, 3], 4)
    harness.run()
    expect_equal("num_cached_tokens", harness.reqs[again].num_cached_tokens, 0)
    harness.expect(again, 4)
    harness.expect_idle()


@contract("The batch before the one that fails is reported whole.", PAGES)
def reports_before_it_fails(impl: type[Scheduler], case: Case) -> None:
    tokens = expected_tokens(PROMPT, 8, VOCAB_SIZE)
    mate_tokens = expected_tokens([4, 2], 30, VOCAB_SIZE)
    assert tokens[3] not in mate_tokens[:4]
    harness = harness_for(impl, page_size=case.page_size, fail_token=tokens[3])
    rid = harness.submit(PROMPT, 30)
    stopped = harness.submit([4, 2], 30, eos=frozenset([mate_tokens[3]]))
    harness.run()
    expect_equal("its tokens", harness.tokens[rid], tokens[:4])
    expect_equal("the reason of the one that stopped", harness.ended[stopped], FinishToken(mate_tokens[3]))
    harness.model_runner.fail_token = None
    again = harness.submit([4, 2, *mate_tokens[:4]], 4)
    harness.run()
    harness.expect(again, 4)
    harness.expect_idle()


@contract("A sampler that fails ends its batch with FinishError and leaves the others alone.", EXAMPLE)
def failing_sampler(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl)
    first = harness.submit(PROMPT, 6)
    for _ in range(3):
        harness.step()
    sampler, sample = harness.sampler, harness.sampler.sample
    sampler.sample = _raise
    harness.step()
    sampler.sample = sample
    later = harness.submit([3, 4], 5)
    harness.run()
    reason = harness.ended[first]
    expect_true("it ends with FinishError", isinstance(reason, FinishError), reason)
    num_tokens = len(harness.tokens[first])
    expect_equal("its tokens", harness.tokens[first], expected_tokens(PROMPT, num_tokens, VOCAB_SIZE))
    harness.expect(later, 5)
    harness.expect_idle()


class Refuses(EveryThird):
    """Fails at its first call with this number of tokens."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.has_failed = False

    def next_tokens(self, output_ids: Sequence[int], vocab_size: int) -> torch.Tensor:
        if len(output_ids) == self.num_tokens and not self.has_failed:
            self.has_failed = True
            raise RuntimeError("the grammar fails on purpose")
        return super().next_tokens(output_ids, vocab_size)


@contract("A grammar that fails ends its batch with FinishError and leaves the others alone.", EXAMPLE)
def failing_grammar(impl: type[Scheduler], case: Case) -> None:
    for num_tokens in range(3):
        harness = harness_for(impl, is_spread=True, max_running_requests=1)
        bad = harness.submit(PROMPT, 9, grammar=Refuses(num_tokens))
        later = harness.submit([3, 4], 5)
        harness.run()
        reason = harness.ended[bad]
        expect_true("it ends with FinishError", isinstance(reason, FinishError), reason)
        expect_equal("how many tokens it has", len(harness.tokens[bad]), num_tokens)
        harness.expect_what_it_gets_alone(later)
        harness.expect_idle()


@contract("No request is retracted for memory that a finishing request is about to free.", EXAMPLE)
def looks_before_it_retracts(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl, pool_tokens=16, schedule_conservativeness=0.01)
    tokens = expected_tokens([2, 2, 2], 5, VOCAB_SIZE)
    harness.submit([3, 3, 3], 8)
    harness.step()
    harness.step()
    stopped = harness.submit([2, 2, 2], 8, eos=frozenset([tokens[4]]))
    harness.run()
    harness.expect(stopped, 5)
    expect_equal("retractions", harness.scheduler.stats().num_retractions, 0)


@contract("A cache may be flushed as soon as the last request has ended or was aborted.", PAGES)
def flush_when_idle(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl, page_size=case.page_size)
    tokens = expected_tokens(PROMPT, 8, VOCAB_SIZE)
    for num_steps in range(1, 6):
        rid = harness.submit(PROMPT, 8, eos=frozenset([tokens[3]]))
        for _ in range(num_steps):
            harness.step()
        harness.scheduler.abort(rid)
        expect_true("flush_cache()", harness.scheduler.flush_cache())
        expect_equal("free slots", harness.allocator.available_size(), harness.allocator.size)
        again = harness.submit(PROMPT, 8)
        harness.run()
        harness.expect(again, 8)
        expect_true("flush_cache()", harness.scheduler.flush_cache())


@contract(
    "Forgetting all KV loses no request and no token: requests compute it again, and nothing else is left.",
    table(
        "chunk num_steps",
        *(
            (f"{'chunks of 6' if chunk else 'no chunks'}, after {num_steps} steps", chunk, num_steps)
            for chunk in (None, 6)
            for num_steps in range(5)
        ),
    ),
)
def forgets_kv(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl, chunked_prefill_size=case.chunk, max_running_requests=2)
    rids = [harness.submit([*PROMPT, i], 9) for i in range(3)]
    for _ in range(case.num_steps):
        harness.step()
    for output in harness.scheduler.forget_kv():
        harness.tokens[output.rid] += output.new_token_ids
    expect_equal("free slots", harness.allocator.available_size(), harness.allocator.size)
    state = harness.scheduler.state()
    expect_equal("requests that hold memory", [*state.running, state.chunked_req], [None])
    expect_equal("cached prefixes", len(list(harness.tree_cache.nodes())), 0)
    tokens = sum(len(harness.tokens[rid]) for rid in rids)
    expect_equal("tokens of the requests", tokens, sum(len(harness.reqs[rid].output_ids) for rid in rids))
    harness.run()
    for rid in rids:
        harness.expect(rid, 9)
    harness.expect_idle()


ERRORS = table(
    "error num_texts",
    ("an exception", RuntimeError, 0),
    ("an exception at the second request", RuntimeError, 1),
    ("Ctrl-C", KeyboardInterrupt, 0),
    ("Ctrl-C at the second request", KeyboardInterrupt, 1),
)


class FailsOnce:
    """A decode_text that raises the error of `case` after `num_texts` calls."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.num_calls = 0

    def __call__(self, ids: Sequence[int]) -> str:
        self.num_calls += 1
        if self.num_calls == self.case.num_texts + 1:
            raise self.case.error("on purpose")
        return decode_text(ids)


@contract(
    "An error while results are processed ends that batch's requests; none of its KV is cached.", ERRORS
)
def fails_while_processing(impl: type[Scheduler], case: Case) -> None:
    for num_steps in range(4):
        harness = harness_for(impl, chunked_prefill_size=6)
        rids = [harness.submit([*PROMPT, i], 9, stop=("never",)) for i in range(3)]
        for _ in range(num_steps):
            harness.step()
        harness.decode_text = FailsOnce(case)
        num_raised = 0
        while harness.scheduler.has_work():
            try:
                harness.step()
            except KeyboardInterrupt:
                num_raised += 1
        expect_equal("interrupts", num_raised, int(case.error is KeyboardInterrupt))
        failed = [rid for rid in rids if isinstance(harness.ended[rid], FinishError)]
        expect_true("requests of the batch end with FinishError", bool(failed), harness.ended)
        for rid in rids:
            prompt, num_tokens = harness.reqs[rid].origin_input_ids, len(harness.tokens[rid])
            expect_equal("tokens", harness.tokens[rid], expected_tokens(prompt, num_tokens, VOCAB_SIZE))
        again = harness.submit([*PROMPT, 0], 9)
        harness.run()
        harness.expect(again, 9)
        harness.expect_idle()


@contract(
    "An error while a batch is formed is raised; all requests end, and the engine goes on with empty pools.",
    table(
        "part methods",
        ("in the policy", "policy", ("order",)),
        ("before a row is taken", "req_to_token_pool", ("alloc",)),
        ("before slots are taken", "allocator", ("alloc_extend",)),
        ("before slots are written", "req_to_token_pool", ("write", "write_ragged")),
    ),
)
def fails_while_forming(impl: type[Scheduler], case: Case) -> None:
    """`methods` of the harness's `part` fail when they are called."""
    harness = harness_for(impl, chunked_prefill_size=6)
    running = harness.submit([1, 2, 3], 12)
    for _ in range(3):
        harness.step()
    rids = [running, *(harness.submit([*PROMPT, i], 9) for i in range(3))]
    part = getattr(harness.scheduler.parts, case.part)
    originals = {name: getattr(part, name) for name in case.methods}
    for name in originals:
        setattr(part, name, _raise)
    expect_raises("step", RuntimeError, harness.step)
    for name, original in originals.items():
        setattr(part, name, original)
    harness.run()
    for rid in rids:
        reason = harness.ended[rid]
        expect_true("each ends with FinishError", isinstance(reason, FinishError), reason)
    expect_equal("free slots", harness.allocator.available_size(), harness.allocator.size)
    again = harness.submit(PROMPT, 5)
    harness.run()
    harness.expect(again, 5)
    harness.expect_idle()


def _raise(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("on purpose")
