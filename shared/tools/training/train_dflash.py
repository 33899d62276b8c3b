"""Train a DFlash head, which drafts a block in one pass, on answers that its target itself writes.

python -m diptych.shared.tools.training.train_dflash --out tiny-dense-dflash
python -m diptych.shared.tools.training.train_dflash --target SmolLM2-135M.gguf --prompts FILE --out FOLDER
"""

import json
import random
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import torch
import typer
from safetensors.torch import save_file
from torch.nn import functional

from diptych.shared.config import ModelConfig
from diptych.shared.engine.llm import LLM
from diptych.shared.interfaces import CausalLM
from diptych.shared.tools.bench.prompt_texts import Asked, encode, read_prompts
from diptych.shared.tools.conformance.oracles.model_session import ModelSession
from diptych.shared.tools.corpus.corpus import training_chats
from diptych.shared.tools.training.dflash_head import DFlashHead, DFlashShape
from diptych.shared.tools.training.head_layers import rounded
from diptych.shared.tools.training.train import MasterAdamW, TrainOptions, run_with_progress
from diptych.shared.types import SamplingParams

TEXTS_AT_ONCE = 16
HELD_OUT = 16
"""One answer in so many is not trained on: loss and accuracy are measured on these."""


class Text(NamedTuple):
    """A chat that ends with the target's answer, and the target's hidden states."""

    token_ids: torch.Tensor  # [n]
    is_said: torch.Tensor  # [n]: by the assistant, in any of its turns
    features: torch.Tensor  # [n, num_features * hidden_size], bfloat16

    @property
    def anchors(self) -> list[int]:
        """Any token of an answer but the last."""
        anchors: list[int] = (self.is_said[:-1] & self.is_said[1:]).nonzero().flatten().tolist()
        return anchors


class Blocks(NamedTuple):
    """Some blocks of some texts."""

    anchors: torch.Tensor  # [num_texts, num_blocks]
    input_ids: torch.Tensor  # [num_texts, num_blocks, block_len]
    target_ids: torch.Tensor  # the same shape: the answer; -1: behind its end
    features: torch.Tensor  # [num_texts, text_len, num_features * hidden_size]


class Target(NamedTuple):
    model: CausalLM
    config: ModelConfig
    layers: tuple[int, ...]  # whose inputs the head takes
    mask_id: int


def chosen_layers(num_layers: int, num_features: int) -> tuple[int, ...]:
    """Inputs of layers, evenly spread from the third to the last."""
    if not 1 <= num_features <= num_layers - 2:
        most = num_layers - 2
        raise typer.BadParameter(
            f"--features is {num_features}; a target of {num_layers} layers has 1 to {most}"
        )
    span = num_layers - 3
    return tuple(2 + round(i * span / max(num_features - 1, 1)) for i in range(num_features))


