"""Training of an EAGLE-3 head on the texts of train_dflash.py, which has the command: --eagle3 FOLDER."""

import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import typer
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence

from diptych.shared.tools.training.eagle3_head import Eagle3Head, Eagle3Shape, Slots, at_slots, find_slots
from diptych.shared.tools.training.head_layers import command_line, rounded, run_steps, train_steps
from diptych.shared.tools.training.own_texts import Target, Text
from diptych.shared.tools.training.train import TrainOptions

NUM_STEPS = 4
"""How deep drafts are unrolled."""
STEP_DECAY = 0.8
"""How much a drafted step counts, against the one before: a step matters only if those before were right."""
REPORTED = 32  # texts of a report


class Lesson(NamedTuple):
    """What the target says about some texts: inputs of the head, and what it should have guessed."""

    embeds: torch.Tensor  # [num_texts, text_len, hidden_size], of the next token
    features: torch.Tensor  # [num_texts, text_len, num_features * hidden_size]
    target_logits: torch.Tensor  # [num_texts, num_slots, vocab_size], for the token after the next
    slots: Slots


def features_read(layers: Sequence[int]) -> list[int]:
    """Which of the layers of the texts: the first, the one in the middle and the last."""
    return sorted({0, len(layers) // 2, len(layers) - 1})


def new_head(target: Target, seed: int) -> Eagle3Head:
    """Random, but for lm_head: it starts as the target's, with the final norm's weight in it."""
    config, model = target.config, cast("Any", target.model)
    torch.manual_seed(seed)
    shape = Eagle3Shape(
        config.hidden_size, config.intermediate_size, config.num_qo_heads, config.num_kv_heads,
        config.head_dim, config.vocab_size, len(features_read(target.layers)), config.rms_norm_eps,
        config.rope.theta,
    )  # fmt: skip
    head = Eagle3Head(shape)
    output = model.model.embed_tokens if model.lm_head is None else model.lm_head
    norm = model.model.norm.weight + config.norm_unit_offset
    head.lm_head.weight.data.copy_(output.weight * norm)
    return head.to(target.device, target.dtype)


@torch.no_grad()
def lesson_of(target: Target, texts: Sequence[Text]) -> Lesson:
    """Drafted are the assistant's words, from the second on: the first comes with the prompt."""
    ids = pad_sequence([text.token_ids for text in texts], True)
    is_said = pad_sequence([text.is_said for text in texts], True)
    is_slot = torch.zeros_like(is_said)
    is_slot[:, :-2] = is_said[:, 1:-1] & is_said[:, 2:]
    slots = find_slots(is_slot)
    after = slots._replace(indices=(slots.indices + 1).clamp(max=ids.shape[1] - 1))
    size, read = target.config.hidden_size, features_read(target.layers)
    features = pad_sequence([text.features for text in texts], True).unflatten(-1, (-1, size))[..., read, :]
    last = at_slots(pad_sequence([text.last for text in texts], True), after).to(target.dtype)
    return Lesson(
        target.model.embed(ids.roll(-1, dims=1)), features.flatten(-2).to(target.dtype),
        target.model.compute_logits(last), slots,
    )  # fmt: skip


def loss_of(head: Eagle3Head, lesson: Lesson) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, and how often each step's best token is the target's [NUM_STEPS]."""
    losses, right = [], []
    for log_probs, is_drafted in head(lesson.embeds, lesson.features, lesson.slots, NUM_STEPS):
        taught = lesson.target_logits[is_drafted].float()
        # Short answers have no deep drafts, and a mean of none would be NaN.
        losses.append(-(taught.softmax(-1) * log_probs).sum() / max(len(taught), 1))
        right.append((log_probs.argmax(-1) == taught.argmax(-1)).float().mean())
    weights = STEP_DECAY ** torch.arange(NUM_STEPS, device=right[0].device)
    return torch.stack(losses) @ weights / weights.sum(), torch.stack(right)


def save_head(head: Eagle3Head, target: Target, token_ids: torch.Tensor, folder: Path) -> None:
    """The public format: config.json, and model.safetensors in bfloat16. The embedding is the target's.
    token_ids: that the rows of lm_head draft, ascending."""
    folder.mkdir(parents=True, exist_ok=True)
    shape, vocab_size = head.shape, target.config.vocab_size
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "draft_vocab_size": len(token_ids),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [target.layers[i] - 1 for i in features_read(target.layers)],
            "use_aux_hidden_state": True,
        },
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": target.config.context_len,
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


def train_on_texts(
    target: Target, trained: Sequence[Text], held_out: Sequence[Text], options: TrainOptions, out: Path,
    vocabulary: int,
) -> None:  # fmt: skip
    """Train a head, cut it to the `vocabulary` tokens that answers have most often, and save it."""
    head, dice = new_head(target, options.seed), random.Random(options.seed)

    def losses() -> Iterator[torch.Tensor]:
        for _ in range(options.num_steps):
            yield loss_of(head, lesson_of(target, dice.sample(trained, options.num_rows)))[0]

    @torch.no_grad()
    def evaluate() -> dict[str, Any]:
        right = [loss_of(head, lesson_of(target, [text]))[1] for text in held_out[:REPORTED]]
        return {"right_by_step": [round(share, 4) for share in torch.stack(right).nanmean(0).tolist()]}

    num_steps, loss, elapsed = run_steps(train_steps(head, losses(), options), evaluate)
    said = torch.cat([text.token_ids[text.is_said] for text in trained])
    counts = torch.bincount(said, minlength=target.config.vocab_size)
    token_ids = counts.topk(min(vocabulary, len(counts))).indices.sort().values
    record: dict[str, Any] = {"command": command_line(), "seed": options.seed, "steps": num_steps}
    record |= {"seconds": round(elapsed, 1), "final_loss": round(loss, 4)} | evaluate()
    head.lm_head.weight = torch.nn.Parameter(head.lm_head.weight.data[token_ids])
    save_head(head, target, token_ids.cpu(), out)
    record["num_parameters"] = sum(parameter.numel() for parameter in head.parameters())
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    typer.echo(f"EAGLE-3, held out: {record}")


if __name__ == "__main__":
    sys.exit("error: python -m diptych.shared.tools.training.train_dflash --eagle3 FOLDER trains this head")
