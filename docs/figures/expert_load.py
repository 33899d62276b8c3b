"""Expert load of a real run of tiny-moe: tokens of each expert, and experts that a decode step reads."""

from __future__ import annotations

import torch

from diptych.reference.moe import TopK
from diptych.shared.engine.llm import LLM
from diptych.shared.types import SamplingParams
from docs.figures.svg import NARROW, WIDE, Svg, figure, views

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
    llm = LLM("tiny-moe", panel="reference", device="cpu", dtype="float32", max_total_tokens=2048)
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


def draw(calls: list[torch.Tensor], num_layers: int, width: int) -> Svg:
    table = loads(calls, num_layers)
    svg = Svg(width)
    left = 62 if width == WIDE else 26
    cell = (width - left - 1) / len(table[0])
    most = max(map(max, table))
    even = sum(table[0]) / len(table[0])
    svg.text(left, 13, "Expert" if width == WIDE else "Expert, and tokens that it computed", "s")
    for expert in range(len(table[0])):
        svg.text(left + expert * cell, 31, str(expert), "b")
    for layer, row in enumerate(table):
        y = 40 + 36 * layer
        svg.text(0, y + 17, f"Layer {layer}" if width == WIDE else f"L{layer}", "b")
        for expert, load in enumerate(row):
            x = left + expert * cell
            svg.rect(x, y, cell - 6, 26, "f0")
            svg.rect(x, y, (cell - 6) * load / most, 26, "fa")
            svg.text(x + 4, y + 17.5, str(load))
            mark = x + (cell - 6) * even / most
            svg.line(mark, y + 23, mark, y + 30, "lc")
    y = 40 + 36 * num_layers + 24
    svg.text(0, y, "Experts that a decode step reads, of 8", "b")
    for i, batch in enumerate(BATCHES):
        top, mean = y + 12 + 28 * i, experts_read(calls, batch)
        svg.text(0, top + 15, f"{batch} token{'s' if batch > 1 else ''}")
        room = width - 80 - 34
        svg.rect(80, top, room, 20, "f0")
        svg.rect(80, top, room * mean / 8, 20, "fb")
        svg.text(width - 28, top + 15, f"{mean:.1f}")
    return svg


def make() -> str:
    calls, num_layers = record()
    table = loads(calls, num_layers)
    even = sum(table[0]) / len(table[0])
    most = max(map(max, table))
    label = (
        f"Tokens of each expert. The most loaded expert of a layer computed {most} tokens, an even share is "
        f"{even:.0f}. A decode step reads {experts_read(calls, 1):.1f} experts of a layer for one token and "
        f"{experts_read(calls, 16):.1f} for sixteen."
    )
    caption = (
        f"<code>tiny-moe</code> ({num_layers} layers, 8 experts, 2 per token) in the reference panel, "
        f"{len(PROMPTS)} requests of four kinds. Above: tokens of each expert; the mark below a bar is the "
        f"even share, {even:.0f}. The most loaded expert has {most / even:.1f} times as many."
    )
    return figure(views(label, draw(calls, num_layers, WIDE), draw(calls, num_layers, NARROW)), caption)
