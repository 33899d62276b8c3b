"""Train a DFlash head, which drafts a block in one pass, on answers that its target itself writes.

python -m diptych.shared.tools.training.train_dflash --out tiny-dense-dflash
python -m diptych.shared.tools.training.train_dflash --target SmolLM2-135M-Instruct.gguf --out FOLDER

Without --prompts, models other than the built-in ones ask themselves. For SmolLM2-135M on one GPU, with a
head of 25 MB: --features 5 --layers 4 --intermediate-size 1024 --mask-id 5 --num-prompts 12288
--max-new-tokens 192 --temperature 0.8 --texts 16 --blocks 64 --learning-rate 1e-3 --seconds 120
"""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import torch
import typer
from safetensors.torch import save_file
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from diptych.shared.engine.llm import LLM
from diptych.shared.loading.model_path import builtin_models
from diptych.shared.tools.bench.prompt_texts import Asked, read_prompts
from diptych.shared.tools.training.dflash_head import DFlashHead, DFlashShape
from diptych.shared.tools.training.head_layers import command_line, rounded, run_steps, train_steps
from diptych.shared.tools.training.own_texts import (
    Answer,
    Target,
    Text,
    answered,
    own_questions,
    questions,
    reader_of,
    texts_of,
    writer_of,
)
from diptych.shared.tools.training.train import MAX_STEPS, TrainOptions
from diptych.shared.tools.training.train_eagle3 import train_on_texts

REPORTED = 32  # texts of a report
HELD_OUT = 16
"""One answer in so many is not trained on: it is measured how the head does on these."""


class Blocks(NamedTuple):
    """Some blocks of some texts."""

    anchors: torch.Tensor  # [num_texts, num_blocks]
    input_ids: torch.Tensor  # [num_texts, num_blocks, block_len]
    target_ids: torch.Tensor  # the same shape: the answer; -1: behind its end
    last: torch.Tensor  # [num_texts, num_blocks, block_len - 1, hidden_size]: gives the logits of target_ids
    features: torch.Tensor  # [num_texts, text_len, num_features * hidden_size]


def chosen_layers(num_layers: int, num_features: int) -> tuple[int, ...]:
    """Inputs of layers, evenly spread from the third to the last."""
    if not 1 <= num_features <= num_layers - 2:
        most = num_layers - 2
        raise typer.BadParameter(
            f"--features is {num_features}; a target of {num_layers} layers has 1 to {most}"
        )
    span = num_layers - 3
    return tuple(2 + round(i * span / max(num_features - 1, 1)) for i in range(num_features))


def chosen_device(name: str) -> str:
    if name not in ("", "cpu", "cuda"):
        raise typer.BadParameter(f"--device is {name}; it must be cuda or cpu")
    return name or ("cuda" if torch.cuda.is_available() else "cpu")


def check_texts(num_texts: int, num: int, what: str) -> None:
    """Whether so many texts are left when some of `num` are held out."""
    num_trained = num - -(-num // HELD_OUT)
    if num_texts > num_trained:
        raise typer.BadParameter(f"--texts is {num_texts}; of {num} {what}, {num_trained} are trained on")


def check_answers(num_texts: int, num_trained: int, num_held_out: int) -> None:
    if num_texts > num_trained or not num_held_out:
        raise typer.BadParameter(
            f"--texts is {num_texts}; {num_trained} answers of two tokens and more are trained on, and "
            f"{num_held_out} held out"
        )


def make_folders(out: Path, eagle3: Path | None, features: int) -> None:
    """Before anything is written by the target: training may take hours."""
    if eagle3 is not None and eagle3.resolve() == out.resolve():
        raise typer.BadParameter(f"--out and --eagle3 are both {out}")
    if eagle3 is not None and features < 2:
        raise typer.BadParameter(f"--features is {features}; an EAGLE-3 head reads 2 layers or more")
    try:
        for folder in (out, eagle3 or out):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"no folder can be made: {error}") from None


def chosen_mask(llm: LLM) -> int:
    """The first id without a token; without one, the id that ends a text."""
    config, num_token_ids = llm.assembly.model_config, llm.assembly.parts.num_token_ids
    return num_token_ids if num_token_ids < config.vocab_size else min(config.eos_token_ids)


def blocks_of(
    texts: Sequence[Text], anchors: Sequence[Sequence[int]], block_len: int, mask_id: int
) -> Blocks:
    """anchors: as many for each text, positions in its answers."""
    ids = pad_sequence([text.token_ids.masked_fill(~text.is_said, -1) for text in texts], True, -1)
    ids = functional.pad(ids, (0, block_len), value=-1)
    features = pad_sequence([text.features for text in texts], True)
    last = functional.pad(pad_sequence([text.last for text in texts], True), (0, 0, 0, block_len))
    first = torch.tensor(anchors, device=ids.device)
    places = first[..., None] + torch.arange(block_len, device=ids.device)
    target_ids = ids.gather(1, places.flatten(1)).view_as(places)
    input_ids = torch.full_like(target_ids, mask_id)
    input_ids[..., 0] = target_ids[..., 0]
    row = torch.arange(len(texts), device=ids.device)[:, None, None]
    return Blocks(first, input_ids, target_ids, last[row, places[..., :-1]], features)


