"""The optimized sampler beyond the contract: every way through its kernels gives the reference's tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from diptych.optimized.kernels.sampling.sampling_scan import readable_columns
from diptych.optimized.sampler import Sampler
from diptych.reference.sampler import Sampler as ReferenceSampler
from diptych.shared.interfaces import Sampler as AnySampler
from diptych.shared.tools.conformance.clauses.compare import expect_close, expect_equal
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.inputs import Inputs
from diptych.shared.tools.conformance.clauses.poison import amid_poison, run_poisoned
from diptych.shared.tools.conformance.clauses.tolerance import tolerance
from diptych.shared.tools.conformance.oracles.sampling_oracle import (
    ADJUSTED,
    KINDS,
    Ask,
    exact_token,
    make_info,
)
from diptych.shared.types import SampleOutput, SamplingBatchInfo
from tests.changed_modules import Change, changed
from tests.kernels.fast_grid import fast_grid

# The interpreter is numpy, which warns of what IEEE arithmetic defines: inf - inf, log 0.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

INF = math.inf
SMALL, LARGE = (1, 2, 63, 1000, 1871), (4097, 5003, 9001)


def change(file: str, before: str, after: str) -> Change:
    return Change(f"optimized.kernels.sampling.sampling_{file}", before, after)


SLOW_WAYS = {
    "all noise again in float64": (
        change("noise", "MARGIN = tl.constexpr(6e-5)", "MARGIN = tl.constexpr(1e9)"),
    ),
    "all sums again in float64": (
        change("walk", "EPSILON = tl.constexpr(2e-5)", "EPSILON = tl.constexpr(2.0)"),
    ),
    "nothing is gathered": (
        change("gather", "MAX_GROUPS = tl.constexpr(1024)", "MAX_GROUPS = tl.constexpr(0)"),
    ),
    "buffers overflow": (change("gather", "CAPACITY = tl.constexpr(2048)", "CAPACITY = tl.constexpr(1)"),),
    "every row has a best score": (change("scan", "MAX_TOP_K = 1024", "MAX_TOP_K = 0"),),
    "small vocabularies as large ones": (change("small", "MAX_VOCAB_SIZE = 4096", "MAX_VOCAB_SIZE = 0"),),
}


def random_info(num_rows: int, vocab_size: int, seed: int = 0, **more: object) -> SamplingBatchInfo:
    """Rows of all kinds: greedy, unfiltered, with one filter or several, hot and cold."""
    device = check_device()
    g = torch.Generator().manual_seed(seed)

    def pick(*values: float | torch.Tensor) -> torch.Tensor:
        choice = torch.randint(len(values), (num_rows,), generator=g)
        columns = [torch.as_tensor(value).expand(num_rows) for value in values]
        return torch.stack(columns)[choice, torch.arange(num_rows)]

    def uniform(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(num_rows, generator=g)

    top_ks = pick(vocab_size, vocab_size, 1, 7, 50, vocab_size // 2 + 1)
    is_greedy = torch.rand(num_rows, generator=g) < 0.1
    info = SamplingBatchInfo(
        temperatures=torch.where(is_greedy, 1.0, pick(1.0, uniform(0.2, 2.0), 1e-6, 30.0)).to(device),
        top_ks=torch.where(is_greedy, 1, top_ks.clamp(1, vocab_size)).to(device),
        top_ps=pick(1.0, 1.0, uniform(0.1, 1.0), 0.9, 1e-6, 1 - 2**-24).to(device),
        min_ps=pick(0.0, 0.0, 0.0, uniform(0.0, 0.5), 1.0).to(device),
        seeds=torch.randint(-(2**62), 2**62, (num_rows,), generator=g).to(device),
        is_greedy=is_greedy.to(device),
        is_all_greedy=False,
        needs_filter=True,
    )
    return replace(info, **more)


def plain_info(num_rows: int, vocab_size: int, **more: object) -> SamplingBatchInfo:
    """All rows alike: temperature 1, no filter."""
    device = check_device()
    ones = torch.ones(num_rows, device=device)
    info = SamplingBatchInfo(
        temperatures=ones,
        top_ks=torch.full((num_rows,), vocab_size, device=device),
        top_ps=ones,
        min_ps=ones * 0,
        seeds=torch.arange(num_rows, device=device) * 7919,
        is_greedy=torch.zeros(num_rows, dtype=torch.bool, device=device),
        is_all_greedy=False,
        needs_filter=False,
    )
    more = {
        name: torch.full_like(getattr(info, name), value) if isinstance(value, (int, float)) else value
        for name, value in more.items()
        if name in ("temperatures", "top_ks", "top_ps", "min_ps")
    }
    return replace(info, **more, needs_filter=bool(set(more) & {"top_ks", "top_ps", "min_ps"}))


def hard_logits(num_rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    """Rows of every sort in turn: smooth, peaked, on a coarse grid (ties everywhere), equal, with infinities,
    mostly impossible, and bad ones."""
    x = Inputs(seed).normal(num_rows, vocab_size, std=2.0)
    rows = torch.arange(num_rows, device=x.device) % 9
    x[rows == 1, :: max(vocab_size // 5, 1)] += 9
    x[rows == 2] = (x[rows == 2] * 2).round() / 2
    x[rows == 3] = 0.25
    x[rows == 4, vocab_size // 3] = INF
    x[rows == 5, :: max(vocab_size // 7, 1)] = INF
    x[rows == 6, 1 : vocab_size - 1 or 1] = -INF
    x[rows == 7, vocab_size - 1] = math.nan
    x[rows == 8] = (x[rows == 8] * 1e4).round() * 1e34
    return x


def expect_same_tokens(
    sampler: type[AnySampler], logits: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor
) -> tuple[SampleOutput, SampleOutput]:
    """The sampler's output and the reference's."""
    found = run_poisoned(sampler().sample, logits, info, positions)
    expected = ReferenceSampler().sample(logits, info, positions)
    expect_equal("ids", found.next_token_ids, expected.next_token_ids)
    return found, expected


@fast_grid(
    vocab_size={str(size): size for size in SMALL + LARGE}, seed={str(seed): seed for seed in range(2)}
)
def test_hard_rows_of_all_kinds(vocab_size: int, seed: int) -> None:
    num_rows = (270 if vocab_size in SMALL else 45) // (1 if torch.cuda.is_available() else 3)
    positions = torch.arange(num_rows, device=check_device()) * 1000
    logits = amid_poison(hard_logits(num_rows, vocab_size, seed))
    expect_same_tokens(Sampler, logits, random_info(num_rows, vocab_size, seed), positions)
    unfiltered = replace(random_info(num_rows, vocab_size, 2), needs_filter=False)
    neutral = plain_info(num_rows, vocab_size)
    unfiltered = replace(unfiltered, top_ks=neutral.top_ks, top_ps=neutral.top_ps, min_ps=neutral.min_ps)
    expect_same_tokens(Sampler, logits, unfiltered, positions)
    greedy = replace(neutral, is_greedy=torch.ones_like(neutral.is_greedy), is_all_greedy=True)
    expect_same_tokens(Sampler, logits, greedy, positions)


@pytest.mark.parametrize("way", SLOW_WAYS)
def test_ways_that_are_seldom_taken_lead_to_the_same_tokens(way: str) -> None:
    impl = changed("optimized.sampler", *SLOW_WAYS[way]).Sampler
    for vocab_size in (63, 4097) if way.startswith("small") else (4097,):
        logits = hard_logits(18, vocab_size, seed=3)
        positions = torch.arange(18, device=check_device())
        info = random_info(18, vocab_size, seed=4, return_logprob=True, num_top_logprobs=3)
        found, expected = expect_same_tokens(impl, logits, info, positions)
        good = torch.arange(18, device=logits.device) % 9 != 7
        expect_equal("top_ids", found.logprobs.top_ids[good], expected.logprobs.top_ids[good])


@pytest.mark.parametrize("more", [{}, {"top_ps": 0.8}, {"top_ks": 6000}], ids=["alone", "top-p", "top-k"])
def test_flat_rows_under_min_p(more: dict[str, float]) -> None:
    """More tokens are kept than are gathered, and a third of the proposals is dropped."""
    num_rows, vocab_size = 12, 9001
    logits = Inputs(1).normal(num_rows, vocab_size, std=0.3)
    logits[::3] = (logits[::3] * 20).round() / 20  # ties
    info = plain_info(num_rows, vocab_size, min_ps=0.3, **more)
    positions = torch.arange(num_rows, device=logits.device)
    free = ReferenceSampler().sample(logits, replace(info, needs_filter=False), positions).next_token_ids
    weights = (logits - logits.amax(dim=1, keepdim=True)).exp()
    assert ((weights >= 0.3).sum(dim=1) > 2048).sum() > 9
    assert (weights.gather(1, free[:, None]) < 0.3).sum() >= 2
    expect_same_tokens(Sampler, logits, info, positions)


@pytest.mark.parametrize("vocab_size", [129, pytest.param(5003, marks=pytest.mark.full)])
def test_against_loops_in_float64(vocab_size: int) -> None:
    """In the fast cut, `same_tokens` compares large vocabularies with the reference."""
    asks = [*KINDS, *ADJUSTED]
    reqs = [ask.req(seed=i) for i, ask in enumerate(asks)]
    logits = Inputs(5).normal(len(asks), vocab_size, std=3.0)
    positions = torch.arange(len(asks), device=logits.device)
    ids = Sampler().sample(logits, make_info(reqs, vocab_size), positions).next_token_ids.tolist()
    for i, (row, req) in enumerate(zip(logits.tolist(), reqs)):
        expected, margin = exact_token(row, req, i)
        assert ids[i] == expected or margin < 1e-5, asks[i].name


EQUAL_LOGITS = (
    {"top_ks": 1},
    {"top_ks": 600},
    {"top_ks": 8999},
    {"top_ps": 0.5},
    {"top_ps": 0.25, "top_ks": 4000},
    {"min_ps": 1.0},
    {"top_ks": 3000, "min_ps": 0.5, "top_ps": 0.75},
)


@fast_grid(
    params={str(params): params for params in EQUAL_LOGITS},
    vocab_size={str(size): size for size in (9000, 8192)},
)
def test_a_row_of_equal_logits(params: dict[str, float], vocab_size: int) -> None:
    """Every bound is within one tie that spans all slices, and top_p is met exactly: p is 2^-k or so."""
    logits = torch.full((4, vocab_size), -1.5, device=check_device())
    positions = torch.zeros(4, dtype=torch.int64, device=logits.device)
    expect_same_tokens(Sampler, logits, plain_info(4, vocab_size, **params), positions)


def test_ties_across_slices_go_to_the_lowest_ids() -> None:
    logits = torch.zeros(40, 20_000, device=check_device())
    tied = torch.tensor([19_999, 17, 8_192, 8_191, 12_345])
    logits[:, tied] = 3.0
    logits[:, 500] = 4.0
    positions = torch.arange(40, device=logits.device)
    found = Sampler().sample(logits, plain_info(40, 20_000, top_ks=3), positions).next_token_ids
    assert set(found.tolist()) == {17, 500, 8_191}
    logits, info = logits[:2], plain_info(2, 20_000, top_ks=3)
    greedy = replace(info, is_greedy=~info.is_greedy)
    logits[:, 500] = 0.0
    for is_alone in (True, False):
        output = Sampler().sample(logits, replace(greedy, is_all_greedy=is_alone), positions[:2])
        assert output.next_token_ids.tolist() == [17, 17]


def test_a_mask_that_leaves_few_tokens() -> None:
    """As grammars do: fewer than top_k and num_top_logprobs ask for."""
    logits = Inputs(7).normal(3, 6000, std=2.0)
    allowed = torch.tensor([5, 31, 32, 4000, 5999])
    banned = torch.ones(3, 6000, dtype=torch.bool, device=logits.device)
    banned[:, allowed] = False
    info = replace(plain_info(3, 6000, top_ks=50, top_ps=0.9), banned=banned)
    info = replace(info, return_logprob=True, num_top_logprobs=9)
    positions = torch.arange(3, device=logits.device)
    found, expected = (s().sample(logits, info, positions) for s in (Sampler, ReferenceSampler))
    expect_equal("ids", found.next_token_ids, expected.next_token_ids)
    expect_equal("top_ids", found.logprobs.top_ids, expected.logprobs.top_ids)
    expect_close(
        "logprobs",
        found.logprobs.top_logprobs,
        expected.logprobs.top_logprobs,
        tolerance("logprobs", torch.float32),
    )


@pytest.mark.parametrize(
    "num_top", [0, 20, 1100, *(pytest.param(num, marks=pytest.mark.full) for num in (1, 300))]
)
def test_logprobs_of_a_large_vocabulary(num_top: int) -> None:
    logits = hard_logits(9, 5003, seed=6)[:7]
    logits[4:6] = Inputs(8).integers(5, 2, 5003, dtype=torch.float32)
    info = random_info(7, 5003, seed=7, return_logprob=True, num_top_logprobs=num_top)
    info = replace(info, temperatures=info.temperatures.clamp(min=0.1))
    positions = torch.arange(7, device=logits.device)
    found = run_poisoned(Sampler().sample, logits, info, positions)
    expected = ReferenceSampler().sample(logits, info, positions)
    expect_equal("ids", found.next_token_ids, expected.next_token_ids)
    expect_equal("top_ids", found.logprobs.top_ids, expected.logprobs.top_ids)
    for name in ("token_logprobs", "top_logprobs"):
        values = (getattr(output.logprobs, name) for output in (found, expected))
        expect_close(name, *values, tolerance("logprobs", torch.float32))  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float64, pytest.param(torch.float16, marks=pytest.mark.full)]
)
def test_logits_of_any_type_and_layout_are_read_as_float32(dtype: torch.dtype) -> None:
    logits = Inputs(9).normal(9, 4500, std=2.0).to(dtype)
    info = random_info(9, 4500, seed=8)
    positions = torch.arange(9, device=logits.device)
    expected = Sampler().sample(logits.float(), info, positions).next_token_ids
    expect_equal("ids", Sampler().sample(logits, info, positions).next_token_ids, expected)
    transposed = logits.T.contiguous().T
    expect_equal("ids", Sampler().sample(transposed, info, positions).next_token_ids, expected)


def test_parameters_of_any_layout() -> None:
    for vocab_size in (100, 4500):
        logits = Inputs(10).normal(6, vocab_size, std=2.0)
        one = plain_info(1, vocab_size, top_ks=40, top_ps=0.9)
        rows = {name: value.expand(6) for name, value in vars(one).items() if isinstance(value, torch.Tensor)}
        rows["seeds"] = torch.arange(12, device=logits.device)[::2]
        positions = torch.arange(18, device=logits.device)[::3]
        expect_same_tokens(Sampler, logits, replace(one, **rows), positions)


def test_loads_stay_within_a_tensors_memory() -> None:
    padded = torch.zeros(3, 5008)
    assert readable_columns(padded[:, :5003]) == 5008
    assert readable_columns(padded[:, 5:]) == 5003, "its last row has nothing after it"
    assert readable_columns(torch.zeros(3, 5003)) == 5003
    assert readable_columns(padded) == 5008


@pytest.mark.parametrize("change", ["penalty", "processor", "both"])
def test_changed_rows_lie_in_memory_as_the_models_do(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that they take the same kernel, and with it the order of sums, as beside rows without changes."""
    logits = Inputs(11).normal(3, 1920)[:, :1871]
    more: dict[str, Any] = {"frequency_penalty": 0.5} if change != "processor" else {}
    reqs = [Ask("one", output=(4, 4)).req(**more) for _ in logits]
    if change != "penalty":
        reqs[0].logit_processor = lambda output_ids, given: given + 1
    seen = []
    monkeypatch.setattr("diptych.optimized.sampler.sample_small", lambda logits, *_: seen.append(logits))
    Sampler().sample(logits, make_info(reqs, 1871), torch.arange(3, device=logits.device))
    assert not torch.equal(seen[0][0], logits[0])
    assert seen[0].stride() == logits.stride()
    assert readable_columns(seen[0]) == readable_columns(logits) == 1872


