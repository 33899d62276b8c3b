"""Clauses of the sampler's log-probabilities."""

from __future__ import annotations

import math
from typing import Any

import torch

from diptych.shared.interfaces import Sampler
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case, table
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_close, expect_equal, expect_form
from diptych.shared.tools.conformance.clauses.inputs import Inputs
from diptych.shared.tools.conformance.clauses.tolerance import tolerance
from diptych.shared.tools.conformance.oracles.sampling_oracle import (
    ADJUSTED,
    GREEDY,
    KINDS,
    Ask,
    adjusted,
    make_info,
    run_sampler,
    sample,
)
from diptych.shared.types import LogprobsOutput, Req

CLOSE = tolerance("logprobs", torch.float32)


class Asked(Case):
    seed: int = 0

    def check(self) -> None:
        if self.vocab_size < 10 or not self.asks:
            raise ValueError("there must be rows, and the tokens that they name")


def logprobs64(row: torch.Tensor, req: Req) -> torch.Tensor:
    """Log softmax after step 3, divided by the temperature unless greedy."""
    params = req.sampling_params
    logits = torch.tensor(adjusted(row.tolist(), req), dtype=torch.float64)
    return (logits / (1.0 if params.is_greedy else params.temperature)).log_softmax(dim=-1)


def sample_asked(
    impl: type[Sampler], logits: torch.Tensor, asks: tuple[Ask, ...], **more: Any
) -> tuple[list[int], LogprobsOutput, list[Req]]:
    reqs = [ask.req(seed=i, return_logprob=True, **more) for i, ask in enumerate(asks)]
    output = run_sampler(impl, logits, make_info(reqs, logits.shape[1]), range(len(asks)))
    assert output.logprobs is not None
    return output.next_token_ids.tolist(), output.logprobs, reqs


@contract(
    "They are log softmax after penalties, masks and bias, over temperature (greedy rows: as is), before any "
    "filter: at the sampled token, and at the best, best first.",
    table(
        "asks vocab_size num_top",
        *((f"{ask.name}, all tokens", (ask,), 12, 12) for ask in (*KINDS, *ADJUSTED)),
        ("greedy rows alone", (GREEDY, Ask("", top_k=1, temperature=0.4)), 63, 5),
        ("a mixed batch", (*KINDS, *ADJUSTED), 129, 5),
        ("a large vocabulary", KINDS[:4], 32000, 20),
        ("no alternatives", KINDS, 50, 0),
        of=Asked,
    ),
)
def values(impl: type[Sampler], case: Asked) -> None:
    logits = Inputs(case.seed).normal(len(case.asks), case.vocab_size, std=3.0).cpu()
    ids, found, reqs = sample_asked(impl, logits, case.asks, top_logprobs_num=case.num_top)
    size = (len(case.asks), case.num_top)
    expect_form("token_logprobs", found.token_logprobs, like=found.token_logprobs.new_empty(size[0]).float())
    expect_form("top_logprobs", found.top_logprobs, like=found.top_logprobs.new_empty(size).float())
    expect_form("top_ids", found.top_ids, like=found.top_ids.new_empty(size).long())
    expected = torch.stack([logprobs64(row, req) for row, req in zip(logits, reqs)])
    best, best_ids = (x[:, : case.num_top] for x in expected.sort(descending=True, stable=True))
    both = torch.cat((found.token_logprobs[:, None], found.top_logprobs), dim=1)
    expect_close(
        "log-probabilities of the token, then of the best",
        both,
        torch.cat((expected.gather(1, torch.tensor(ids)[:, None]), best), dim=1),
        CLOSE,
    )
    expect_equal("top_ids", found.top_ids.cpu(), best_ids)


@contract("Of equal ones the lowest id comes first, and the first is the greedy choice.", EXAMPLE)
def ties(impl: type[Sampler], case: Case) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0], [0.0] * 5, [1e-8, 2e-8, 0.0, 0.0, 0.0]])
    for mate in ((), (Ask("plain"),)):
        asks = (GREEDY, GREEDY, GREEDY, *mate)
        rows = torch.cat((logits, logits[: len(mate)]))
        ids, found, _ = sample_asked(impl, rows, asks, top_logprobs_num=4)
        expect_equal("top_ids", found.top_ids[:2].tolist(), [[1, 2, 4, 0], [0, 1, 2, 3]])
        # 1e-8 and 2e-8 have the same log-probability in float32, but are no tie.
        expect_equal("first of top_ids", found.top_ids[:3, 0].tolist(), ids[:3])