def batches(
    texts: Sequence[Text], num_steps: int, num_texts: int, num_blocks: int, block_len: int, mask_id: int,
    seed: int,
) -> Iterator[Blocks]:  # fmt: skip
    """Random texts and anchors."""
    dice = random.Random(seed)
    for _ in range(num_steps):
        some = dice.sample(texts, num_texts)
        anchors = [dice.choices(text.anchors, k=num_blocks) for text in some]
        yield blocks_of(some, anchors, block_len, mask_id)


def guesses_of(head: DFlashHead, target: Target, blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    """Which places of the blocks, behind the anchors, are of answers, and the head's logits there."""
    hidden = head(target.model.embed(blocks.input_ids), blocks.anchors, blocks.features)[..., 1:, :]
    is_there = blocks.target_ids[..., 1:] >= 0
    return is_there, target.model.compute_logits(hidden[is_there])


def loss_of(head: DFlashHead, target: Target, blocks: Blocks) -> torch.Tensor:
    """Cross-entropy with the target's own probabilities, which say more than the token that it took."""
    is_there, logits = guesses_of(head, target, blocks)
    taught = target.model.compute_logits(blocks.last[is_there].to(target.dtype)).softmax(-1)
    losses = functional.cross_entropy(logits, taught, reduction="none")
    # A draft matters only if those before it are right.
    places = torch.arange(is_there.shape[-1], device=logits.device)
    weights = torch.exp(-places / (head.shape.block_len / 2)).expand(is_there.shape)[is_there]
    return (losses * weights).sum() / weights.sum()


@torch.no_grad()
def evaluate(head: DFlashHead, target: Target, texts: Sequence[Text]) -> dict[str, Any]:
    """How often the head guesses each place of a block, over all anchors of the texts, and how many tokens a
    verification gives when the texts are drafted block by block."""
    counts = torch.zeros(2, head.shape.block_len - 1, dtype=torch.int64)
    num_tokens = num_verifications = 0
    for text in texts:
        blocks = blocks_of([text], [text.anchors], head.shape.block_len, target.mask_id)
        is_there, logits = guesses_of(head, target, blocks)
        is_right = torch.zeros_like(is_there)
        is_right[is_there] = logits.argmax(-1) == blocks.target_ids[..., 1:][is_there]
        counts += torch.stack((is_there[0].sum(0), is_right[0].sum(0))).cpu()
        accepted = dict(zip(text.anchors, is_right[0].long().cumprod(-1).sum(-1).tolist()))
        place = text.anchors[0]
        while place <= text.anchors[-1]:
            num = accepted.get(place, 0) + 1
            num_tokens += num * (place in accepted)
            num_verifications += place in accepted
            place += num
    return {
        "num_answers": len(texts),
        "tokens_per_verification": round(num_tokens / num_verifications, 3),
        "right_by_place": [round(float(right / max(there, 1)), 4) for there, right in counts.T],
    }


def new_head(
    target: Target, num_layers: int, intermediate_size: int, block_len: int, seed: int
) -> DFlashHead:
    config, theta = target.config, target.config.rope.theta
    torch.manual_seed(seed)
    shape = DFlashShape(
        config.hidden_size, intermediate_size or config.intermediate_size, num_layers, config.num_qo_heads,
        config.num_kv_heads, config.head_dim, len(target.layers), config.rms_norm_eps, theta, block_len,
    )  # fmt: skip
    head, model = DFlashHead(shape), cast("Any", target.model)
    if not config.norm_unit_offset:  # what the target's output projection is made for
        head.norm.weight.data.copy_(model.model.norm.weight)
    return head.to(target.device, target.dtype)


def save_head(head: DFlashHead, target: Target, folder: Path) -> None:
    """The public format: config.json, and model.safetensors in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = head.shape
    config = {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "block_size": shape.block_len,
        "dflash_config": {
            "mask_token_id": target.mask_id,
            "target_layer_ids": [layer - 1 for layer in target.layers],
        },
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": target.config.context_len,
        "model_type": "qwen3",
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "num_target_layers": target.config.num_hidden_layers,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "torch_dtype": "bfloat16",
        "vocab_size": target.config.vocab_size,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    save_file(rounded(head), folder / "model.safetensors", metadata={"format": "pt"})


def finish(
    head: DFlashHead, target: Target, held_out: Sequence[Text], record: dict[str, Any], out: Path
) -> None:
    save_head(head, target, out)
    record["num_parameters"] = sum(parameter.numel() for parameter in head.parameters())
    record["held_out"] = evaluate(head, target, held_out)
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    typer.echo(f"held out: {record['held_out']}")


def written(
    target: str, reader: LLM, prompts: Path | None, num: int, how: tuple[int, float, float]
) -> tuple[list[Asked], list[Answer]]:
    """Questions, and answers to them. how: the last arguments of `answered`."""
    writer = writer_of(target, reader)
    if prompts is not None:
        asked = read_prompts(prompts)[:num]
    else:
        asked = questions(num) if target in builtin_models() else own_questions(writer, num, how[-1])
    answers = answered(writer, asked, *how)
    return asked[: len(answers)], answers


def main(
    out: Annotated[Path, typer.Option(help="the folder to write")],
    target: Annotated[
        str, typer.Option(help="a built-in model, a folder, a GGUF file or an id")
    ] = "tiny-dense",
    prompts: Annotated[
        Path | None, typer.Option(help="one a line; default: chats of the corpus, or the target asks itself")
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=2, help="answers to train on and measure with")] = 1536,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="longest answer")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="of every second answer")] = 0.0,
    writing_seconds: Annotated[float, typer.Option(min=0, help="for questions; so long for answers")] = 0.0,
    steps: Annotated[int, typer.Option(min=1, help="optimizer steps")] = 800,
    seconds: Annotated[float, typer.Option(min=0, help="train so long instead")] = 0.0,
    texts: Annotated[int, typer.Option(min=1, help="texts a step")] = 8,
    blocks: Annotated[int, typer.Option(min=1, help="blocks of each text")] = 32,
    block_len: Annotated[int, typer.Option(min=2, help="tokens of a block, the newest one included")] = 8,
    layers: Annotated[int, typer.Option(min=1, help="layers of the head")] = 2,
    intermediate_size: Annotated[int, typer.Option(min=0, help="of its MLPs; 0: the target's")] = 0,
    features: Annotated[int, typer.Option(min=1, help="layers of the target that it reads")] = 3,
    mask_id: Annotated[int, typer.Option(min=-1, help="-1: the first id without a token")] = -1,
    learning_rate: Annotated[float, typer.Option(help="peak learning rate")] = 2e-3,
    seed: Annotated[int, typer.Option(help="seeds weights and anchors")] = 0,
    eagle3: Annotated[
        Path | None, typer.Option(help="train an EAGLE-3 head on the same texts too, into this folder")
    ] = None,
    draft_vocabulary: Annotated[int, typer.Option(min=1, help="tokens that it drafts")] = 8192,
    device: Annotated[str, typer.Option(help="cuda or cpu; default: cuda if there is one")] = "",
) -> None:
    """Write answers with the target, train a head on them and save it."""
    make_folders(out, eagle3, features)
    reader = reader_of(target, chosen_device(device))
    config = reader.assembly.model_config
    if mask_id >= config.vocab_size:
        raise typer.BadParameter(f"--mask-id is {mask_id}; {target} has ids below {config.vocab_size}")
    known = Target(
        reader.assembly.parts.model_runner.model, config, chosen_layers(config.num_hidden_layers, features),
        chosen_mask(reader) if mask_id < 0 else mask_id,
    )  # fmt: skip
    check_texts(texts, num_prompts, "prompts")
    asked, answers = written(
        target, reader, prompts, num_prompts, (max_new_tokens, temperature, writing_seconds)
    )
    held_out = texts_of(known, answers[::HELD_OUT])
    trained = texts_of(known, [answer for i, answer in enumerate(answers) if i % HELD_OUT])
    check_answers(texts, len(trained), len(held_out))
    steps = MAX_STEPS if seconds else steps
    options = TrainOptions(steps, texts, blocks * block_len, learning_rate, seed=seed, seconds=seconds)
    head = new_head(known, layers, intermediate_size, block_len, seed)
    made = batches(trained, steps, texts, blocks, block_len, known.mask_id, seed)
    losses = (loss_of(head, known, each) for each in made)
    num_steps, loss, elapsed = run_steps(
        train_steps(head, losses, options), lambda: evaluate(head, known, held_out[:REPORTED])
    )
    record = {"command": command_line(), "target": target, "seed": seed, "num_answers": len(trained)}
    record |= {"steps": num_steps, "seconds": round(elapsed, 1)}
    finish(head, known, held_out, record | {"final_loss": round(loss, 4)}, out)
    (out / "held_out.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in asked[::HELD_OUT]))
    if eagle3 is not None:
        train_on_texts(known, trained, held_out, options, eagle3, draft_vocabulary)


if __name__ == "__main__":
    typer.run(main)
