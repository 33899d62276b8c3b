"""Clauses of a KV cache: which rows it keeps, and which tokens a pass computes."""

from __future__ import annotations

import torch

from diptych.shared.interfaces import KVCache
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case, grid
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal, expect_true
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.inputs import FLOAT_TYPES, type_name


class Passes(Case):
    """Forward passes over so many new tokens each."""

    def check(self) -> None:
        if self.num_layers < 1 or min(self.passes, default=0) < 1:
            raise ValueError(f"{self.num_layers} layers, passes of {self.passes} tokens")


PASSES = grid(
    lambda num_layers, passes: f"{num_layers} layers, passes of {', '.join(map(str, passes))} tokens",
    of=Passes,
    num_layers=(1, 2),
    passes=((3,), (3, 1, 1), (1, 1), (2, 3, 1)),
)


def rows(layer_id: int, start: int, num_new: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """K of some tokens, [num_new, 1, 1]: 100 * layer + position. Their V are the negative numbers."""
    return (100.0 * layer_id + torch.arange(start, start + num_new, device=check_device())).to(dtype)[
        :, None, None
    ]


def run_pass(
    cache: KVCache, num_layers: int, start: int, num_new: int, dtype: torch.dtype = torch.float32
) -> None:
    for layer_id in range(num_layers):
        k = rows(layer_id, start, num_new, dtype)
        cache.append(layer_id, k, -k)


def expect_rows(cache: KVCache, layer_id: int, num_rows: int, dtype: torch.dtype = torch.float32) -> None:
    k, v = cache.read(layer_id)
    wanted = rows(layer_id, 0, num_rows, dtype)
    expect_equal(f"K of layer {layer_id}, by position", k.flatten().tolist(), wanted.flatten().tolist())
    expect_equal(f"K of layer {layer_id}", k, wanted)
    expect_equal(f"V of layer {layer_id}", v, -wanted)


@contract("The rows of a layer are those of all passes, in the order of positions.", PASSES)
def rows_in_order(impl: type[KVCache], case: Case) -> None:
    cache, start = impl(case.num_layers), 0
    for num_new in case.passes:
        run_pass(cache, case.num_layers, start, num_new)
        start += num_new
        expect_rows(cache, 0, start)


@contract("A layer has no rows of another layer.", PASSES)
def layers_apart(impl: type[KVCache], case: Case) -> None:
    cache, start = impl(case.num_layers), 0
    for num_new in case.passes:
        run_pass(cache, case.num_layers, start, num_new)
        start += num_new
    for layer_id in range(case.num_layers):
        expect_rows(cache, layer_id, start)


@contract(
    "Rows keep the dtype in which they came.",
    grid(lambda dtype: type_name(dtype), dtype=FLOAT_TYPES),
)
def rows_keep_their_dtype(impl: type[KVCache], case: Case) -> None:
    cache = impl(1)
    run_pass(cache, 1, 0, 3, case.dtype)
    run_pass(cache, 1, 3, 1, case.dtype)
    expect_rows(cache, 0, 4, case.dtype)


@contract("Rows are copies: the caller may overwrite its tensors.", EXAMPLE)
def rows_are_copies(impl: type[KVCache], case: Case) -> None:
    cache = impl(1)
    for start, num_new in ((0, 3), (3, 1)):
        k = rows(0, start, num_new)
        v = -k
        cache.append(0, k, v)
        k.fill_(77.0)
        v.fill_(77.0)
    expect_rows(cache, 0, 4)


@contract("Two requests have a cache each, which share nothing.", EXAMPLE)
def caches_apart(impl: type[KVCache], case: Case) -> None:
    first, second = impl(2), impl(2)
    run_pass(first, 2, 0, 3)
    run_pass(second, 2, 0, 1)
    run_pass(first, 2, 3, 1)
    expect_rows(first, 1, 4)
    expect_rows(second, 1, 1)


@contract("num_tokens counts the tokens whose rows every layer has, each once.", PASSES)
def whole_tokens_count(impl: type[KVCache], case: Case) -> None:
    cache, start = impl(case.num_layers), 0
    expect_equal("num_tokens of an empty cache", cache.num_tokens, 0)
    for num_new in case.passes:
        for layer_id in range(case.num_layers):
            expect_equal(f"num_tokens before layer {layer_id} has its new rows", cache.num_tokens, start)
            k = rows(layer_id, start, num_new)
            cache.append(layer_id, k, -k)
        start += num_new
        expect_equal("num_tokens after a pass", cache.num_tokens, start)


@contract("A pass computes the tokens whose rows are not there: first the prompt, then one a step.", PASSES)
def new_tokens_follow_the_rows(impl: type[KVCache], case: Case) -> None:
    cache, start = impl(case.num_layers), 0
    for num_new in case.passes:
        text = list(range(50, 50 + start + num_new))
        given = list(text)
        token_ids, positions = cache.new_tokens(text)
        known = f"after {start} of {len(text)} tokens"
        expect_equal(f"new token ids {known}", list(token_ids), given[start:])
        expect_equal(f"their positions {known}", list(positions), list(range(start, len(given))))
        expect_true("the text is not changed", text == given, text)
        run_pass(cache, case.num_layers, start, num_new)
        start += num_new
