"""Train the EAGLE-3 head of the built-in dense model: some twenty minutes of one CPU core. (Written for a GPU
too, where it has not been tried yet.)

python -m diptych.shared.tools.training.train_eagle3 --out shared/assets/tiny-dense-eagle3
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel, set_seed

from diptych.shared.tools.corpus.corpus import held_out_questions
from diptych.shared.tools.corpus.exchange import Message
from diptych.shared.tools.training.acceptance import save_card
from diptych.shared.tools.training.eagle3_head import Eagle3Head, Eagle3Shape, Slots, at_slots, find_slots
from diptych.shared.tools.training.head_layers import rounded
from diptych.shared.tools.training.packing import Batch, ChatEncoder, PackedBatches, batch_loader, pack
from diptych.shared.tools.training.train import MasterAdamW, TrainOptions, document_mask, run_with_progress

TARGET = Path(__file__).parents[2] / "assets" / "tiny-dense"
TARGET_LAYERS = (2, 4, 5)
"""Whose inputs the head takes. Of six layers the usual three (2, L / 2, L - 3) would be two, and not late."""
INTERMEDIATE_SIZE = 768
STEP_DECAY = 0.8
"""How much a drafted step counts, against the one before: a step matters only if those before were right."""


class Lesson(NamedTuple):
    """What the target says about a batch: inputs of the head, and what it should have guessed."""

    embeds: torch.Tensor  # [num_rows, row_len, hidden_size], of the next token
    features: torch.Tensor  # [num_rows, row_len, len(TARGET_LAYERS) * hidden_size]
    target_logits: torch.Tensor  # [num_rows, num_slots, vocab_size], for the token after the next
    slots: Slots


class Losses(NamedTuple):
    """Means over the slots, one for each drafted step, and how many slots there were."""

    num_drafted: list[int]
    cross_entropy: list[torch.Tensor]
    top1: list[torch.Tensor]  # how often the target's best token is the head's best
    top4: list[torch.Tensor]  # ... among its best four


def head_shape(target: PreTrainedModel) -> Eagle3Shape:
    config = target.config
    return Eagle3Shape(
        hidden_size=config.hidden_size,
        intermediate_size=INTERMEDIATE_SIZE,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        num_features=len(TARGET_LAYERS),
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=config.rope_parameters["rope_theta"],
    )


def new_head(target: PreTrainedModel, seed: int) -> Eagle3Head:
    """Random, but for lm_head: it starts as the target's, with the target's final norm's weight in it."""
    set_seed(seed)
    head = Eagle3Head(head_shape(target)).to(target.device, target.dtype)
    with torch.no_grad():
        head.lm_head.weight.copy_(target.lm_head.weight * target.model.norm.weight)
    return head


@torch.no_grad()
def lesson_of(target: PreTrainedModel, batch: Batch) -> Lesson:
    """Drafted are the assistant's words, from the first on: that one comes with the prompt."""
    output = target.model(
        input_ids=batch.input_ids,
        attention_mask=document_mask(batch.document_ids),
        position_ids=batch.positions,
        use_cache=False,
        output_hidden_states=True,
    )
    said = batch.weights == 1.0  # the token after this one is the assistant's
    is_slot = torch.zeros_like(said)
    is_slot[:, :-1] = said[:, :-1] & said[:, 1:]
    slots = find_slots(is_slot)
    after = slots._replace(indices=(slots.indices + 1).clamp(max=said.shape[1] - 1))
    return Lesson(
        embeds=target.model.embed_tokens(batch.input_ids.roll(-1, dims=1)),
        features=torch.cat([output.hidden_states[layer_id] for layer_id in TARGET_LAYERS], dim=-1),
        target_logits=target.lm_head(at_slots(output.last_hidden_state, after)),
        slots=slots,
    )