@contract("A banned token has a log-probability of -inf, and comes after all others.", EXAMPLE)
def banned_tokens(impl: type[Sampler], case: Case) -> None:
    ask = Ask("", min_new_tokens=9, eos=(0, 2), logit_bias=((4, -math.inf), (2, 9.0)))
    _, found, _ = sample_asked(impl, torch.tensor([[9.0, 1.0, 8.0, 0.0, 7.0]]), (ask,), top_logprobs_num=5)
    expect_equal("top_ids", found.top_ids[0, :2].tolist(), [1, 3])
    expect_equal("the others", found.top_logprobs[0, 2:].tolist(), [-math.inf] * 3)
    exact = torch.tensor([1.0, 0.0], dtype=torch.float64).log_softmax(dim=-1)
    expect_close("top_logprobs", found.top_logprobs[0, :2].cpu(), exact, CLOSE)


@contract(
    "They come too at the tokens that rows ask for, banned and unlikely ones included.", (*KINDS, *ADJUSTED)
)
def asked_tokens(impl: type[Sampler], case: Ask) -> None:
    logits = Inputs(7).normal(4, 150, std=3.0).cpu()
    ask_of_row = ((7, 149, 7), (), (3, 8), (0,))
    reqs = [
        case.req(seed=i, return_logprob=True, top_logprobs_num=2, token_ids_logprob=asked)
        for i, asked in enumerate(ask_of_row)
    ]
    found = run_sampler(impl, logits, make_info(reqs, 150), range(4)).logprobs
    assert found is not None
    expect_form("top_ids", found.top_ids, like=found.top_ids.new_empty(4, 2 + 3).long())
    for row, (req, asked) in enumerate(zip(reqs, ask_of_row)):
        ids = found.top_ids[row, 2:].tolist()
        expect_equal(f"ids of row {row}", tuple(ids[: len(asked)]), asked)
        expected = logprobs64(logits[row], req)[list(asked)]
        expect_close(f"row {row}", found.top_logprobs[row, 2 : 2 + len(asked)].cpu(), expected, CLOSE)


@contract("Asking for them changes no token, and they come only when asked for.", KINDS)
def asking_changes_nothing(impl: type[Sampler], case: Ask) -> None:
    logits = Inputs(5).normal(20, 200, std=2.0).cpu()
    plain = [case.req(seed=i) for i in range(20)]
    positions = range(20)
    with_logprobs, _, _ = sample_asked(impl, logits, (case,) * 20, top_logprobs_num=2)
    without = run_sampler(impl, logits, make_info(plain, 200), positions)
    expect_equal("logprobs that were not requested", without.logprobs, None)
    expect_equal("ids", with_logprobs, without.next_token_ids.tolist())
    expect_equal("ids at position 0", sample(impl, logits[:1], plain[:1]), with_logprobs[:1])


@contract("A bad row does not spoil the others'; it has no token, and no log-probability of one.", KINDS)
def bad_rows_have_no_logprob(impl: type[Sampler], case: Ask) -> None:
    logits = Inputs(6).normal(3, 10).cpu()
    logits[1, 4] = math.nan
    ids, found, reqs = sample_asked(impl, logits, (case,) * 3, top_logprobs_num=2)
    expect_equal("id of the bad row", ids[1], -1)
    expect_equal("its log-probability is NaN", bool(found.token_logprobs[1].isnan()), True)
    for row in (0, 2):
        expected = logprobs64(logits[row], reqs[row])
        expect_close(f"row {row}", found.token_logprobs[row].cpu(), expected[ids[row]], CLOSE)
        expect_close(f"row {row}, top", found.top_logprobs[row].cpu(), expected.topk(2).values, CLOSE)


@contract("Sequential filters of a row change no other row, and no log-probability.", EXAMPLE)
def sequence_of_one_row(impl: type[Sampler], case: Case) -> None:
    asks = (
        Ask("joint", top_k=2, top_p=0.6),
        Ask("sequential", top_k=2, top_p=0.6, filter_order="sequential"),
    )
    logits = torch.tensor([[math.log(p) for p in (0.5, 0.3, 0.2)]] * 200)
    ids, found, _ = sample_asked(impl, logits, asks * 100, top_logprobs_num=3)
    expect_equal("tokens of joint rows", set(ids[0::2]), {0, 1})
    expect_equal("tokens of sequential rows", set(ids[1::2]), {0})
    expect_equal("best ids", found.top_ids.tolist(), [[0, 1, 2]] * 200)
    expect_close("at the best", found.top_logprobs.cpu(), logits, CLOSE)
    expect_close("at the token", found.token_logprobs.cpu(), logits[range(200), ids], CLOSE)
