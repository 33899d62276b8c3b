"""Expected results of sampling, by the contract in float64 loops, and calls of a sampler under check."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from diptych.shared.interfaces import Sampler
from diptych.shared.sampling.noise import gumbel_noise
from diptych.shared.sampling.sampling_batch import make_sampling_batch_info
from diptych.shared.tools.conformance.clauses.compare import expect_equal
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.poison import run_poisoned
from diptych.shared.types import Req, SampleOutput, SamplingBatchInfo, SamplingParams


@dataclass(frozen=True)
class Ask:
    """The sampling parameters of one request, and its tokens so far."""

    name: str
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_new_tokens: int = 0
    prompt: tuple[int, ...] = (0,)
    output: tuple[int, ...] = ()
    eos: tuple[int, ...] = ()
    filter_order: str = "joint"

    def __post_init__(self) -> None:
        self.req()

    def req(self, seed: int = 0, **more: Any) -> Req:
        names = {field.name for field in fields(SamplingParams)}
        own = {name: value for name, value in vars(self).items() if name in names}
        params = SamplingParams(**{**own, "logit_bias": dict(self.logit_bias), **more})
        return Req(
            self.name, list(self.prompt), params, seed, frozenset(self.eos), output_ids=list(self.output)
        )


GREEDY = Ask("greedy", temperature=0.0)
KINDS = (
    GREEDY,
    Ask("top-k of one", top_k=1),
    Ask("plain"),
    Ask("cold", temperature=0.3),
    Ask("top-k", top_k=3),
    Ask("top-p", top_p=0.6),
    Ask("min-p", min_p=0.2),
    Ask("hot, all filters", temperature=2.0, top_k=20, top_p=0.9, min_p=0.01),
)
"""One of each, for mixed batches."""

_TEXT: dict[str, Any] = {"prompt": (3, 8, 8, 5), "output": (4, 4, 4, 0, 3), "eos": (8,)}
ADJUSTED = (
    Ask("frequency", frequency_penalty=0.6, **_TEXT),
    Ask("presence", presence_penalty=-0.8, **_TEXT),
    Ask("repetition", repetition_penalty=1.5, **_TEXT),
    Ask("repetition below one", repetition_penalty=0.7, **_TEXT),
    Ask("all penalties", 1.0, -1, 1.0, 0.0, 0.3, 0.4, 1.2, **_TEXT),
    Ask("bias", logit_bias=((1, 2.5), (3, -2.0), (7, -math.inf)), **_TEXT),
    Ask("end tokens banned", min_new_tokens=6, **_TEXT),
    Ask("a bias on a banned token", logit_bias=((8, 50.0),), min_new_tokens=6, **_TEXT),
    Ask("everything", 0.8, 7, 0.9, 0.02, 0.2, 0.1, 1.1, ((5, 2.0), (4, 1.0)), 6, **_TEXT),
)
"""Those whose logits are changed before anything else, for a vocabulary of ten or more."""


def adjusted(logits: Sequence[float], req: Req) -> list[float]:
    """The logits after steps 1 to 3 of the contract."""
    params = req.sampling_params
    seen = set(req.origin_input_ids) | set(req.output_ids)
    result = []
    for i, logit in enumerate(map(float, logits)):
        if i in seen:
            r = params.repetition_penalty
            logit = logit / r if logit > 0 else logit * r
        count = req.output_ids.count(i)
        logit -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        is_early = len(req.output_ids) < params.min_new_tokens
        if is_early and (i in req.eos_token_ids or i in params.stop_token_ids):
            logit = -math.inf
        result.append(logit + params.logit_bias.get(i, 0.0))
    return result


@dataclass(frozen=True)
class Filtered:
    """`kept`: probability by token, renormalised. `margin`: how far the nearest token is from being filtered
    differently."""

    kept: dict[int, float]
    margin: float


def filtered(logits: Sequence[float], req: Req) -> Filtered:
    """Step 5 of the contract, on adjusted logits."""
    params = req.sampling_params
    highest = max(logits)
    weights = [math.exp((x - highest) / params.temperature) for x in logits]
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    is_sequential = params.filter_order == "sequential" and params.top_k != -1
    total = sum(weights[i] for i in order[: params.top_k]) if is_sequential else sum(weights)
    p = [w / total for w in weights]
    largest = max(p)
    kept, before, margin = {}, 0.0, math.inf
    for rank, i in enumerate(order):
        in_top_k = params.top_k == -1 or rank < params.top_k
        in_top_p = params.top_p == 1.0 or before < params.top_p
        if in_top_k and in_top_p and p[i] >= params.min_p * largest and p[i] > 0.0:
            kept[i] = p[i]
        if params.top_p < 1.0:
            margin = min(margin, abs(before - params.top_p))
        if params.min_p > 0.0:
            margin = min(margin, abs(p[i] / largest - params.min_p))
        before += p[i]
    total = sum(kept.values())
    return Filtered({i: share / total for i, share in kept.items()}, margin)


def exact_distribution(logits: Sequence[float], req: Req) -> list[float]:
    kept = filtered(adjusted(logits, req), req).kept
    return [kept.get(i, 0.0) for i in range(len(logits))]


def exact_token(logits: Sequence[float], req: Req, position: int) -> tuple[int, float]:
    """The token, and a margin: the error that would change it."""
    logits = adjusted(logits, req)
    if req.sampling_params.is_greedy:
        best = sorted(set(logits), reverse=True)
        return logits.index(best[0]), best[0] - best[1] if len(best) > 1 else math.inf
    result = filtered(logits, req)
    ids = torch.tensor(list(result.kept))
    noise = gumbel_noise(torch.tensor(req.seed), torch.tensor(position), ids).tolist()
    scores = [math.log(p) + g for p, g in zip(result.kept.values(), noise)]
    first, *others = sorted(zip(scores, result.kept), reverse=True)
    gap = first[0] - others[0][0] if others else math.inf
    return first[1], min(gap, result.margin)


def make_info(reqs: Sequence[Req], vocab_size: int) -> SamplingBatchInfo:
    return make_sampling_batch_info(reqs, vocab_size, check_device())


def run_sampler(
    impl: type[Sampler],
    logits: torch.Tensor,
    info: SamplingBatchInfo,
    positions: Sequence[int] | torch.Tensor,
) -> SampleOutput:
    """A sampler's output; checks that the inputs are not modified."""
    device = check_device()
    logits, positions = logits.to(device), torch.as_tensor(positions, dtype=torch.int64, device=device)
    given = {field.name: getattr(info, field.name) for field in fields(info)} | {"positions": positions}
    given = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    before = {name: value.clone() for name, value in given.items()}
    bits = logits.clone().view(torch.int32)
    output = run_poisoned(impl().sample, logits, info, positions)
    expect_equal("logits afterwards, bit by bit", logits.view(torch.int32), bits)
    for name, value in given.items():
        expect_equal(f"{name} afterwards", value, before[name])
    ids = output.next_token_ids
    expect_equal("form of next_token_ids", (ids.dtype, tuple(ids.shape)), (torch.int64, (logits.shape[0],)))
    return output