def losses_of(head: Eagle3Head, lesson: Lesson, batch: Batch, num_steps: int) -> Losses:
    drafted = head(
        lesson.embeds, lesson.features, batch.positions, batch.document_ids, lesson.slots, num_steps
    )
    losses = Losses([], [], [], [])
    for log_probs, is_drafted in drafted:
        target_logits = lesson.target_logits[is_drafted].float()
        losses.num_drafted.append(len(log_probs))
        losses.cross_entropy.append(-(target_logits.softmax(-1) * log_probs).sum(-1).mean())
        with torch.no_grad():
            is_best = log_probs.topk(4).indices == target_logits.argmax(-1, keepdim=True)
            losses.top1.append(is_best[:, 0].float().mean())
            losses.top4.append(is_best.any(-1).float().mean())
    return losses


def weighted(losses: Losses) -> torch.Tensor:
    found = torch.stack(losses.cross_entropy)
    weights = STEP_DECAY ** torch.arange(len(found), device=found.device)
    return found @ weights / weights.sum()


def train_steps(
    head: Eagle3Head,
    target: PreTrainedModel,
    batches: Iterable[Batch],
    options: TrainOptions,
    num_draft_steps: int,
) -> Iterator[torch.Tensor]:
    """Train in place; yields each step's loss, still on the device."""
    optimizer = MasterAdamW(head, options)
    for step, batch in enumerate(batches):
        batch = Batch(*(part.to(target.device, non_blocking=True) for part in batch))
        loss = weighted(losses_of(head, lesson_of(target, batch), batch, num_draft_steps))
        loss.backward()
        optimizer.step(options.learning_rate_at(step))
        yield loss.detach()


def held_out_batch(target_folder: Path, num_questions: int, row_len: int) -> Batch:
    """Held-out questions with their right answers, which are the target's in all but one of two hundred."""
    encoder = ChatEncoder(Tokenizer.from_file(str(target_folder / "tokenizer.json")))
    documents = encoder.encode(
        [
            [*question.messages, Message(role="assistant", content=question.answer)]
            for question in held_out_questions(num_questions)
        ]
    )
    num_rows = -(-sum(len(document.token_ids) for document in documents) * 5 // 4 // row_len)
    return pack(documents, num_rows, row_len, encoder.end_of_text)


@torch.no_grad()
def evaluate(
    head: Eagle3Head, target: PreTrainedModel, batch: Batch, num_steps: int, rows_at_once: int = 4
) -> list[dict[str, float]]:
    """Measure each drafted step, over all slots of the batch: loss, and how often the head is right."""
    totals = torch.zeros(num_steps, 4)
    for start in range(0, batch.input_ids.shape[0], rows_at_once):
        part = Batch(*(each[start : start + rows_at_once].to(target.device) for each in batch))
        lesson = lesson_of(target, part)
        losses = losses_of(head, lesson, part, num_steps)
        for step in range(num_steps):
            count = losses.num_drafted[step]
            if count > 0:
                found = (losses.cross_entropy[step], losses.top1[step], losses.top4[step])
                totals[step] += count * torch.tensor([*map(float, found), 1.0])
    means = totals[:, :3] / totals[:, 3:]
    names = ("loss", "top1", "top4")
    return [{name: round(float(v), 4) for name, v in zip(names, step)} for step in means]


def save_head(head: Eagle3Head, target: PreTrainedModel, folder: Path) -> None:
    """The embedding is the target's."""
    config, token_ids = target.config, torch.arange(head.shape.vocab_size)
    save_drafting(head, folder, TARGET_LAYERS, token_ids, (config.vocab_size, config.max_position_embeddings))


def save_drafting(
    head: Eagle3Head, folder: Path, layers: Sequence[int], token_ids: torch.Tensor, target: tuple[int, int]
) -> None:
    """The public format: config.json, and model.safetensors in bfloat16. token_ids: that the rows of lm_head
    draft, ascending. target: its vocabulary and its longest text."""
    folder.mkdir(parents=True, exist_ok=True)
    shape, (vocab_size, context_len) = head.shape, target
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "draft_vocab_size": len(token_ids),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [layer_id - 1 for layer_id in layers],
            "use_aux_hidden_state": True,
        },
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": context_len,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": vocab_size,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    weights = rounded(head)
    weights["d2t"] = token_ids - torch.arange(len(token_ids))
    weights["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, token_ids, True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def record_of(
    command: str, head: Eagle3Head, options: TrainOptions, num_steps: int, draft_steps: int
) -> dict[str, Any]:
    """What training.json says before anything is measured; `num_steps` of the schedule were made."""
    is_gpu = head.fc.weight.is_cuda
    return {
        "name": "eagle3",
        "command": command,
        "device": f"one {torch.cuda.get_device_name()}" if is_gpu else "one core of a busy CPU",
        "torch": torch.__version__,
        "num_tokens": num_steps * options.num_rows * options.row_len,
        "row_len": options.row_len,
        "draft_steps": draft_steps,
        "num_parameters": sum(parameter.numel() for parameter in head.parameters()),
    }


