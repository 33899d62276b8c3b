"""Train an EAGLE-3 head on texts of any target, as train_dflash.py makes them."""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import typer
from torch.nn.utils.rnn import pad_sequence

from diptych.shared.tools.training.eagle3_head import Eagle3Head, Eagle3Shape, at_slots, find_slots
from diptych.shared.tools.training.head_layers import run_steps, train_steps
from diptych.shared.tools.training.own_texts import Target, Text
from diptych.shared.tools.training.packing import Batch
from diptych.shared.tools.training.train import TrainOptions
from diptych.shared.tools.training.train_eagle3 import (
    Lesson,
    Losses,
    losses_of,
    save_drafting,
    weighted,
)

NUM_STEPS = 4
REPORTED = 32  # texts of a report


def features_read(layers: Sequence[int]) -> list[int]:
    """Which of the texts' layers: the first, the one in the middle and the last."""
    return sorted({0, len(layers) // 2, len(layers) - 1})


def new_head(target: Target, seed: int) -> Eagle3Head:
    """Random, but for lm_head, which starts as the target's."""
    config, model = target.config, cast("Any", target.model)
    torch.manual_seed(seed)
    shape = Eagle3Shape(
        config.hidden_size, config.intermediate_size, config.num_qo_heads, config.num_kv_heads,
        config.head_dim, config.vocab_size, len(features_read(target.layers)), config.rms_norm_eps,
        config.rope.theta,
    )  # fmt: skip
    head = Eagle3Head(shape)
    output = model.model.embed_tokens if model.lm_head is None else model.lm_head
    head.lm_head.weight.data.copy_(output.weight * model.model.norm.weight)
    return head.to(target.device, target.dtype)


def lesson_of(target: Target, texts: Sequence[Text]) -> tuple[Lesson, Batch]:
    """As the lessons of packed rows, with a text in each row."""
    ids = pad_sequence([text.token_ids for text in texts], True)
    is_said = pad_sequence([text.is_said for text in texts], True)
    positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    is_slot = torch.zeros_like(is_said)
    is_slot[:, :-2] = (
        is_said[:, 1:-1] & is_said[:, 2:]
    )  # the drafted token follows one that is the assistant's
    slots = find_slots(is_slot)
    after = slots._replace(indices=(slots.indices + 1).clamp(max=ids.shape[1] - 1))
    size, read = target.config.hidden_size, features_read(target.layers)
    features = pad_sequence([text.features for text in texts], True).unflatten(-1, (-1, size))[..., read, :]
    last = at_slots(pad_sequence([text.last for text in texts], True), after).to(target.dtype)
    with torch.no_grad():
        lesson = Lesson(
            target.model.embed(ids.roll(-1, dims=1)), features.flatten(-2).to(target.dtype),
            target.model.compute_logits(last), slots,
        )  # fmt: skip
    return lesson, Batch(ids, ids, is_said, positions, torch.zeros_like(ids))


def train_on_texts(
    target: Target, trained: Sequence[Text], held_out: Sequence[Text], options: TrainOptions, out: Path,
    vocabulary: int,
) -> None:  # fmt: skip
    """Train a head, cut it to the `vocabulary` tokens that answers have most often, and save it."""
    head, dice = new_head(target, options.seed), random.Random(options.seed)

    def measured(texts: Sequence[Text]) -> Losses:
        return losses_of(head, *lesson_of(target, texts), NUM_STEPS)

    def losses() -> Iterator[torch.Tensor]:
        for _ in range(options.num_steps):
            yield weighted(measured(dice.sample(trained, options.num_rows)))

    @torch.no_grad()
    def evaluate() -> dict[str, Any]:
        some = held_out[:REPORTED]
        parts = [measured(some[i : i + options.num_rows]) for i in range(0, len(some), options.num_rows)]
        right = torch.tensor([[float(step) for step in part.top1] for part in parts]).nanmean(0)
        return {"right_by_step": [round(share, 4) for share in right.tolist()]}

    num_steps, loss, elapsed = run_steps(train_steps(head, losses(), options), evaluate)
    said = torch.cat([text.token_ids[text.is_said] for text in trained])
    counts = torch.bincount(said, minlength=target.config.vocab_size)
    token_ids = counts.topk(min(vocabulary, len(counts))).indices.sort().values
    record = {"steps": num_steps, "seconds": round(elapsed, 1), "final_loss": round(loss, 4)} | evaluate()
    head.lm_head.weight = torch.nn.Parameter(head.lm_head.weight.data[token_ids])
    sizes = target.config.vocab_size, target.config.context_len
    save_drafting(head, out, [target.layers[i] for i in features_read(target.layers)], token_ids.cpu(), sizes)
    record["num_parameters"] = sum(parameter.numel() for parameter in head.parameters())
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    typer.echo(f"EAGLE-3, held out: {record}")