def check_texts(num_texts: int, num: int, what: str) -> None:
    """Whether so many texts are left when some of `num` are held out."""
    num_trained = num - -(-num // HELD_OUT)
    if num_texts > num_trained:
        raise typer.BadParameter(f"--texts is {num_texts}; of {num} {what}, {num_trained} are trained on")


def chosen_mask(llm: LLM) -> int:
    """The first id without a token; without one, the id that ends a text."""
    config, num_token_ids = llm.assembly.model_config, llm.assembly.parts.num_token_ids
    return num_token_ids if num_token_ids < config.vocab_size else min(config.eos_token_ids)


def questions(num: int) -> list[Asked]:
    """Chats of the corpus up to the assistant's last words."""
    asked: list[Asked] = []
    for chat in islice(training_chats("dflash"), num):
        last = max(i for i, message in enumerate(chat) if message["role"] == "assistant")
        asked.append([dict(message) for message in chat[:last]])
    return asked


def answered(llm: LLM, asked: Sequence[Asked], max_new_tokens: int) -> list[tuple[list[int], list[bool]]]:
    """Prompts and the target's greedy answers as token ids, and which of these the assistant says."""
    prompts = encode(llm, asked)
    outputs: Any = llm.generate(prompts, SamplingParams(temperature=0.0, max_new_tokens=max_new_tokens))
    return [
        (prompt + output.output_ids, said_before(llm, chat, prompt) + [True] * len(output.output_ids))
        for chat, prompt, output in zip(asked, prompts, outputs)
    ]


def said_before(llm: LLM, asked: Asked, prompt: list[int]) -> list[bool]:
    """Which tokens of a prompt are the assistant's earlier answers, with the token that ends each."""
    is_said = [False] * len(prompt)
    chat = [] if isinstance(asked, str) else asked
    for i, message in enumerate(chat):
        if message["role"] == "assistant":
            (before,) = encode(llm, [chat[:i]])
            for place in range(len(before), len(prompt)):
                is_said[place] = prompt[: len(before)] == before
                if prompt[place] in llm.assembly.model_config.eos_token_ids:
                    break
    return is_said


def texts_of(target: Target, answers: Sequence[tuple[list[int], list[bool]]]) -> list[Text]:
    """The target's hidden states, text by text."""
    texts = []
    for start in range(0, len(answers), TEXTS_AT_ONCE):
        part = answers[start : start + TEXTS_AT_ONCE]
        session = ModelSession(target.model, len(part), max(len(ids) for ids, _ in part))
        captured = dict.fromkeys(target.layers, torch.empty(0))
        batch = session.forward_batch({i: ids for i, (ids, _) in enumerate(part)})
        session.hidden_states(batch, captured)
        features = torch.cat([captured[layer] for layer in target.layers], dim=-1).to(torch.bfloat16)
        for (ids, is_said), own in zip(part, features.split([len(ids) for ids, _ in part])):
            token_ids, marks = (torch.tensor(row, device=own.device) for row in (ids, is_said))
            texts.append(Text(token_ids, marks, own))
    return texts


def blocks_of(
    texts: Sequence[Text], anchors: Sequence[Sequence[int]], block_len: int, mask_id: int
) -> Blocks:
    """anchors: as many for each text, positions in its answers."""
    rows = [text.token_ids.masked_fill(~text.is_said, -1) for text in texts]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
    ids = functional.pad(ids, (0, block_len), value=-1)
    features = torch.nn.utils.rnn.pad_sequence([text.features for text in texts], batch_first=True).float()
    first = torch.tensor(anchors, device=ids.device)
    places = first[..., None] + torch.arange(block_len, device=ids.device)
    target_ids = ids.gather(1, places.flatten(1)).view_as(places)
    input_ids = torch.full_like(target_ids, mask_id)
    input_ids[..., 0] = target_ids[..., 0]
    return Blocks(first, input_ids, target_ids, features)


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


def loss_of(head: DFlashHead, target: Target, blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, and for each place of a block behind the anchor: how many there were, and how many of these
    the head guessed [2, block_len - 1]."""
    hidden = head(target.model.embed(blocks.input_ids), blocks.anchors, blocks.features)[..., 1:, :]
    wanted = blocks.target_ids[..., 1:]
    is_there = wanted >= 0
    logits = target.model.compute_logits(hidden[is_there])
    losses = functional.cross_entropy(logits, wanted[is_there], reduction="none")
    # A draft matters only if those before it are right.
    places = torch.arange(wanted.shape[-1], device=wanted.device)
    weights = torch.exp(-places / (head.shape.block_len / 2)).expand(wanted.shape)[is_there]
    loss = (losses * weights).sum() / weights.sum()
    is_right = torch.zeros_like(is_there)
    is_right[is_there] = logits.argmax(-1) == wanted[is_there]
    return loss, torch.stack((is_there.flatten(0, 1).sum(0), is_right.flatten(0, 1).sum(0)))


def train_steps(
    head: DFlashHead, target: Target, steps: Iterator[Blocks], options: TrainOptions
) -> Iterator[torch.Tensor]:
    """Train in place; yields each step's loss. It ends after `options.seconds`, if there are any."""
    optimizer: Any = MasterAdamW(head, options)
    begin = time.monotonic()
    for step, blocks in enumerate(steps):
        loss, _ = loss_of(head, target, blocks)
        loss.backward()
        share = min(1.0, (time.monotonic() - begin) / options.seconds) if options.seconds else 0.0
        optimizer.step(options.learning_rate_at(step, share))
        yield loss.detach()
        if share == 1.0:
            return


@torch.no_grad()
def evaluate(head: DFlashHead, target: Target, texts: Sequence[Text]) -> list[float]:
    """How often the head guesses each place of a block, over all anchors of the texts."""
    counts = torch.zeros(2, head.shape.block_len - 1, dtype=torch.int64)
    for text in texts:
        blocks = blocks_of([text], [text.anchors], head.shape.block_len, target.mask_id)
        counts += loss_of(head, target, blocks)[1].cpu()
    return [round(float(right / max(there, 1)), 4) for there, right in counts.T]


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
    return head.to(next(model.parameters()).device)


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


def main(
    out: Annotated[Path, typer.Option(help="the folder to write")],
    target: Annotated[
        str, typer.Option(help="a built-in model, a folder, a GGUF file or an id")
    ] = "tiny-dense",
    prompts: Annotated[Path | None, typer.Option(help="one a line; default: chats of the corpus")] = None,
    num_prompts: Annotated[int, typer.Option(min=2, help="answers to train on and measure with")] = 1536,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="longest answer")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="optimizer steps")] = 800,
    seconds: Annotated[float, typer.Option(min=0, help="end the steps after so long; 0: never")] = 0.0,
    texts: Annotated[int, typer.Option(min=1, help="texts a step")] = 8,
    blocks: Annotated[int, typer.Option(min=1, help="blocks of each text")] = 32,
    block_len: Annotated[int, typer.Option(min=2, help="tokens of a block, the newest one included")] = 8,
    layers: Annotated[int, typer.Option(min=1, help="layers of the head")] = 2,
    intermediate_size: Annotated[int, typer.Option(min=0, help="of its MLPs; 0: the target's")] = 0,
    features: Annotated[int, typer.Option(min=1, help="layers of the target that it reads")] = 3,
    mask_id: Annotated[int, typer.Option(min=-1, help="-1: the first id without a token")] = -1,
    learning_rate: Annotated[float, typer.Option(help="peak learning rate")] = 2e-3,
    seed: Annotated[int, typer.Option(help="seeds weights and anchors")] = 0,
    device: Annotated[str, typer.Option(help="cuda or cpu; default: cuda if there is one")] = "",
) -> None:
    """Write answers with the target, train a head on them and save it."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    llm = LLM(
        model=target, panel="reference", device=device, dtype="float32", max_running_requests=64,
        disable_radix_cache=True,
    )  # fmt: skip
    config = llm.assembly.model_config
    if mask_id >= config.vocab_size:
        raise typer.BadParameter(f"--mask-id is {mask_id}; {target} has ids below {config.vocab_size}")
    known = Target(
        llm.assembly.parts.model_runner.model, config, chosen_layers(config.num_hidden_layers, features),
        chosen_mask(llm) if mask_id < 0 else mask_id,
    )  # fmt: skip
    asked = questions(num_prompts) if prompts is None else read_prompts(prompts)[:num_prompts]
    check_texts(texts, len(asked), "prompts")
    lessons = [text for text in texts_of(known, answered(llm, asked, max_new_tokens)) if text.anchors]
    held_out, trained = lessons[::HELD_OUT], [t for i, t in enumerate(lessons) if i % HELD_OUT]
    check_texts(texts, len(lessons), "answers of two tokens and more")
    head = new_head(known, layers, intermediate_size, block_len, seed)
    options = TrainOptions(steps, texts, blocks * block_len, learning_rate, seed=seed, seconds=seconds)
    made = batches(trained, steps, texts, blocks, block_len, known.mask_id, seed)
    num_steps, loss, elapsed = run_with_progress(train_steps(head, known, made, options), options)
    save_head(head, known, out)
    right = evaluate(head, known, held_out)
    record = {
        "target": target, "num_answers": len(trained), "steps": num_steps, "seconds": round(elapsed, 1),
        "final_loss": round(loss, 4), "num_parameters": sum(p.numel() for p in head.parameters()),
        "held_out": {"num_answers": len(held_out), "right_by_place": right},
    }  # fmt: skip
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    typer.echo(f"held-out answers, right by place: {', '.join(f'{share:.1%}' for share in right)}")


if __name__ == "__main__":
    typer.run(main)