def test_a_row_beside_one_that_asks_for_thousands_of_tokens() -> None:
    """All tokens are sorted for it, and the log-probabilities of the others keep their bits."""
    logits, positions = Inputs(12).normal(9, 5003, std=3.0), torch.arange(9, device=check_device())
    info = replace(plain_info(9, 5003), return_logprob=True)
    few, many = (
        Sampler().sample(logits, replace(info, num_top_logprobs=num_top), positions) for num_top in (3, 1100)
    )
    expect_equal("of tokens", many.logprobs.token_logprobs, few.logprobs.token_logprobs)
    expect_equal("of the best", many.logprobs.top_logprobs[:, :3], few.logprobs.top_logprobs)
    expect_equal("their ids", many.logprobs.top_ids[:, :3], few.logprobs.top_ids)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [151_936, 151_669])
def test_thousands_of_rows_of_a_large_vocabulary(vocab_size: int) -> None:
    num_different = 0
    for seed in range(16):
        logits = Inputs(seed).normal(128, 151_936, std=1.0 + seed % 4)[:, :vocab_size]
        if seed % 4 == 3:
            logits = (logits * 4).round() / 4
        info = random_info(128, vocab_size, seed)
        positions = torch.arange(128, device=logits.device)
        found = Sampler().sample(logits, info, positions).next_token_ids
        expected = ReferenceSampler().sample(logits, info, positions).next_token_ids
        num_different += int((found != expected).sum())
    assert num_different == 0


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [1871, 32_000])
def test_a_cuda_graph_holds_it(vocab_size: int) -> None:
    """No synchronisation, and nothing kept from the capture: replays see the buffers as they are then."""
    logits = torch.empty(16, vocab_size, device="cuda")
    info = random_info(16, vocab_size, return_logprob=True, num_top_logprobs=4)
    positions = torch.zeros(16, dtype=torch.int64, device="cuda")
    logits.normal_()
    Sampler().sample(logits, info, positions)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = Sampler().sample(logits, info, positions)
    for seed in range(3):
        logits.copy_(Inputs(seed).normal(16, vocab_size, std=3.0))
        positions += 17
        graph.replay()
        expected = ReferenceSampler().sample(logits, info, positions)
        expect_equal("ids", output.next_token_ids, expected.next_token_ids)
        expect_equal("top_ids", output.logprobs.top_ids, expected.logprobs.top_ids)
