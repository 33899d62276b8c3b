"""One token of a real run, sampled: temperature, filters, and the noise of several seeds, step by step."""

from __future__ import annotations

import torch

from diptych.reference.sampler import draw as draw_tokens
from diptych.reference.sampler import filter_mask, scale
from diptych.shared.engine.llm import LLM
from diptych.shared.sampling.logprobs import sort_descending
from diptych.shared.sampling.noise import gumbel_noise
from diptych.shared.types import SamplingBatchInfo, SamplingParams
from docs.figures.blocks import Bar, bars, boxes
from docs.figures.five_requests import EXACT
from docs.figures.svg import slider

QUESTION = "Read this story: Mara lives in Bergen. Mara works as a baker. Who is the nurse?"
TEMPERATURE, TOP_K, TOP_P = 2.0, 6, 0.35
NUM_SHOWN, NUM_SEEDS = 8, 2000


class Candidates:
    """The likeliest tokens behind a prompt. float32, so that they are the same everywhere."""

    def __init__(self) -> None:
        llm = LLM("tiny-dense", **EXACT, max_total_tokens=256)
        sampler, seen = llm.assembly.parts.sampler, []
        sample = sampler.sample

        def recorded(logits: torch.Tensor, info: SamplingBatchInfo, positions: torch.Tensor) -> object:
            seen.append((logits.float(), positions))
            return sample(logits, info, positions)

        sampler.sample = recorded
        prompt = llm.chat_prompt([{"role": "user", "content": QUESTION}])
        llm.generate(prompt, SamplingParams(temperature=0, max_new_tokens=1), progress=False)
        self.logits, self.positions = seen[0]
        self.ids = sort_descending(self.logits)[1][0, :NUM_SHOWN]
        assert llm.tokenizer is not None
        self.tokens = [llm.tokenizer.decode([token_id]) for token_id in self.ids.tolist()]

    def info(
        self, seeds: list[int], temperature: float, top_k: int | None, top_p: float
    ) -> SamplingBatchInfo:
        num, vocab_size = len(seeds), self.logits.shape[-1]
        return SamplingBatchInfo(
            temperatures=torch.full((num,), temperature),
            top_ks=torch.full((num,), top_k or vocab_size),
            top_ps=torch.full((num,), top_p),
            min_ps=torch.zeros(num),
            seeds=torch.tensor(seeds),
            is_greedy=torch.zeros(num, dtype=torch.bool),
            is_all_greedy=False,
            needs_filter=top_k is not None or top_p < 1,
        )

    def scaled(self, temperature: float) -> torch.Tensor:
        return scale(self.logits, self.logits.amax(dim=-1), torch.tensor([temperature]))

    def probabilities(self, temperature: float, top_k: int | None = None, top_p: float = 1.0) -> list[Bar]:
        """Those that the filters remove are grey; probabilities are the ones before the filters."""
        scaled = self.scaled(temperature)
        keep = filter_mask(sort_descending(scaled)[0], self.info([0], temperature, top_k, top_p))[0]
        probs = scaled.softmax(-1)[0, self.ids].tolist()
        return [
            Bar(token, p, percents(p), *(("fb", "") if keep[rank] else ("f0", "s")))
            for rank, (token, p) in enumerate(zip(self.tokens, probs))
        ]

    def with_noise(self, seed: int) -> list[Bar]:
        """log p + noise; the largest of the kept tokens is drawn."""
        scaled = self.scaled(TEMPERATURE)
        noise = gumbel_noise(torch.tensor([[seed]]), self.positions[:, None], self.ids[None])[0]
        sums = (scaled.log_softmax(-1)[0, self.ids] + noise).tolist()
        drawn = int(self.draws([seed])[0])
        rows = self.probabilities(TEMPERATURE, TOP_K, TOP_P)
        for i, (token_id, total) in enumerate(zip(self.ids.tolist(), sums)):
            text = f"{total:+.2f}".replace("-", "−")
            rows[i] = rows[i]._replace(share=max(0.0, (total + 8) / 12), text=text)
            if token_id == drawn:
                rows[i] = rows[i]._replace(cls="sb")
        return rows

    def draws(self, seeds: list[int]) -> torch.Tensor:
        info = self.info(seeds, TEMPERATURE, TOP_K, TOP_P)
        scaled, positions = self.scaled(TEMPERATURE), self.positions.expand(len(seeds))
        return draw_tokens(scaled.expand(len(seeds), -1), info, positions)

    def shares(self) -> list[Bar]:
        """How often each token is drawn, with its probability among the kept ones as a mark."""
        drawn = self.draws(list(range(NUM_SEEDS)))
        rows = self.probabilities(TEMPERATURE, TOP_K, TOP_P)
        kept = sum(row.share for row in rows if not row.soft)
        for i, (row, token_id) in enumerate(zip(rows, self.ids.tolist())):
            share = (drawn == token_id).float().mean().item()
            mark = None if row.soft else row.share / kept
            rows[i] = row._replace(share=share, text=percents(share), mark=mark)
        return rows


def percents(share: float) -> str:
    return f"{100 * share:.1f} %"


def longest_is_removed(rows: list[Bar]) -> bool:
    return bool(max(rows, key=lambda row: row.share).soft)


def record() -> list[tuple[list[Bar], str]]:
    candidates = Candidates()
    noisy = {seed: candidates.with_noise(seed) for seed in range(100)}
    first = next(seed for seed, rows in noisy.items() if not longest_is_removed(rows))
    second = next(seed for seed, rows in noisy.items() if longest_is_removed(rows))
    filters = (None, 1.0), (TOP_K, 1.0), (TOP_K, TOP_P)
    rows = [
        candidates.probabilities(1.0),
        *(candidates.probabilities(TEMPERATURE, *each) for each in filters),
    ]
    rows += [noisy[first], noisy[second], candidates.shares()]
    texts = (
        "The softmax of the logits gives the probabilities. These are the likeliest tokens.",
        f"Temperature {TEMPERATURE:g}: logits are divided by it, so probabilities come closer together.",
        f"top_k = {TOP_K} keeps the {TOP_K} likeliest tokens. The others cannot be drawn.",
        f"top_p = {TOP_P:g} keeps the likeliest tokens up to that sum. The token that crosses it stays.",
        f"The draw with seed {first}. A bar is now log p + noise, and the longest one wins.",
        f"Seed {second} gives other noise. The longest bar is a removed token, so the next one wins.",
        f"The draws of {NUM_SEEDS:,} seeds. The marks are the probabilities of the kept tokens, scaled "
        "to a sum of 1: each token is drawn about as often as its probability says.",
    )
    return list(zip(rows, texts, strict=True))


def make() -> str:
    steps = [(boxes(bars(rows, "m")), text) for rows, text in record()]
    return slider(
        steps,
        f"The first token of an answer of <code>tiny-dense</code> to “{QUESTION}”, computed with the "
        "functions of <code>reference/sampler.py</code>. Grey: removed by a filter. Strong colour: drawn.",
    )
