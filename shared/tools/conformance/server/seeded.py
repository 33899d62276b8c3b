"""Single tokens verified one by one: against the reference's own draw where the noise is known, else against
its best token.

For each token the margin is the distance of the best score to the score of the server's token, in nats; 0 for
the same token. A correct server has a small share of other tokens (flips) and small margins, by rounding
alone. So the test needs no log-probabilities of the server.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from diptych.shared.tools.conformance.server.checks import Context, Finding, check
from diptych.shared.tools.conformance.server.client import Answer
from diptych.shared.tools.conformance.server.draws import Floats

ALPHA = 5e-6
"""Of each of two tests: a run raises a false alarm with a probability of 1e-5 at most."""
POWER = 0.99
CLIP = 1.0
"""Largest margin that counts."""
WHY = "A wrong seed, temperature, filter or number format changes few tokens, and no text looks wrong."


@dataclass(frozen=True)
class Honest:
    """Upper limits of a correct server: share of flips, and mean and variance of clipped margins."""

    flips: float
    mean: float
    variance: float


GREEDY = {
    "float32": Honest(1e-3, 1e-5, 1e-7),
    "float16": Honest(0.022, 1e-4, 5e-7),
    "bfloat16": Honest(0.075, 2e-3, 8e-5),
    "fp8": Honest(0.12, 4e-3, 2.2e-4),
    "int8": Honest(0.12, 4e-3, 2.2e-4),
    "q8_0": Honest(0.14, 6e-3, 5e-4),
    "int4": Honest(0.20, 0.015, 2e-3),
    "q4": Honest(0.30, 0.06, 0.02),
}
SAMPLED = {
    "float32": Honest(3e-4, 1e-5, 1e-7),
    "float16": Honest(1.5e-3, 5e-5, 5e-7),
    "bfloat16": Honest(6e-3, 1e-4, 4e-6),
    "fp8": Honest(0.013, 8e-4, 1e-4),
    "int8": Honest(0.013, 8e-4, 1e-4),
    "q8_0": Honest(0.02, 2e-3, 2e-4),
    "int4": Honest(0.033, 6e-3, 1.8e-3),
    "q4": Honest(0.08, 0.02, 0.01),
}
"""About twice what this project's engine has on tiny-dense and tiny-moe, 384 greedy and 1,536 sampled tokens
each (`tests.server_check.honest_flips`). float32 has none there, which bounds its share by 1e-3. q8_0 and q4
are larger by the errors of their log-probabilities."""


@dataclass(frozen=True)
class Verified:
    """Margins of single tokens; inf for one that the filters exclude."""

    margins: Floats

    @property
    def num_flips(self) -> int:
        return int((self.margins > 0).sum())

    def flip_p_value(self, honest: Honest) -> float:
        """The exact probability of so many flips of a correct server, or more."""
        return binomial_tail(len(self.margins), self.num_flips, honest.flips)

    def margin_p_value(self, honest: Honest) -> float:
        """An upper bound of the probability of such a mean, by Bernstein's inequality."""
        num = len(self.margins)
        excess = float(np.minimum(self.margins, CLIP).mean()) - honest.mean
        if excess <= 0:
            return 1.0
        return math.exp(-num * excess**2 / (2 * honest.variance + 2 * CLIP * excess / 3))


def binomial_tail(num: int, least: int, share: float) -> float:
    """P(X >= least) of a binomial distribution."""
    if least <= 0:
        return 1.0
    logs = [
        math.lgamma(num + 1) - math.lgamma(k + 1) - math.lgamma(num - k + 1)
        + k * math.log(share) + (num - k) * math.log1p(-share)
        for k in range(least, num + 1)
    ]  # fmt: skip
    top = max(logs)
    return min(1.0, math.exp(top) * sum(math.exp(x - top) for x in logs))


def smallest_fault(num: int, honest: Honest) -> float:
    """The smallest share of wrong tokens that `num` tokens show with probability POWER. 1: none."""
    alarm = next((k for k in range(num + 2) if binomial_tail(num, k, honest.flips) <= ALPHA), num + 1)
    for share in np.geomspace(1e-4, 0.999, 200):
        if alarm <= num and binomial_tail(num, alarm, float(share)) >= POWER:
            return float(share)
    return 1.0


def margin_of(row: Floats, token: int, temperature: float, seed: int, position: int, top_k: int) -> float:
    """The margin of a token: in nats of log-probability, at temperature 0 of the logits."""
    if not 0 <= token < len(row):
        return math.inf
    scores = row.astype(np.float64)
    if temperature > 0:
        import torch

        from diptych.shared.sampling.noise import gumbel_noise

        ids = torch.arange(len(row))
        noise = gumbel_noise(torch.tensor(seed), torch.tensor(position), ids).numpy()
        kept = np.ones(len(row), bool)
        if top_k:
            kept = scores >= np.sort(scores)[-top_k]
        scores = np.where(kept, scores / temperature + noise, -np.inf)
    return float(scores.max() - scores[token])


