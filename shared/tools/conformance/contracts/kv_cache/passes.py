"""Clauses of a KV cache: attention of new tokens, and whole answers."""

from __future__ import annotations

import torch

from diptych.shared.interfaces import KVCache
from diptych.shared.tools.conformance.clauses.case import Case, grid
from diptych.shared.tools.conformance.clauses.clause import agreement, contract
from diptych.shared.tools.conformance.clauses.compare import expect_close, expect_equal, expect_form
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.inputs import FLOAT_TYPES, Inputs, type_name
from diptych.shared.tools.conformance.clauses.tolerance import tolerance

SCALE = 0.5


class Pass(Case):
    """Queries of the last `num_new` tokens, after `num_cached` earlier ones."""

    num_qo_heads = 1
    num_kv_heads = 1
    dtype = torch.float32
    size = 1.0  # standard deviation of q and k
    seed = 0

    def check(self) -> None:
        if self.num_new < 1 or self.num_kv_heads < 1 or self.num_qo_heads % self.num_kv_heads != 0:
            raise ValueError(
                f"{self.num_new} tokens, {self.num_qo_heads} heads, {self.num_kv_heads} KV heads"
            )


PROMPTS = grid("{num_new} tokens", of=Pass, num_cached=0, num_new=(1, 2, 3, 8))
STEPS = grid("one token after {num_cached}", of=Pass, num_cached=(1, 2, 7), num_new=1)
CHUNKS = grid("{num_new} tokens after {num_cached}", of=Pass, num_cached=(1, 2, 7), num_new=(2, 3))
HEADS = grid(
    "{num_qo_heads} query heads, {num_kv_heads} KV heads, {num_new} tokens after 2",
    of=Pass, num_cached=2, num_new=(1, 3), num_qo_heads=4, num_kv_heads=(1, 2, 4),
)  # fmt: skip
NUMBERS = grid(
    lambda dtype, size, **_: f"{type_name(dtype)}, scores of about {size * size:.0f}",
    of=Pass, num_cached=2, num_new=2, dtype=FLOAT_TYPES, size=(1.0, 400.0),
)  # fmt: skip


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The definition in float64, one query and head after the other."""
    q, k, v = q.double(), k.double(), v.double()
    output = torch.empty_like(q)
    group_size = q.shape[1] // k.shape[1]
    for row in range(len(q)):
        visible = len(k) - len(q) + row + 1
        for head in range(q.shape[1]):
            keys, values = k[:visible, head // group_size], v[:visible, head // group_size]
            output[row, head] = torch.softmax(SCALE * keys @ q[row, head], 0) @ values
    return output


def check_pass(impl: type[KVCache], case: Pass) -> None:
    inputs, dim = Inputs(case.seed), 4
    num_rows = case.num_cached + case.num_new
    k = inputs.normal(num_rows, case.num_kv_heads, dim, dtype=case.dtype, std=case.size)
    v = inputs.normal(num_rows, case.num_kv_heads, dim, dtype=case.dtype)
    q = inputs.normal(case.num_new, case.num_qo_heads, dim, dtype=case.dtype, std=case.size)
    cache = impl(2)
    for part in (slice(0, case.num_cached), slice(case.num_cached, num_rows)):
        if part.start < part.stop:
            cache.append(1, k[part], v[part])
    output = cache.attend(1, q, SCALE)
    expect_form("output", output, q)
    expect_close("output [token, head, dim]", output, exact(q, k, v), tolerance("attention", case.dtype))


@contract("A token of a prompt attends to itself and to the tokens before it, to none behind it.", PROMPTS)
def prompts_are_causal(impl: type[KVCache], case: Pass) -> None:
    check_pass(impl, case)


@contract("The one new token of a decode step attends to all rows.", STEPS)
def a_step_attends_to_all(impl: type[KVCache], case: Pass) -> None:
    check_pass(impl, case)


@contract("Several new tokens behind cached ones attend to all of these, and to each other causally.", CHUNKS)
def chunks_attend_to_what_is_before(impl: type[KVCache], case: Pass) -> None:
    check_pass(impl, case)


@contract("Query head h reads KV head h // (num_qo_heads // num_kv_heads).", HEADS)
def heads_share_rows(impl: type[KVCache], case: Pass) -> None:
    check_pass(impl, case)


@contract("Scores and softmax are in float32 at least, and the output has the dtype of q.", NUMBERS)
def softmax_is_precise(impl: type[KVCache], case: Pass) -> None:
    check_pass(impl, case)


class ToyModel:
    """Two layers of attention with random weights, and a position in each embedding."""

    def __init__(self, seed: int) -> None:
        inputs, dim = Inputs(seed), 8
        self.embedding, self.position = inputs.normal(20, dim), inputs.normal(64, dim)
        self.weights = [[inputs.normal(dim, dim) / dim**0.5 for _ in range(3)] for _ in range(2)]

    def logits(self, cache: KVCache, token_ids: list[int], positions: list[int]) -> torch.Tensor:
        """The logits of the last token."""
        x = self.embedding[torch.tensor(token_ids, device=check_device())]
        x = x + self.position[torch.tensor(positions, device=check_device())]
        for layer_id, (wq, wk, wv) in enumerate(self.weights):
            q, k, v = ((x @ weight).view(len(x), heads, -1) for weight, heads in ((wq, 2), (wk, 2), (wv, 2)))
            cache.append(layer_id, k, v)
            x = x + cache.attend(layer_id, q, SCALE).flatten(1)
        return x[-1] @ self.embedding.T


def answer(
    model: ToyModel, make_cache: type[KVCache], prompt: list[int], keeps: bool
) -> tuple[list[int], int]:
    """(8 tokens, number of tokens computed). Without `keeps`, each step begins with an empty cache."""
    ids, num_computed, cache = list(prompt), 0, make_cache(2)
    for _ in range(8):
        if not keeps:
            cache = make_cache(2)
        token_ids, positions = cache.new_tokens(ids)
        num_computed += len(token_ids)
        ids.append(int(model.logits(cache, token_ids, positions).argmax()))
    return ids[len(prompt) :], num_computed


@agreement(
    "Answers are those without a cache, and each token is computed once.",
    grid("a prompt of {num_tokens}, seed {seed}", num_tokens=(1, 5), seed=(0, 1, 2)),
)
def answers_stay(impl: type[KVCache], case: Case, reference: type[KVCache]) -> None:
    model = ToyModel(case.seed)
    prompt = Inputs(case.seed).integers(20, case.num_tokens).tolist()
    expected, _ = answer(model, reference, prompt, keeps=False)
    actual, num_computed = answer(model, impl, prompt, keeps=True)
    expect_equal("answer", actual, expected)
    expect_equal("tokens computed", num_computed, case.num_tokens + 7)
