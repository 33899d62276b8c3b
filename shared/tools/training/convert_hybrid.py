"""Make the built-in hybrid model out of tiny-dense on a CPU: some attention layers become gated DeltaNet.

The other weights stay as they are, and the new layers learn to say what attention said: first each layer
alone, from the old layer's inputs and outputs, then the whole model, from the old model's probabilities.

python -m diptych.shared.tools.training.convert_hybrid --out shared/assets/tiny-hybrid
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel, set_seed
from transformers.models.qwen3_5 import modeling_qwen3_5

from diptych.shared.tools.corpus.corpus import held_out_questions, training_chats
from diptych.shared.tools.corpus.evaluate import load_answers, score
from diptych.shared.tools.training.checkpoint import save_checkpoint, save_record, score_record
from diptych.shared.tools.training.packing import ChatEncoder, Document
from diptych.shared.tools.training.tiny_models import hybrid_config

SOURCE = Path(__file__).parents[2] / "assets" / "tiny-dense"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
MAX_LEN = 640
CHUNK = 32


class Rows(NamedTuple):
    """Chats, one a row, padded at the end: [num_rows, longest]."""

    input_ids: torch.Tensor
    weights: torch.Tensor  # of predicting the next token; 0 for padding


def batches(seed: int, num_tokens: int, pad_id: int) -> Iterator[Rows]:
    """Endless batches of about `num_tokens` tokens, of chats of similar length."""
    encoder, chats = (
        ChatEncoder(Tokenizer.from_file(str(SOURCE / "tokenizer.json"))),
        training_chats(str(seed)),
    )
    generator = torch.Generator().manual_seed(seed)
    while True:
        documents = encoder.encode([next(chats) for _ in range(512)])
        documents = sorted(
            (d for d in documents if len(d.token_ids) <= MAX_LEN), key=lambda d: len(d.token_ids)
        )
        groups: list[list[Document]] = [[]]
        for document in documents:
            if groups[-1] and (len(groups[-1]) + 1) * len(document.token_ids) > num_tokens:
                groups.append([])
            groups[-1].append(document)
        for index in torch.randperm(len(groups), generator=generator).tolist():
            yield _rows(groups[index], pad_id)


def _rows(documents: list[Document], pad_id: int) -> Rows:
    longest = max(len(document.token_ids) for document in documents)
    rows = Rows(torch.full((len(documents), longest), pad_id), torch.zeros(len(documents), longest))
    for i, document in enumerate(documents):
        size = len(document.token_ids)
        rows.input_ids[i, :size] = torch.tensor(document.token_ids)
        rows.weights[i, : size - 1] = torch.tensor(document.weights[1:])
    return rows


def chunked_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, None]:
    """Gated delta rule in chunks, in place of transformers', which is slower here. q, k [rows, n, key heads,
    k_head_dim]; v [rows, n, heads, v_head_dim]; g, beta [rows, n, heads] -> [rows, n, heads, v_head_dim]."""
    num_rows, n, heads, v_dim = v.shape
    repeats, k_dim = heads // q.shape[2], q.shape[-1]
    q, k = (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(repeats, dim=2) for x in (q * k_dim**-0.5, k))

    def in_chunks(x: torch.Tensor) -> torch.Tensor:
        """[rows, n, heads, ...] -> [chunks, rows, heads, CHUNK, ...]; the last one is padded with zeros."""
        x = F.pad(x, [0, 0] * (x.ndim - 2) + [0, -n % CHUNK])
        return x.unflatten(1, (-1, CHUNK)).movedim((1, 3), (0, 2))

    q, k, v = in_chunks(q), in_chunks(k), in_chunks(v)
    g, beta = in_chunks(g[..., None])[..., 0].cumsum(-1), in_chunks(beta[..., None])
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    decay = (g[..., :, None] - g[..., None, :]).masked_fill(~causal, -math.inf).exp()
    corrections = (beta * (k @ k.mT) * decay).tril(-1) + torch.eye(CHUNK)
    writes = torch.linalg.solve_triangular(
        corrections, torch.cat((beta * v, beta * g.exp()[..., None] * k), -1), upper=False, unitriangular=True
    )
    new_v, reads = writes.split((v_dim, k_dim), dim=-1)
    state, outputs = v.new_zeros(num_rows, heads, k_dim, v_dim), []
    within = (q @ k.mT) * decay
    q, k = g.exp()[..., None] * q, (g[..., -1:] - g).exp()[..., None] * k
    kept = g[..., -1:].exp()[..., None]
    # `unbind`: the gradient of x[i] would be zeros of the size of x, for each i.
    for q_, k_, v_, read, weights, keep in zip(*(x.unbind() for x in (q, k, new_v, reads, within, kept))):
        diff = v_ - read @ state
        outputs.append(q_ @ state + weights @ diff)
        state = keep * state + k_.mT @ diff
    return torch.stack(outputs).movedim((0, 2), (1, 3)).flatten(1, 2)[:, :n], None


def new_student(teacher: PreTrainedModel, seed: int) -> PreTrainedModel:
    """tiny-dense with new linear layers. Its other layers compute what they did: norms multiply by
    1 + weight, and a gate of weight 0 halves the output of attention, whose projection is doubled."""
    set_seed(seed)
    student = AutoModelForCausalLM.from_config(
        hybrid_config(), attn_implementation="sdpa", dtype=torch.float32
    )
    for new, old in zip(student.model.layers, teacher.model.layers):
        new.mlp.load_state_dict(old.mlp.state_dict())
        norms = [(new.input_layernorm, old.input_layernorm)]
        norms.append((new.post_attention_layernorm, old.post_attention_layernorm))
        if hasattr(new, "self_attn"):
            ours, theirs = new.self_attn, old.self_attn
            norms += [(ours.q_norm, theirs.q_norm), (ours.k_norm, theirs.k_norm)]
            q = theirs.q_proj.weight.data.unflatten(0, (-1, ours.head_dim))
            ours.q_proj.weight.data.copy_(torch.cat((q, torch.zeros_like(q)), 1).flatten(0, 1))
            ours.k_proj.weight.data.copy_(theirs.k_proj.weight.data)
            ours.v_proj.weight.data.copy_(theirs.v_proj.weight.data)
            ours.o_proj.weight.data.copy_(2 * theirs.o_proj.weight.data)
        for ours, theirs in norms:
            ours.weight.data.copy_(theirs.weight.data - 1)
    student.model.norm.weight.data.copy_(teacher.model.norm.weight.data - 1)
    student.model.embed_tokens.weight.data.copy_(teacher.model.embed_tokens.weight.data)
    student.tie_weights()
    return student


class Steps:
    """AdamW for a time: the learning rate follows a cosine over the seconds."""

    def __init__(self, params: list[nn.Parameter], learning_rate: float, seconds: float) -> None:
        self.params, self.learning_rate, self.seconds = params, learning_rate, seconds
        self.adam = torch.optim.AdamW(params, betas=(0.9, 0.98), weight_decay=0.0)
        self.start, self.count = time.monotonic(), 0

    @property
    def share(self) -> float:
        return (time.monotonic() - self.start) / self.seconds

    def step(self, loss: torch.Tensor) -> None:
        self.adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.params, 1.0)
        rate = 0.5 * (1 + math.cos(math.pi * min(1.0, self.share))) * min(1.0, (self.count + 1) / 20)
        for group in self.adam.param_groups:
            group["lr"] = rate * self.learning_rate
        self.adam.step()
        self.count += 1
        if self.count % 20 == 0:
            typer.echo(f"step {self.count}, {self.share:.0%}: loss {loss.item():.4f}")


def learn_layers(student: Any, teacher: Any, rows: Iterator[Rows], steps: Steps) -> int:
    """Each linear layer alone: its output for the teacher's input, against that of the teacher's attention.
    Returns the number of tokens."""
    indices = [i for i, layer in enumerate(student.model.layers) if hasattr(layer, "linear_attn")]
    seen: dict[int, torch.Tensor] = {}
    for i in indices:
        attention = teacher.model.layers[i].self_attn
        attention.register_forward_hook(
            lambda _, args, kwargs, output, i=i: seen.update({i: kwargs["hidden_states"], ~i: output[0]}),
            with_kwargs=True,
        )
    num_tokens = 0
    while steps.share < 1:
        batch = next(rows)
        with torch.no_grad():
            teacher.model(batch.input_ids)
        weights, losses = batch.weights[..., None] + 0.1 * (batch.weights[..., None] > 0), []
        for i in indices:
            wanted, given = seen[~i], student.model.layers[i].linear_attn(seen[i])
            losses.append((weights * (wanted - given) ** 2).sum() / (weights * wanted**2).sum())
        steps.step(torch.stack(losses).sum())
        num_tokens += batch.input_ids.numel()
        if steps.count % 20 == 0:
            typer.echo(f"  of layers {indices}: {[round(loss.item(), 3) for loss in losses]}")
    return num_tokens


def learn_model(student: Any, teacher: Any, rows: Iterator[Rows], steps: Steps) -> tuple[int, float]:
    """All weights: the student's probabilities against the teacher's. Returns the number of tokens, and the
    last loss."""
    num_tokens, loss = 0, torch.tensor(math.nan)
    while steps.share < 1:
        batch = next(rows)
        at = batch.weights > 0
        with torch.no_grad():
            wanted = teacher.lm_head(teacher.model(batch.input_ids).last_hidden_state[at]).log_softmax(-1)
        given = student.lm_head(student.model(batch.input_ids, use_cache=False).last_hidden_state[at])
        losses = F.kl_div(given.log_softmax(-1), wanted, reduction="none", log_target=True).sum(-1)
        loss = (losses * batch.weights[at]).sum() / batch.weights.sum()
        steps.step(loss)
        num_tokens += batch.input_ids.numel()
    return num_tokens, loss.item()


def main(
    out: Annotated[Path, typer.Option(help="the model folder to write")],
    start: Annotated[Path | None, typer.Option(help="go on from this folder, which this made")] = None,
    layer_seconds: Annotated[float, typer.Option(help="for the new layers alone")] = 700,
    model_seconds: Annotated[float, typer.Option(help="for the whole model")] = 1700,
    batch_tokens: Annotated[int, typer.Option(help="tokens a step, about")] = 1280,
    seed: Annotated[int, typer.Option(help="seeds the new weights and the text")] = 0,
    questions: Annotated[int, typer.Option(help="held-out questions to score with")] = 400,
) -> None:
    """Convert tiny-dense and score the result on the held-out questions."""
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    teacher: Any = AutoModelForCausalLM.from_pretrained(SOURCE, **options)
    rows = batches(seed, batch_tokens, teacher.config.pad_token_id)
    begin, num_tokens, before = time.monotonic(), 0, dict[str, Any]()
    theirs = modeling_qwen3_5.torch_chunk_gated_delta_rule
    modeling_qwen3_5.torch_chunk_gated_delta_rule = chunked_delta_rule
    if start is None:
        student: Any = new_student(teacher, seed)
        linear = [layer.linear_attn for layer in student.model.layers if hasattr(layer, "linear_attn")]
        new = [parameter for layer in linear for parameter in layer.parameters()]
        num_tokens = learn_layers(student, teacher, rows, Steps(new, 4e-3, layer_seconds))
    else:
        student = AutoModelForCausalLM.from_pretrained(start, **options)
        before = json.loads((start / "training.json").read_text())
    steps = Steps(list(student.parameters()), 1e-3, model_seconds)
    more_tokens, loss = learn_model(student, teacher, rows, steps)
    modeling_qwen3_5.torch_chunk_gated_delta_rule = theirs  # it has no states to generate with
    seconds = time.monotonic() - begin
    out.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        shutil.copy(SOURCE / name, out)
    save_checkpoint(student, out)
    flags = f"--model-seconds {model_seconds:g} --batch-tokens {batch_tokens} --seed {seed}"
    flags += f" --layer-seconds {layer_seconds:g}" if start is None else f" --start {start}"
    command = f"python -m diptych.shared.tools.training.convert_hybrid --out {out} {flags}"
    record = {
        "name": "hybrid",
        "command": f"{before['command']}\n    {command}" if before else command,
        "device": "a CPU",
        "torch": torch.__version__,
        "seconds": round(seconds + before.get("seconds", 0.0), 1),
        "num_tokens": num_tokens + more_tokens + before.get("num_tokens", 0),
        "row_len": MAX_LEN,
        "num_parameters": student.num_parameters(),
        "final_loss": round(loss, 5),
    }
    result = score(load_answers(out, "cpu"), held_out_questions(questions))
    save_record(out, {**record, "held_out": score_record(result)})
    typer.echo(f"{out}: {result.exact:.2%} of {questions} held-out questions, {seconds:.0f} s of training")


if __name__ == "__main__":
    typer.run(main)