def asks_of(context: Context, num: int) -> list[tuple[list[int], int]]:
    """Beginnings of the prompts, and a seed for each."""
    found = []
    for _ in range(num):
        prompt = context.rng.choice(context.prompts)
        length = context.rng.randint(1, len(prompt))
        found.append((prompt[:length], context.rng.randrange(2**31)))
    return found


def verified(context: Context, num: int, fields: dict[str, Any], temperature: float, top_k: int) -> Verified:
    """Ask for single tokens and verify them."""
    more = {"logprobs": 1} if context.offers.completion_logprobs else context.server.id_params

    def ask(prompt: list[int], seed: int) -> Answer:
        own = {"seed": seed} if temperature > 0 else {}
        return context.server.complete(prompt, max_tokens=1, **fields, **own, **more)[0]

    asks = asks_of(context, num)
    answers = context.server.at_once([partial(ask, *each) for each in asks], context.limits.concurrency)
    margins = []
    for (prompt, seed), answer in zip(asks, answers):
        ids = answer.token_ids or ()
        if ids:  # an end token, which some servers do not report, is left out
            row = context.oracle.logits(prompt)[-1]
            margins.append(margin_of(row, ids[0], temperature, seed, len(prompt) - 1, top_k))
    return Verified(np.array(margins))


def judged(context: Context, found: Verified, what: str, limits: dict[str, Honest]) -> Finding:
    honest, num = limits[context.dtype], len(found.margins)
    if num < 20:
        return Finding("not offered", f"{num} tokens are too few")
    margins = np.minimum(found.margins, CLIP)
    evidence = {
        "tokens": num,
        "flips": found.num_flips,
        "mean margin": float(margins.mean()),
        "largest margin": float(margins.max()),
        "smallest fault found": f"{smallest_fault(num, honest):.2%} of tokens wrong, at false alarm 1e-5",
    }
    share, p = found.num_flips / num, min(found.flip_p_value(honest), found.margin_p_value(honest))
    if p <= ALPHA:
        name = _nearest(found)
        text = f"{what}: {found.num_flips} of {num} tokens are others ({name})"
        return Finding("fails", text, f"at most {honest.flips:.2%}", share, evidence | {"p": p}, num)
    return Finding(
        "holds", f"{what}: {found.num_flips} of {num} are others", evidence=evidence, num_cases=num
    )


def _nearest(found: Verified) -> str:
    """What such margins mean."""
    excluded = int(np.isinf(found.margins).sum())
    if excluded > len(found.margins) // 50:
        return "tokens that the filters exclude: another top_k"
    if found.num_flips > len(found.margins) // 3:
        return "as many as of another seed or noise"
    return "margins as of another temperature, other weights or fewer bits"


def cannot(context: Context) -> Finding | None:
    if not (context.offers.token_id_prompts and context.offers.generated_ids):
        return Finding("not offered", "it needs prompts of token ids, and ids of generated tokens")
    return None


def filters_off(context: Context) -> dict[str, Any]:
    """Fields that disable the default filters of servers."""
    off = {"top_p": 1.0}
    if context.offers.top_k:
        off["top_k"] = -1
    if context.offers.min_p:
        off["min_p"] = 0.0
    return off


@check("seeded.greedy", "Single greedy tokens are the reference's best, up to the format's near ties.", WHY)
def greedy_tokens(context: Context) -> Iterator[Finding]:
    if (missing := cannot(context)) is not None:
        yield missing
        return
    found = verified(context, context.limits.num_seeded // 2, {"temperature": 0}, 0.0, 0)
    yield judged(context, found, "greedy tokens", GREEDY)


@check(
    "seeded.sampled",
    "A sampled token follows from its seed and position alone (servers whose noise is this project's).",
    WHY,
)
def sampled_tokens(context: Context) -> Iterator[Finding]:
    if (missing := cannot(context)) is not None:
        yield missing
        return
    if not (context.noise_is_known and context.offers.seed):
        yield Finding("not offered", "the server's noise is not known: --seeded diptych says that it is")
        return
    num = context.limits.num_seeded // 4
    for temperature, top_k in ((1.0, 0), (0.7, 8)):
        fields = filters_off(context) | {"temperature": temperature}
        if top_k:
            fields["top_k"] = top_k
        found = verified(context, num, fields, temperature, top_k)
        what = f"tokens at temperature {temperature}" + (f", top_k {top_k}" if top_k else "")
        yield judged(context, found, what, SAMPLED)