def sample(
    impl: type[Sampler],
    rows: Sequence[Sequence[float]] | torch.Tensor,
    reqs: Sequence[Req],
    positions: Sequence[int] | None = None,
) -> list[int]:
    logits = torch.as_tensor(rows, dtype=torch.float32)
    info = make_info(reqs, logits.shape[1])
    return run_sampler(impl, logits, info, positions or [0] * len(reqs)).next_token_ids.tolist()


def repeat_row(info: SamplingBatchInfo, seeds: torch.Tensor) -> SamplingBatchInfo:
    """A batch of one row -> the same row with each of the seeds."""
    tensors = {name: value for name, value in vars(info).items() if isinstance(value, torch.Tensor)}
    rows: dict[str, Any] = {
        name: value.expand(len(seeds), *value.shape[1:]).contiguous() for name, value in tensors.items()
    }
    return replace(info, **{**rows, "seeds": seeds.to(check_device())})


def draw_many(impl: type[Sampler], logits: Sequence[float], req: Req, num_draws: int) -> torch.Tensor:
    """`num_draws` tokens, with consecutive seeds and repeating positions, which the hash must keep apart."""
    rows = torch.arange(num_draws)
    info = repeat_row(make_info([req], len(logits)), seeds=rows // 4)
    batch = torch.tensor(logits, dtype=torch.float32).repeat(num_draws, 1)
    return run_sampler(impl, batch, info, rows % 4).next_token_ids.cpu()
