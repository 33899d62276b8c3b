"""Clauses of the prefill adder: requests that wait because this step computes their prefix."""

from __future__ import annotations

from diptych.shared import registry
from diptych.shared.interfaces import MAX_WAITS, AddReqResult, PrefillAdder, RadixKey
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal
from diptych.shared.tools.conformance.contracts.prefill_adder.budgets import Setup, req
from diptych.shared.types import Req, SamplingParams


class Shared(Case):
    """Two requests with a shared prefix. The first has 100 tokens, of which `num_cached` are in the cache."""

    num_shared = 50
    num_own = 20  # behind the shared ones
    page_size = 1
    threshold: int | None = 10
    num_cached = 0
    chunk: int | None = None
    namespace: str | None = None
    logprob_start_len = -1


@contract(
    "A request waits for a prefix that this step computes, if it is long enough and not cached.",
    (
        Shared("long enough", waits=True, num_shared=10),
        Shared("too short", waits=False, num_shared=9),
        Shared("no request waits", waits=False, threshold=None),
        Shared("threshold of no tokens: one", waits=True, num_shared=1, threshold=0),
        Shared("nothing in common", waits=False, num_shared=0, threshold=0),
        Shared("pages: long enough", waits=True, num_shared=12, page_size=4),
        Shared("pages: too short", waits=False, num_shared=11, page_size=4),
        Shared("behind a cached prefix", waits=True, num_shared=40, num_cached=30),
        Shared("behind a cached prefix: too short", waits=False, num_shared=39, num_cached=30),
        Shared("its own last token is computed in any case", waits=True, num_shared=11, num_own=0),
        Shared("but for its last token", waits=False, num_shared=10, num_own=0),
        Shared("cut: of what is computed now", waits=True, chunk=10, num_own=0),
        Shared("cut before", waits=False, chunk=9, num_own=0),
        Shared("other namespace", waits=False, namespace="a"),
        Shared("log-probabilities from there on", waits=True, logprob_start_len=11),
        Shared("log-probabilities from before", waits=False, logprob_start_len=10),
    ),
)
def prefixes_computed_now_are_waited_for(impl: type[PrefillAdder], case: Shared) -> None:
    setup = Setup(impl, page_size=case.page_size)
    if case.num_cached:
        setup.cache(list(range(1, case.num_cached + 1)))
    adder = setup.adder(in_batch_prefix_threshold=case.threshold, chunked_prefill_size=case.chunk)
    adder.add_one_req(req(100, rid="first"))
    adder.rem_chunk_tokens = None  # so that only the prefix stops the second one
    prompt = [*range(1, case.num_shared + 1), *range(200, 200 + case.num_own)]
    params = SamplingParams(
        return_logprob=case.logprob_start_len >= 0, logprob_start_len=case.logprob_start_len
    )
    second = Req("second", prompt, params, 0, extra_key=case.namespace)
    expected = AddReqResult.WAIT if case.waits else AddReqResult.CONTINUE
    expect_equal("add_one_req", adder.add_one_req(second), expected)
    expect_equal("who was added", [r.rid for r in adder.can_run_list], ["first", "second"][: 2 - case.waits])
    if case.waits:
        expect_equal("what is locked", setup.tree.protected_size(), case.num_cached)
        expect_equal("last_node", second.last_node, None)


@contract("The same tokens after a different prefix are not waited for.", EXAMPLE)
def the_same_behind_another_prefix(impl: type[PrefillAdder], case: Case) -> None:
    setup = Setup(impl)
    setup.cache(list(range(1, 31)))
    setup.cache(list(range(301, 331)))
    adder = setup.adder(in_batch_prefix_threshold=10)
    adder.add_one_req(req(100, rid="first"))
    second = Req("second", [*range(301, 331), *range(31, 101)], SamplingParams(), 0)
    expect_equal("add_one_req", adder.add_one_req(second), AddReqResult.CONTINUE)


@contract("A chunked request computes a prefix like any other.", EXAMPLE)
def a_chunked_requests_prefix_is_waited_for(impl: type[PrefillAdder], case: Case) -> None:
    setup = Setup(impl)
    waiting = req(100)
    first = setup.adder(chunked_prefill_size=60)
    first.add_one_req(waiting)
    setup.cache(waiting.fill_ids)
    found = setup.tree.match_prefix(RadixKey(waiting.fill_ids))
    waiting.prefix_indices, waiting.last_node = found.device_indices, found.last_node
    adder = setup.adder(in_batch_prefix_threshold=40)
    adder.add_chunked_req(waiting)
    same = req(101, rid="same")
    other = Req("other", [*range(1, 100), 300], SamplingParams(), 0)
    expect_equal("add_one_req", adder.add_one_req(same), AddReqResult.WAIT)
    expect_equal("add_one_req", adder.add_one_req(other), AddReqResult.CONTINUE)


@contract(
    "A waiting request does not reduce the budgets; after MAX_WAITS of them the step is full.",
    EXAMPLE,
)
def so_many_wait_and_no_more(impl: type[PrefillAdder], case: Case) -> None:
    setup = Setup(impl)
    adder = setup.adder(in_batch_prefix_threshold=10)
    adder.add_one_req(req(20, rid="first"))
    budgets = (adder.rem_total_tokens, adder.rem_input_tokens)
    for i in range(MAX_WAITS):
        expect_equal("add_one_req", adder.add_one_req(req(20, rid=f"w{i}")), AddReqResult.WAIT)
    expect_equal("budgets", (adder.rem_total_tokens, adder.rem_input_tokens), budgets)
    expect_equal("add_one_req", adder.add_one_req(req(20, rid="one more")), AddReqResult.OTHER)
    expect_equal("can_run_list", [r.rid for r in adder.can_run_list], ["first"])


@contract("Without a prefix cache no request waits.", EXAMPLE)
def no_waiting_without_a_cache(impl: type[PrefillAdder], case: Case) -> None:
    setup = Setup(impl)
    setup.tree = registry.load("chunk_cache", "reference")(1, setup.allocator)
    adder = setup.adder(in_batch_prefix_threshold=10)
    for rid in ("first", "second"):
        expect_equal("add_one_req", adder.add_one_req(req(20, rid=rid)), AddReqResult.CONTINUE)
