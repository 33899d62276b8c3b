"""Clauses of the sampler: decisions that are closer than float32 can resolve."""

from __future__ import annotations

from dataclasses import replace

import torch

from diptych.shared.interfaces import Sampler
from diptych.shared.sampling.noise import gumbel_noise
from diptych.shared.tools.conformance.clauses.case import Case
from diptych.shared.tools.conformance.clauses.clause import agreement, contract
from diptych.shared.tools.conformance.clauses.compare import expect_equal
from diptych.shared.tools.conformance.clauses.inputs import Inputs
from diptych.shared.tools.conformance.oracles.sampling_oracle import (
    KINDS,
    Ask,
    make_info,
    run_sampler,
    sample,
)
from diptych.shared.types import Req

INF = float("inf")
SLICE, COLUMNS = 4096, 1024
EXACT = 1e-10  # float64 sums in another order differ by less


class NearTies(Case):
    """`num_rows` rows, each with one decision closer than float32 can resolve. "score": the best token and
    the next best `where`. "top-p", "min-p": whether the filter keeps the best token; in half of the rows it
    does. "score after min-p": min-p drops the best token, and the next two are a near tie. `std`: of the
    logits; if it is small, the probability is spread over many tokens. `height`: added to all logits.
    `is_steep`: only tokens with small noise can be sampled."""

    decision = "score"
    where = "anywhere"
    vocab_size = 8000
    std = 1.0
    height = 0.0
    is_steep = False
    top_k = -1
    top_p = 1.0
    return_logprob = False
    num_rows = 12
    seed = 0

    def draw(self) -> tuple[torch.Tensor, list[Req]]:
        ids = torch.arange(self.vocab_size)
        noise = gumbel_noise(torch.arange(self.num_rows)[:, None], torch.tensor(0), ids)
        logits = Inputs(self.seed).normal(self.num_rows, self.vocab_size, std=self.std).cpu()
        if self.is_steep:
            logits = torch.where((noise > -1.0) & (noise < 0.3), logits, -30.0)
        logits += self.height
        top_ps, min_ps = [self.top_p] * self.num_rows, [0.0] * self.num_rows
        for row in range(self.num_rows):
            scaled = (logits[row] - logits[row].amax()).double()
            best = int((scaled + noise[row]).argmax())
            is_before = (scaled > scaled[best]) | ((scaled == scaled[best]) & (ids < best))
            keeps_best = row % 2 == 0
            if self.decision == "top-p":
                share = scaled[is_before].exp().sum() / scaled.exp().sum()
                top_ps[row] = _beside(float(share), is_above=keeps_best)
            if self.decision == "min-p":
                min_ps[row] = _beside(float(scaled[best].exp()), is_above=not keeps_best)
            if self.decision == "score after min-p":
                min_ps[row] = _beside(float(scaled[best].exp()), is_above=True)
                scaled[~is_before] = -INF
            if "score" in self.decision:
                self._tie(logits[row], scaled + noise[row])
        return logits, [
            Ask("", top_k=self.top_k, top_p=top_p, min_p=min_p).req(
                seed=row, return_logprob=self.return_logprob
            )
            for row, (top_p, min_p) in enumerate(zip(top_ps, min_ps))
        ]

    def _tie(self, logits: torch.Tensor, scores: torch.Tensor) -> None:
        """Raise the logits of the next best tokens until their scores nearly equal the best score."""
        ids, best = torch.arange(self.vocab_size), int(scores.argmax())
        is_near = ids // SLICE == best // SLICE
        places = {
            "anywhere": [ids >= 0],
            "in its slice": [is_near],
            "in its column": [is_near & (ids % COLUMNS == best % COLUMNS)],
            "elsewhere and in its slice": [is_near, ~is_near],
        }
        for place in places[self.where]:
            next_best = int(scores.masked_fill(~place | (ids == best), -INF).argmax())
            logits[next_best] += (scores[best] - scores[next_best]).float()


def _beside(number: float, is_above: bool) -> float:
    """The nearest float32 at least EXACT away from a number; 0.5 if the decision needs no sum, because the
    best token is the likeliest."""
    if not 1e-3 < number < 1.0:
        return 0.5
    near, to = torch.tensor(number, dtype=torch.float32), torch.tensor(INF if is_above else -INF)
    while (float(near) < number + EXACT) if is_above else (float(near) > number - EXACT):
        near = torch.nextafter(near, to)
    return float(near)


FLAT = 0.2


@agreement(
    "Decisions that are closer than float32 can tell are made as in float64.",
    (
        NearTies("best scores, 500 tokens", vocab_size=500),
        NearTies("best scores, alone"),
        NearTies("best scores at a height of 100,000", height=1e5, num_rows=26, seed=5),
        NearTies("best scores in one slice", where="in its slice", return_logprob=True),
        NearTies("best scores in one column", where="in its column", return_logprob=True),
        NearTies(
            "three best scores", where="elsewhere and in its slice", return_logprob=True, num_rows=36, seed=1
        ),
        NearTies(
            "best scores of likely tokens", where="in its slice", std=0.01, is_steep=True, return_logprob=True
        ),
        NearTies("best scores beside top-p", top_p=0.9),
        NearTies("best scores after min-p", decision="score after min-p", where="in its slice", std=FLAT),
        NearTies("top-p, 500 tokens", decision="top-p", vocab_size=500),
        NearTies("top-p", decision="top-p", std=2.0, seed=1),
        NearTies("top-p and top-k", decision="top-p", top_k=900),
        NearTies("top-p of flat rows", decision="top-p", std=FLAT),
        NearTies("min-p", decision="min-p"),
        NearTies("min-p and top-k", decision="min-p", top_k=900),
        NearTies("min-p of flat rows", decision="min-p", std=FLAT),
    ),
)
def near_ties(impl: type[Sampler], case: NearTies, reference: type[Sampler]) -> None:
    logits, reqs = case.draw()
    expect_equal("ids", sample(impl, logits, reqs), sample(reference, logits, reqs))


@contract("A NaN that the bias makes, -inf + inf, is found like one of the model's.", KINDS)
def nan_of_the_bias(impl: type[Sampler], case: Ask) -> None:
    rows = torch.tensor(
        [[0.5, -INF, 2.0, 1.5], [0.5, -INF, 2.0, 1.5], [3.0, 1.0, INF, 0.0], [3.0, 1.0, 0.0, 2.0]]
    )
    reqs = [case.req(seed=i) for i in range(4)]
    info = make_info(reqs, 4)
    bias = torch.zeros_like(rows)
    bias[1, 1], bias[2, 2] = INF, -INF
    ids = run_sampler(
        impl, rows, replace(info, logit_bias=bias.to(info.seeds.device)), [0] * 4
    ).next_token_ids
    first, last = sample(impl, rows[[0, 3]], [reqs[0], reqs[3]])
    expect_equal("ids", ids.tolist(), [first, -1, -1, last])