def finish(
    head: Eagle3Head, target: PreTrainedModel, folder: Path, record: dict[str, Any], num_questions: int
) -> None:
    """Write the head, measure what was written (weights rounded to bfloat16, run in float32), record it."""
    save_head(head, target, folder)
    head.load_state_dict({name: each.to(torch.bfloat16) for name, each in head.state_dict().items()})
    questions = held_out_batch(TARGET, num_questions, record["row_len"])
    held_out = evaluate(head, target, questions, num_steps=5)
    record = {**record, "held_out": {"num_questions": num_questions, "steps": held_out}}
    (folder / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    save_card(folder)
    for step, means in enumerate(held_out, start=1):
        typer.echo(f"step {step}: " + ", ".join(f"{name} {value:.4f}" for name, value in means.items()))


def main(
    out: Annotated[Path, typer.Option(help="the folder to write")],
    steps: Annotated[int, typer.Option(help="optimizer steps of the schedule")] = 1500,
    stop_after: Annotated[int, typer.Option(help="of these, make so many; 0: all")] = 0,
    rows: Annotated[int, typer.Option(help="packed rows a step")] = 2,
    row_len: Annotated[int, typer.Option(help="tokens a row")] = 1024,
    draft_steps: Annotated[int, typer.Option(help="how deep drafts are unrolled in training")] = 4,
    learning_rate: Annotated[float, typer.Option(help="peak learning rate")] = 3e-3,
    seed: Annotated[int, typer.Option(help="seeds the weights and the training text")] = 0,
    device: Annotated[str, typer.Option(help="cuda or cpu; default: cuda if there is one")] = "",
    questions: Annotated[int, typer.Option(help="held-out questions to measure with")] = 100,
) -> None:
    """Train the EAGLE-3 head of the built-in dense model and measure it on held-out questions."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    network: Any = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    network = network.to(device).eval()
    network.requires_grad_(False)
    head = new_head(network, seed)
    options = TrainOptions(steps, rows, row_len, learning_rate, seed=seed)
    num_steps = min(stop_after or steps, steps)
    dataset = PackedBatches((TARGET / "tokenizer.json").read_text(), seed, num_steps, rows, row_len)
    workers = max(1, (os.cpu_count() or 2) - 2) if device == "cuda" else 0
    losses = train_steps(head, network, batch_loader(dataset, workers), options, draft_steps)
    _, loss, seconds = run_with_progress(losses, options)
    command = (
        f"python -m diptych.shared.tools.training.train_eagle3 --out {out} --steps {steps} "
        f"--stop-after {num_steps} --rows {rows} --row-len {row_len} --draft-steps {draft_steps} "
        f"--learning-rate {learning_rate} --seed {seed}"
    )
    record = record_of(command, head, options, num_steps, draft_steps)
    record |= {"seconds": round(seconds, 1), "final_loss": round(loss, 5)}
    finish(head, network, out, record, questions)


if __name__ == "__main__":
    typer.run(main)
