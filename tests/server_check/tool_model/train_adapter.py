"""Trains the adapter on a CPU: python -m tests.server_check.tool_model.train_adapter --steps 300"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM

from diptych.shared.text.tokenizer import Tokenizer
from diptych.shared.tools.conformance.server.conversations import Talk, talk
from tests.server_check.tool_model.tool_folder import ADAPTER, BASE, MARKER_IDS, compressed, write_tokenizer

RANK = 16
SAVED_RANK = 8  # half the bytes of RANK
IGNORED = -100
FIRST_SEED = 1_000_000  # checks and tests use smaller ones


class LowRank(nn.Module):
    """W + B A."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(RANK, weight.shape[1]) / RANK)
        self.b = nn.Parameter(torch.zeros(weight.shape[0], RANK))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.b @ self.a


class Rows(nn.Module):
    """An embedding with other rows for the markers."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        mean = weight[: MARKER_IDS[0]].mean(0)
        noise = torch.randn(len(MARKER_IDS), weight.shape[1])
        self.rows = nn.Parameter(mean + 0.5 * weight.std() * noise)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.index_copy(0, torch.tensor(MARKER_IDS), self.rows)


def example(rng: random.Random, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Token ids and targets; only the answer has targets."""
    asked: Talk = talk(rng)
    tools = asked.tools if asked.call or rng.random() < 0.8 else None
    thinks = rng.random() < 0.6
    prompt = tokenizer.chat(asked.messages, tools=tools, **({} if thinks else {"enable_thinking": False}))
    answer = asked.answer
    thought = "I know this."
    if asked.call is not None:
        name, arguments = asked.call
        answer = f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
        thought = f"The tool is {name}."
    if thinks:
        answer = f"<think>\n{thought}\n</think>\n\n{answer}"
    target = tokenizer.encode(answer + "<|im_end|>", False)
    ids = prompt + target
    return ids, [IGNORED] * (len(prompt) - 1) + target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--out", type=Path, default=ADAPTER)
    parser.add_argument("--folder", type=Path, default=Path("build/tool-model"))
    options = parser.parse_args()
    torch.manual_seed(0)
    write_tokenizer(options.folder)
    tokenizer = Tokenizer.from_pretrained(options.folder)
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    model.requires_grad_(False)
    names = [name for name, module in model.model.layers.named_modules() if isinstance(module, nn.Linear)]
    for name in names:
        module = model.model.layers.get_submodule(name)
        parametrize.register_parametrization(module, "weight", LowRank(module.weight))
    embedding = model.model.embed_tokens
    parametrize.register_parametrization(embedding, "weight", Rows(embedding.weight))
    weights = [p for p in model.parameters() if p.requires_grad]
    print(f"{sum(p.numel() for p in weights)} weights")
    optimizer = torch.optim.AdamW(weights, lr=options.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.learning_rate, options.steps)
    rng, begin = random.Random(FIRST_SEED), time.monotonic()
    for step in range(options.steps):
        batch = [example(rng, tokenizer) for _ in range(options.rows)]
        longest = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in batch])
        targets = torch.tensor([t + [IGNORED] * (longest - len(t)) for _, t in batch])
        with parametrize.cached():
            hidden = model.model(ids).last_hidden_state
            is_target = targets != IGNORED
            logits = F.linear(hidden[is_target], embedding.weight)
            loss = F.cross_entropy(logits, targets[is_target])
            optimizer.zero_grad()
            loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        if step % 10 == 9:
            right = float((logits.argmax(-1) == targets[is_target]).float().mean())
            print(
                f"{step + 1}: loss {loss:.3f}, {right:.3f} right, {time.monotonic() - begin:.0f} s",
                flush=True,
            )
    found = {"rows": embedding.parametrizations.weight[0].rows.detach().to(torch.bfloat16)}
    by_layer: dict[str, list[torch.Tensor]] = {}
    for name in names:  # those of a layer after those of the layer before
        trained = model.model.layers.get_submodule(name).parametrizations.weight[0]
        parts = compressed(trained.a.detach(), trained.b.detach().T, SAVED_RANK)
        for part, value in parts.items():
            by_layer.setdefault(f"{name.partition('.')[2]}.weight.{part}", []).append(value)
    save_file(found | {name: torch.stack(values) for name, values in by_layer.items()}, options.out)


if __name__ == "__main__":
    main()
