"""Clauses of TokenToKVPoolAllocator: random sequences of calls, compared with a model, a set of free
pages."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from diptych.shared.tools.conformance.clauses.case import Case
from diptych.shared.tools.conformance.clauses.clause import agreement, contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal, expect_raises, expect_true
from diptych.shared.tools.conformance.clauses.short_repr import short_repr
from diptych.shared.tools.conformance.contracts.memory_pool.allocator import allocator_of, expect_slots, slots

Kind = Literal["extend", "decode", "finish", "wrong"]


@dataclass(frozen=True, repr=False)
class Call:
    """One call. `which` counts the live requests, modulo their number; one more is a new request. "extend":
    by num_tokens, with `is_pair` also the next request. "decode": one token for all. "wrong": free a page
    that is free, or the dummy page."""

    kind: Kind
    which: int = 0
    num_tokens: int = 1
    is_pair: bool = False

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind) or self.num_tokens < 0:
            raise ValueError(f"no call: {self}")


def random_calls(seed: int, num_calls: int = 30) -> Case:
    rng = random.Random(seed)
    page_size = (1, 2, 4, 16)[seed % 4]
    weights = {"extend": 6, "decode": 4, "finish": 3, "wrong": 1}
    kinds = rng.choices(list(weights), weights=list(weights.values()), k=num_calls)
    calls = [
        Call(kind, rng.randrange(20), rng.randint(1, 3 * page_size), rng.random() < 0.3)  # type: ignore[arg-type]
        for kind in kinds
    ]
    return Case(
        f"random calls {seed}, page {page_size}",
        page_size=page_size,
        num_pages=rng.choice([3, 6, 12]),
        calls=tuple(calls),
    )


@dataclass
class Run:
    """An allocator and its model: a page is free or owned by a request."""

    impl: Any
    case: Case
    free: set[int] = field(default_factory=set)
    requests: list[list[int]] = field(default_factory=list)  # slots by position
    trace: list[Any] = field(
        default_factory=list
    )  # results that are the same in every correct implementation

    def __post_init__(self) -> None:
        self.allocator = allocator_of(self.impl, self.case.num_pages, self.case.page_size)
        self.free = set(range(1, self.case.num_pages + 1))

    def play(self) -> list[Any]:
        for i, call in enumerate(self.case.calls):
            self.what = f"call {i} ({call.kind})"
            getattr(self, f"_{call.kind}")(call)
            self._check()
        return self.trace

    def _grow(self, chosen: list[int], num_tokens: int, is_decode: bool = False) -> bool:
        """Extend requests[i] for i in chosen by num_tokens each. False: correctly refused."""
        page_size, old = self.case.page_size, [list(self.requests[i]) for i in chosen]
        lens = [len(request) for request in old]
        new_lens = [n + num_tokens for n in lens]
        last_locs = [request[-1] if request else -1 for request in old]
        if is_decode:
            given = self.allocator.alloc_decode(new_lens, last_locs)
        else:
            given = self.allocator.alloc_extend(lens, new_lens, last_locs)
        num_needed = sum(-(-new // page_size) - -(-n // page_size) for n, new in zip(lens, new_lens))
        if num_needed > len(self.free):
            expect_equal(f"{self.what}: {num_needed} pages of {len(self.free)} free", given, None)
            self.trace.append(None)
            return False
        ids = expect_slots(self.what, given, num_tokens * len(chosen))
        self.trace.append(len(ids))
        for i, request in zip(chosen, old):
            own, ids = ids[:num_tokens], ids[num_tokens:]
            for slot in own:
                position = len(request)
                if position % page_size == 0:
                    page, offset = divmod(slot, page_size)
                    expect_true(
                        f"{self.what}: slot {slot} opens a free page", offset == 0 and page in self.free, page
                    )
                    self.free.remove(page)
                else:
                    expect_equal(f"{self.what}: the slot of position {position}", slot, request[-1] + 1)
                request.append(slot)
            self.requests[i] = request
        return True

    def _extend(self, call: Call) -> None:
        first = call.which % (len(self.requests) + 1)
        chosen = [first, first + 1] if call.is_pair else [first]
        num_before = len(self.requests)
        self.requests += [[] for _ in range(chosen[-1] + 1 - num_before)]
        if not self._grow(chosen, call.num_tokens):
            del self.requests[num_before:]
        self.requests = [request for request in self.requests if request]

    def _decode(self, call: Call) -> None:
        self._grow(list(range(len(self.requests))), 1, is_decode=True)

    def _finish(self, call: Call) -> None:
        if self.requests:
            request = self.requests.pop(call.which % len(self.requests))
            self.allocator.free(slots(*request))
            self.free |= {slot // self.case.page_size for slot in request}

    def _wrong(self, call: Call) -> None:
        """It changes nothing, although a page that is in use comes with it."""
        pages = [0, *sorted(self.free)]
        wrong = pages[call.which % len(pages)] * self.case.page_size
        used = [request[0] for request in self.requests[:1]]
        expect_raises(f"{self.what}: free()", AssertionError, self.allocator.free, slots(*used, wrong))

    def _check(self) -> None:
        page_size = self.case.page_size
        size = self.allocator.available_size()
        expect_equal(f"{self.what}: available_size()", size, len(self.free) * page_size)
        free = [page * page_size + offset for page in sorted(self.free) for offset in range(page_size)]
        expect_equal(f"{self.what}: free_slots()", self.allocator.free_slots().tolist(), free)
        self.trace.append(size)


SEQUENCES = tuple(random_calls(seed) for seed in range(40))


@contract("After any sequence of calls, each page is free or has one owner.", SEQUENCES)
def any_calls(impl: Any, case: Case) -> None:
    Run(impl, case).play()


@agreement(
    "The same calls succeed as with the reference, and leave the same number of free slots.", SEQUENCES[:12]
)
def same_calls(impl: Any, case: Case, reference: Any) -> None:
    expect_equal("what calls gave and left", Run(impl, case).play(), Run(reference, case).play())
