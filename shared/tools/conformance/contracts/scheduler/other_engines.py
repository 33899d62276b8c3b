"""Clauses of the scheduler: prompts that another engine has computed, memory that it still reads, and other
engines in the same process."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from typing import Any

import torch

from diptych.shared.interfaces import RadixKey, Scheduler
from diptych.shared.scheduling.pages import round_down_to_page, round_up_to_page
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case, grid, table
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import Mismatch, expect_equal
from diptych.shared.tools.conformance.contracts.scheduler.schedules import harness_for
from diptych.shared.tools.conformance.oracles.ledger import expected_tokens
from diptych.shared.tools.conformance.oracles.ledger_drafter import silent
from diptych.shared.tools.conformance.oracles.scheduler_harness import VOCAB_SIZE, SchedulerHarness
from diptych.shared.tools.conformance.oracles.speculative_harness import CHAIN
from diptych.shared.tools.conformance.oracles.speculative_harness import harness_for as speculating
from diptych.shared.types import FinishError, FinishLength, ForwardBatch, Req, SamplingParams, StepOutput

PROMPT = [5, 17, 3, 3, 42, 8, 1, 9, 30, 2]
LIMIT = 5.0
"""Seconds for the work of an engine beside one that is held; it needs some hundredths."""


@contract(
    "A prompt that another engine has computed runs at once: none of its tokens is computed, and its KV is "
    "cached.",
    table(
        "page_size num_cached num_cached_meanwhile num_tokens",
        *(
            (f"page {page_size}, {cached} cached, {meanwhile} meanwhile, {num_tokens} tokens",
             page_size, cached, meanwhile, num_tokens)
            for page_size, cached, meanwhile, num_tokens in (
                (1, 0, 0, 6), (4, 0, 0, 6), (4, 4, 0, 6), (1, 3, 8, 6), (4, 0, 8, 6), (4, 4, 0, 1)
            )
        ),
    ),
)  # fmt: skip
def computed_elsewhere(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl, page_size=case.page_size)
    _cache(harness, case.num_cached)
    there = harness.submit(PROMPT, 9, extra_key="another engine")
    while not harness.tokens[there]:
        harness.step()
    tree, allocator, num_prompt = harness.tree_cache, harness.allocator, len(PROMPT)
    match = tree.match_prefix(RadixKey(PROMPT[: round_down_to_page(num_prompt - 1, case.page_size)]))
    tree.inc_lock_ref(match.last_node)
    prefix = match.device_indices
    slots = allocator.alloc(round_up_to_page(num_prompt, case.page_size) - len(prefix))
    slots = torch.cat([prefix, slots])[:num_prompt]
    source = harness.req_to_token_pool.read(harness.reqs[there].req_pool_idx, 0, num_prompt)
    harness.kv_pool.move(slots[len(prefix) :], source[len(prefix) :])
    _cache(harness, case.num_cached_meanwhile, is_checked=False)
    harness.scheduler.abort(there)
    while there not in harness.ended:
        for output in harness.scheduler.step():
            if output.finished_reason is not None:
                harness.ended[output.rid] = output.finished_reason

    params = SamplingParams(temperature=0.0, max_new_tokens=case.num_tokens)
    req = Req("here", PROMPT, params, seed=0, prefix_indices=slots, last_node=match.last_node)
    req.cache_protected_len = len(prefix)
    harness.reqs["here"], harness.tokens["here"], harness.logprobs["here"] = req, [], []
    first = expected_tokens(PROMPT, 1, VOCAB_SIZE)
    num_before = harness.model_runner.num_computed_tokens
    harness.scheduler.add_computed(req, StepOutput("here", first, 1))
    found = tree.match_prefix(RadixKey(PROMPT)).device_indices
    expect_equal("cached tokens", len(found), round_down_to_page(num_prompt, case.page_size))
    harness.run()
    harness.expect("here", case.num_tokens)
    expect_equal("its reason", harness.ended["here"], FinishLength(case.num_tokens))
    num_computed = harness.model_runner.num_computed_tokens - num_before
    expect_equal("computed tokens", num_computed, case.num_tokens - 1)
    harness.expect_idle()


def _cache(harness: SchedulerHarness, num_tokens: int, is_checked: bool = True) -> None:
    """Let a request cache the beginning of the prompt. is_checked: every slot has an owner."""
    if num_tokens:
        rid = harness.submit(PROMPT[:num_tokens], 1)
        if is_checked:
            harness.run()
        while rid not in harness.ended and not harness.reqs[rid].finished:
            harness.scheduler.step()


@contract(
    "A drafter that reads no hidden states gets a prompt that another engine has computed once: "
    "every token behind the cached prefix, with its position, its slot, and the token that follows.",
    grid("page {page_size}, {num_cached} cached", page_size=(1, 4), num_cached=(0, 6)),
)
def drafts_behind_another_engine(impl: type[Scheduler], case: Case) -> None:
    harness = speculating(impl, silent, CHAIN, page_size=case.page_size)
    if harness is None:
        return
    assert harness.drafter is not None
    _cache(harness, case.num_cached)
    tree, num_prompt = harness.tree_cache, len(PROMPT)
    match = tree.match_prefix(RadixKey(PROMPT[: round_down_to_page(num_prompt - 1, case.page_size)]))
    tree.inc_lock_ref(match.last_node)
    prefix = match.device_indices
    slots = harness.allocator.alloc(round_up_to_page(num_prompt, case.page_size) - len(prefix))
    slots = torch.cat([prefix, slots])[:num_prompt]
    given: list[tuple[int, ...]] = []

    def extend(reqs: Any, batch: ForwardBatch, hidden_states: Any, next_token_ids: torch.Tensor) -> None:
        columns = (batch.input_ids, batch.positions, batch.out_cache_loc)
        behind = [*batch.input_ids.tolist()[1:], int(next_token_ids)]
        given.extend(zip(*(column.tolist() for column in columns), behind))

    harness.drafter.extend = extend  # type: ignore[method-assign, assignment]
    params = SamplingParams(temperature=0.0, max_new_tokens=9)
    req = Req("here", PROMPT, params, seed=0, prefix_indices=slots, last_node=match.last_node)
    req.cache_protected_len = len(prefix)
    harness.reqs["here"], harness.tokens["here"], harness.logprobs["here"] = req, [], []
    first = expected_tokens(PROMPT, 1, VOCAB_SIZE)
    harness.scheduler.add_computed(req, StepOutput("here", first, 1))
    rows = zip(PROMPT, range(num_prompt), slots.tolist(), [*PROMPT[1:], *first])
    expect_equal("token, position, slot and next token", given, [*rows][len(prefix) :])
    harness.scheduler.abort("here")
    harness.run()
    harness.expect_idle()


@contract("A prompt that does not fit runs as soon as memory comes back that no request had.", EXAMPLE)
def memory_comes_back(impl: type[Scheduler], case: Case) -> None:
    harness = harness_for(impl, pool_tokens=32, context_len=64)
    first = harness.submit(PROMPT * 2, 1)
    harness.run()
    tree = harness.tree_cache
    node = tree.match_prefix(RadixKey(PROMPT * 2)).last_node
    tree.inc_lock_ref(node)  # a transport reads it
    rid = harness.submit([1, *PROMPT, *PROMPT], 3)
    for _ in range(3):
        harness.scheduler.step()
    expect_equal("tokens without memory", harness.reqs[rid].output_ids, [])
    tree.dec_lock_ref(node)
    harness.run(max_steps=20)
    harness.expect(first, 1)
    harness.expect(rid, 3)
    harness.expect_idle()


@contract(
    "An engine in a thread of its own, as a replica has, waits for no other one: it goes on while the other "
    "is in a step, and after an error of the other.",
    table("error", ("the other goes on", False), ("the other has an error", True)),
)
def replicas_in_threads(impl: type[Scheduler], case: Case) -> None:
    held, free = harness_for(impl), harness_for(impl)
    is_inside, goes_on = threading.Event(), threading.Event()
    forward = held.model_runner.forward

    def held_forward(batch: Any) -> Any:
        is_inside.set()
        goes_on.wait(2 * LIMIT)
        if case.error:
            raise RuntimeError("this replica has an error")
        return forward(batch)

    held.model_runner.forward = held_forward  # type: ignore[method-assign, assignment]
    first, other = held.submit(PROMPT, 4), free.submit(PROMPT[::-1], 6)
    with ThreadPoolExecutor(2) as threads:
        held_run = threads.submit(held.run)
        try:
            is_inside.wait(LIMIT)
            threads.submit(free.run).result(LIMIT)
        except Late:
            raise Mismatch("an engine beside one that is in a step", "an end", "it waits") from None
        finally:
            goes_on.set()
        held_run.result(LIMIT)
    free.expect(other, 6)
    expect_equal("how the held request ends", isinstance(held.ended[first], FinishError), case.error)
    if not case.error:
        held.expect(first, 4)
    later = free.submit(PROMPT, 3)
    free.run()
    free.expect(later, 3)
    held.expect_idle()
    free.expect_idle()
