"""Expert load of a real run of tiny-moe: tokens of each expert, and experts that a decode step reads."""

from __future__ import annotations

import torch

from diptych.reference.moe import TopK
from diptych.shared.engine.llm import LLM
from diptych.shared.types import SamplingParams
from docs.figures.blocks import Bar, bars, boxes, grid, heading, percent
from docs.figures.five_requests import EXACT
from docs.figures.svg import figure

PROMPTS = (
    [f"What is {n} + {n + 7}?" for n in (3, 12, 25, 31)]
    + [f"Count from {n} to {n + 6}." for n in (2, 9, 14, 20)]
    + [f"Mara bought {n} eggs. How many eggs did Mara buy?" for n in (4, 6, 11, 15)]
    + [f"{name} lives in {city}. In which city does {name} live?" for name, city in
       (("Otto", "Bergen"), ("Ines", "Lima"), ("Mara", "Bergen"), ("Pip", "Lima"))]
)  # fmt: skip
BATCHES = (1, 2, 4, 8, 16)


def record() -> tuple[list[torch.Tensor], int]:
    """(expert ids [num_tokens, k] of each call of a router, layer after layer in every step; number of
    layers). float32, so that the choices are the same everywhere."""
    llm = LLM("tiny-moe", **EXACT, max_total_tokens=2048)
    calls: list[torch.Tensor] = []
    for module in llm.assembly.model.modules():
        if isinstance(getattr(module, "topk", None), TopK):
            module.topk = recorded(module.topk, calls)
    prompts = [llm.chat_prompt([{"role": "user", "content": text}]) for text in PROMPTS]
    llm.generate(prompts, SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True), progress=False)
    return calls, llm.model_config.num_hidden_layers


def recorded(topk: TopK, calls: list[torch.Tensor]) -> object:
    def call(*args: object) -> object:
        output = topk(*args)
        calls.append(output.topk_ids)
        return output

    return call


def loads(calls: list[torch.Tensor], num_layers: int) -> list[list[int]]:
    """Pairs of a token and an expert, by layer and expert."""
    return [
        torch.cat(calls[layer::num_layers]).flatten().bincount(minlength=8).tolist()
        for layer in range(num_layers)
    ]


def experts_read(calls: list[torch.Tensor], batch: int) -> float:
    """Distinct experts of a layer, on average, for the first `batch` tokens of each decode step."""
    counts = [ids[:batch].unique().numel() for ids in calls if len(ids) == len(PROMPTS)]
    return sum(counts) / len(counts)


def make() -> str:
    calls, num_layers = record()
    table = loads(calls, num_layers)
    even = sum(table[0]) / len(table[0])
    most = max(map(max, table))
    rows = [[("b", "Expert"), *(("b", str(expert)) for expert in range(len(table[0])))]]
    for layer, row in enumerate(table):
        cells = [
            ("load", str(load), f"--share:{percent(load / most)};--mark:{percent(even / most)}")
            for load in row
        ]
        rows.append([("b", f"Layer {layer}"), *cells])
    read = [(batch, experts_read(calls, batch)) for batch in BATCHES]
    below = bars(
        Bar(f"{batch} token{'s' * (batch > 1)}", mean / 8, f"{mean:.1f}", "fb") for batch, mean in read
    )
    caption = (
        f"<code>tiny-moe</code> ({num_layers} layers, 8 experts, 2 per token) in the reference panel, "
        f"{len(PROMPTS)} requests of four kinds. Above: tokens of each expert; the line is the even share, "
        f"{even:.0f}. The most loaded expert has {most / even:.1f} times as many."
    )
    title = heading("Experts of a layer that a decode step reads, of 8")
    return figure(boxes(grid(rows) + title + below), caption)
