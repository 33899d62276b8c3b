"""Counts the cost of a small KV pool: steps, and tokens that are recomputed after a retraction.

    python -m diptych.shared.tools.bench.small_pools docs/lab/small-pools.svg

Runs a scheduler on the ledger model (`diptych.shared.tools.conformance.oracles.ledger`), whose steps need no
GPU and give the same counts on every machine. Prints them, and writes a plot.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diptych.shared import registry
from diptych.shared.tools.conformance.oracles.ledger import expected_tokens
from diptych.shared.tools.conformance.oracles.scheduler_harness import VOCAB_SIZE, SchedulerHarness

PERCENTAGES = (5, 10, 15, 20, 30, 40, 50, 70, 100)
CONTEXT_LEN = 256


@dataclass(frozen=True)
class Load:
    """Concurrent requests of uniform lengths. `used_share`: the share of max_new_tokens that they use; a stop
    token ends them there."""

    name: str
    used_share: float
    num_reqs: int = 64
    prompt_lens: tuple[int, int] = (8, 40)
    output_lens: tuple[int, int] = (8, 40)
    seed: int = 0


LOADS = (Load("all of max_new_tokens used", 1.0), Load("a quarter of max_new_tokens used", 0.25))


@dataclass(frozen=True)
class Count:
    load: str
    scheduler: str
    conservativeness: float
    percentage: int  # of the slots that all requests would fill together
    num_slots: int
    num_steps: int
    num_retractions: int
    num_computed_tokens: int
    num_useful_tokens: int  # computed if no token is computed twice or in vain

    @property
    def useful_share(self) -> float:
        return self.num_useful_tokens / self.num_computed_tokens


def requests_of(load: Load) -> list[tuple[list[int], int, frozenset[int], int]]:
    """List for each request its prompt, max_new_tokens, stop tokens, and the number of output tokens."""
    rng = random.Random(load.seed)
    reqs = []
    for i in range(load.num_reqs):
        prompt = [
            i % VOCAB_SIZE,
            *(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(*load.prompt_lens) - 1)),
        ]
        wanted = rng.randint(*load.output_lens)
        tokens = expected_tokens(prompt, wanted, VOCAB_SIZE)
        if load.used_share == 1.0:
            reqs.append((prompt, wanted, frozenset[int](), wanted))
        else:
            num_out = tokens.index(tokens[-1]) + 1
            reqs.append((prompt, int(num_out / load.used_share), frozenset([tokens[-1]]), num_out))
    return reqs


def count(load: Load, scheduler: str, percentage: int, conservativeness: float) -> Count:
    reqs = requests_of(load)
    need = sum(len(prompt) + num_out - 1 for prompt, _, _, num_out in reqs)
    longest = max(len(prompt) + max_new for prompt, max_new, _, _ in reqs)
    harness = SchedulerHarness(
        replace={"scheduler": registry.load("scheduler", scheduler)},
        pool_tokens=max(need * percentage // 100, longest),
        context_len=CONTEXT_LEN,
        max_running_requests=load.num_reqs,
        schedule_conservativeness=conservativeness,
        disable_radix_cache=True,  # so that recomputed tokens are counted, not found in the cache
    )
    for prompt, max_new, eos, _ in reqs:
        harness.submit(prompt, max_new, eos=eos)
    while harness.scheduler.has_work():
        harness.scheduler.step()
    stats = harness.scheduler.stats()
    assert stats.num_generated_tokens == sum(num_out for *_, num_out in reqs)
    return Count(
        load.name, scheduler, conservativeness, percentage, harness.allocator.size, stats.num_steps,
        stats.num_retractions, harness.model_runner.num_computed_tokens, need,
    )  # fmt: skip


def count_all(
    loads: Sequence[Load] = LOADS,
    percentages: Sequence[int] = PERCENTAGES,
    schedulers: Sequence[str] = ("reference", "optimized"),
    conservativenesses: Sequence[float] = (0.1, 0.3, 1.0),
) -> list[Count]:
    return [
        count(load, scheduler, percentage, conservativeness)
        for load in loads
        for scheduler in schedulers
        for conservativeness in conservativenesses
        for percentage in percentages
    ]


def plot(counts: Sequence[Count], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    text = {"svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"]}
    matplotlib.rcParams.update({"svg.hashsalt": "diptych", **text})
    from matplotlib import pyplot

    loads = list(dict.fromkeys(one.load for one in counts))
    figure, axes = pyplot.subplots(2, len(loads), figsize=(5 * len(loads), 6), sharex=True, squeeze=False)
    for column, load in enumerate(loads):
        shares, steps = axes[0][column], axes[1][column]
        shares.set(title=load, ylabel="useful / computed tokens")
        steps.set(ylabel="steps", yscale="log", xlabel="pool, % of what the load fills")
        curves: dict[tuple[str, float], list[Count]] = {}
        for one in counts:
            if one.load == load:
                curves.setdefault((one.scheduler, one.conservativeness), []).append(one)
        for (scheduler, conservativeness), own in curves.items():
            style = {"label": f"{scheduler}, {conservativeness:g}"}
            style["linestyle"] = "-" if scheduler == "reference" else "--"
            x = [one.percentage for one in own]
            shares.plot(x, [one.useful_share for one in own], **style)
            steps.plot(x, [one.num_steps for one in own], **style)
    axes[1][0].legend(title="scheduler, conservativeness", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main(file: str) -> None:
    counts = count_all()
    plot(counts, Path(file))
    for one in counts:
        print(
            f"{one.load:34} {one.scheduler:9} {one.conservativeness:4g} {one.percentage:4} %"
            f" {one.num_steps:5} steps {one.num_retractions:4} retractions {one.useful_share:.3f} useful"
        )


if __name__ == "__main__":
    main(sys.argv[1])
