"""Clauses of the prefill adder: random requests, compared with the reference."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal, get_args

from diptych.shared import registry
from diptych.shared.interfaces import PrefillAdder, PrefillBudget, RadixKey
from diptych.shared.tools.conformance.clauses.case import Case
from diptych.shared.tools.conformance.clauses.clause import agreement
from diptych.shared.tools.conformance.clauses.compare import expect_equal
from diptych.shared.tools.conformance.clauses.short_repr import short_repr
from diptych.shared.types import Req, SamplingParams

Kind = Literal["add", "chunk", "preempt"]


@dataclass(frozen=True, repr=False)
class Wanted:
    """A request, and the call that it comes with. `number`: for "chunk" the tokens that are computed already,
    for "preempt" the priority gap."""

    tokens: tuple[int, ...]
    kind: Kind = "add"
    number: int = 0
    max_new_tokens: int = 1
    num_output: int = 0
    priority: int = 0
    queue_start_time: int = 0
    logprob_start_len: int = -1

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind) or not self.tokens or self.num_output < 0 or self.number < 0:
            raise ValueError(f"no request: {self}")

    def req(self, rid: str) -> Req:
        params = SamplingParams(
            max_new_tokens=self.max_new_tokens, return_logprob=True, logprob_start_len=self.logprob_start_len
        )
        made = Req(rid, list(self.tokens), params, 0, output_ids=[5] * self.num_output)
        made.priority, made.queue_start_time = self.priority, float(self.queue_start_time)
        return made


def random_requests(seed: int) -> Case:
    rng = random.Random(seed)
    page_size = rng.choice([1, 1, 4, 16])

    def wanted(*kinds: Kind) -> Wanted:
        tokens = [rng.choice([1, 2])] * rng.choice([0, 7, 20]) + rng.choices([3, 4], k=rng.randint(1, 30))
        kind = rng.choice(kinds)
        number = {"chunk": rng.randrange(len(tokens)), "preempt": rng.choice([0, 10])}.get(kind, 0)
        return Wanted(
            tuple(tokens),
            kind,
            number,
            max_new_tokens=rng.choice([0, 1, 5, 40, 9000]),
            num_output=rng.randint(0, 12),
            priority=rng.randrange(0, 40, 10),
            queue_start_time=rng.randrange(3),
            logprob_start_len=rng.choice([-1, -1, 2]),
        )

    return Case(
        f"requests {seed}",
        page_size=page_size,
        num_tokens=rng.choice([8, 24, 64]) * 16,
        cached=tuple(wanted("add") for _ in range(rng.randrange(6))),
        running=tuple(wanted("add") for _ in range(rng.choice([0, 0, 1, 5]))),
        is_mixed=rng.random() < 0.5,
        max_prefill_tokens=rng.choice([16, 60, 1000]),
        chunked_prefill_size=rng.choice([0, 0, 16, 32, 50]),
        new_token_ratio=rng.choice([0.0, 0.13, 0.7, 1.0]),
        num_reserved_tokens=rng.choice([0, 9]),
        in_batch_prefix_threshold=rng.choice([-1, 0, 3, 20]),
        wanted=(
            wanted("add", "add", "chunk"),
            *(wanted("add", "add", "add", "add", "preempt") for _ in range(7)),
        ),
    )


class Run:
    """An adder over a radix tree of the reference."""

    def __init__(self, impl: type[PrefillAdder], case: Case) -> None:
        pools = registry.load("memory_pool", "reference")
        self.case = case
        self.allocator = pools.TokenToKVPoolAllocator(case.num_tokens, case.page_size, "cpu")
        rows = pools.ReqToTokenPool(8, 256, "cpu")
        self.tree = registry.load("radix_cache", "reference")(case.page_size, self.allocator, rows)
        for one in case.cached:
            value = self.allocator.alloc(len(one.tokens) // case.page_size * case.page_size)
            if value is not None:
                self.allocator.free(value[: self.tree.insert(RadixKey(list(one.tokens)), value).prefix_len])
        running = [one.req(f"running {i}") for i, one in enumerate(case.running)]
        for req in running:
            req.kv_committed_len = req.kv_allocated_len = req.num_tokens - 1
        budget = PrefillBudget(
            page_size=case.page_size,
            max_prefill_tokens=case.max_prefill_tokens,
            chunked_prefill_size=case.chunked_prefill_size or None,
            new_token_ratio=case.new_token_ratio,
            num_mixed_decode_tokens=len(running) if case.is_mixed else 0,
            num_reserved_tokens=case.num_reserved_tokens,
            in_batch_prefix_threshold=None
            if case.in_batch_prefix_threshold < 0
            else case.in_batch_prefix_threshold,
        )
        self.adder = impl(budget, self.tree, self.allocator, running)

    def play(self) -> list[Any]:
        trace: list[Any] = [self._budgets()]
        for i, one in enumerate(self.case.wanted):
            req = one.req(str(i))
            trace.append((one.kind, self._call(one, req), self._seen(req), self._budgets()))
        return trace

    def _call(self, one: Wanted, req: Req) -> Any:
        if one.kind == "preempt":
            return [victim.rid for victim in self.adder.preempt_to_schedule(req, one.number)]
        if one.kind == "add":
            return self.adder.add_one_req(req)
        slots = self.allocator.alloc(one.number // self.case.page_size * self.case.page_size)
        if slots is None:
            return None
        req.prefix_indices = slots
        return self.adder.add_chunked_req(req) is req

    def _budgets(self) -> Any:
        adder, cut = self.adder, self.adder.new_chunked_req
        left = adder.rem_total_tokens, adder.rem_input_tokens, adder.rem_chunk_tokens
        added = [req.rid for req in adder.can_run_list]
        return added, None if cut is None else cut.rid, left, self.tree.protected_size()

    def _seen(self, req: Req) -> Any:
        node = None if req.last_node is None else self.tree.node_id(req.last_node)
        lens = req.extend_input_len, req.cache_protected_len
        return req.fill_ids, req.prefix_indices.tolist(), lens, node


@agreement(
    "Any requests are added, cut, refused and preempted as by the reference, with the same budgets left.",
    tuple(random_requests(seed) for seed in range(80)),
)
def same_decisions(impl: type[PrefillAdder], case: Case, reference: type[PrefillAdder]) -> None:
    ours, theirs = Run(impl, case).play(), Run(reference, case).play()
    for i, (mine, its) in enumerate(zip(ours, theirs, strict=True)):
        expect_equal(f"call {i}: kind, result, request, budgets", mine, its)
