"""Train a built-in model from nothing: corpus, tokenizer, weights and score, in minutes on one GPU.

python -m diptych.shared.tools.training.train --model dense --out shared/assets/tiny-dense
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, set_seed

from diptych.shared.tools.corpus.corpus import held_out_questions
from diptych.shared.tools.corpus.evaluate import load_answers, score
from diptych.shared.tools.training.checkpoint import save_checkpoint, save_record, score_record
from diptych.shared.tools.training.hybrid_hidden import hybrid_hidden, hybrid_layer, spread_decays
from diptych.shared.tools.training.learn_tokenizer import VOCAB_SIZE, save_tokenizer, train_tokenizer
from diptych.shared.tools.training.packing import Batch, PackedBatches, batch_loader
from diptych.shared.tools.training.tiny_models import NUM_STEPS, model_config

MAX_STEPS = 1_000_000  # of a training that the time ends


@dataclass(frozen=True)
class TrainOptions:
    """What decides the result, together with the model's config.

    With `seconds`, training ends then, `num_steps` is only a bound, and the learning rate falls with the time
    that has passed.
    """

    num_steps: int
    num_rows: int = 64
    row_len: int = 1024
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    seed: int = 0
    seconds: float = 0.0

    @property
    def num_warmup_steps(self) -> int:
        return min(300, self.num_steps // 10)

    def learning_rate_at(self, step: int, share: float = 0.0) -> float:
        """Linear warm-up, then a cosine down to zero. `share` of the time has passed, if that is bounded."""
        if step < self.num_warmup_steps:
            return self.learning_rate * (step + 1) / self.num_warmup_steps
        done = (step - self.num_warmup_steps) / max(1, self.num_steps - self.num_warmup_steps)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * (share if self.seconds else done)))


class MasterAdamW:
    """AdamW on float32 copies of the weights; the model itself runs in its own dtype.

    Small updates vanish when added to bfloat16 weights, so they go to the copies, which are then rounded.
    """

    def __init__(self, model: PreTrainedModel, options: TrainOptions) -> None:
        self._params = [param for param in model.parameters() if param.requires_grad]
        self._masters = [param.detach().float().clone() for param in self._params]
        # Norm weights are scales, not directions: no decay.
        decayed = [master for master in self._masters if master.ndim > 1]
        others = [master for master in self._masters if master.ndim <= 1]
        groups = [
            {"params": decayed, "weight_decay": options.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=self._masters[0].is_cuda)

    @torch.no_grad()
    def step(self, learning_rate: float, max_grad_norm: float = 1.0) -> None:
        for master, param in zip(self._masters, self._params):
            master.grad = None if param.grad is None else param.grad.float()
            param.grad = None
        torch.nn.utils.clip_grad_norm_(self._masters, max_grad_norm)
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        self._adam.step()
        torch._foreach_copy_(list[torch.Tensor](self._params), list[torch.Tensor](self._masters))


def document_mask(document_ids: torch.Tensor) -> torch.Tensor:
    """[num_rows, 1, row_len, row_len], true where a token may look: back, and within its own chat."""
    same = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    return same & torch.ones_like(same[0, 0]).tril()


def load_balancing_loss(router_logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """1 if the experts share the tokens evenly, else more. `router_logits`: [num_tokens, num_experts]."""
    num_experts = router_logits.shape[-1]
    probs = router_logits.float().softmax(-1)
    chosen = functional.one_hot(probs.topk(top_k).indices, num_experts).float().sum(1)
    return num_experts * (chosen.mean(0) / top_k * probs.mean(0)).sum()


def padding_loss(logits: torch.Tensor) -> torch.Tensor:
    """Keeps the rows beyond the tokenizer's vocabulary improbable (together about e**-16 and less).

    Sampling then never draws an id that has no token; the plain loss alone left them at up to 5e-4.
    """
    log_prob = logits[:, VOCAB_SIZE:].logsumexp(-1) - logits.logsumexp(-1)
    return 0.01 * functional.softplus(log_prob + 16).mean()


def token_loss(hidden: torch.Tensor, lm_head: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Weighted next-token loss and padding loss."""
    logits = functional.linear(hidden, lm_head).flatten(0, 1).float()
    losses = functional.cross_entropy(logits, batch.target_ids.flatten(), reduction="none")
    loss = (losses * batch.weights.flatten()).sum() / batch.weights.sum()
    return loss + padding_loss(logits)


def batch_loss(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """`token_loss` and, for an MoE model, its routers' load-balancing loss."""
    is_moe = hasattr(model.config, "num_experts_per_tok")
    output = model.model(
        input_ids=batch.input_ids,
        attention_mask=document_mask(batch.document_ids),
        position_ids=batch.positions,
        use_cache=False,
        **({"output_router_logits": True} if is_moe else {}),
    )
    loss = token_loss(output.last_hidden_state, model.lm_head.weight, batch)
    if is_moe:
        top_k = model.config.num_experts_per_tok
        balance = sum(load_balancing_loss(layer.flatten(0, -2), top_k) for layer in output.router_logits)
        loss = loss + model.config.router_aux_loss_coef * balance / len(output.router_logits)
    return loss


def loss_function(
    config: PretrainedConfig, compiled: bool
) -> Callable[[PreTrainedModel, Batch], torch.Tensor]:
    """Dense and MoE models are compiled whole; of a hybrid model each kind of layers, and the loss."""
    compile_fn: Any = torch.compile if compiled else lambda function: function
    if not is_hybrid(config):
        return compile_fn(batch_loss)
    layer_fn, loss_fn = compile_fn(hybrid_layer), compile_fn(token_loss)

    def hybrid_loss(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        hidden = hybrid_hidden(model, batch, document_mask(batch.document_ids), layer_fn)
        return loss_fn(hidden, model.lm_head.weight, batch)

    return hybrid_loss


def is_hybrid(config: PretrainedConfig) -> bool:
    return "linear_attention" in (getattr(config, "layer_types", None) or ())


def train_steps(
    model: PreTrainedModel, batches: Iterable[Batch], options: TrainOptions, compile_model: bool = False
) -> Iterator[torch.Tensor]:
    """Train in place; yields each step's loss as a tensor, so that the loop does not synchronize."""
    device, begin = model.device, time.monotonic()
    loss_fn = loss_function(model.config, compile_model)
    optimizer = MasterAdamW(model, options)
    model.train()
    torch.set_float32_matmul_precision("high")  # for what is not in the weights' own dtype
    compiled_at = begin
    for step, batch in enumerate(batches):
        loss = loss_fn(model, Batch(*(part.to(device, non_blocking=True) for part in batch)))
        loss.backward()
        now, end = time.monotonic(), begin + options.seconds
        optimizer.step(
            options.learning_rate_at(step, min(1.0, (now - compiled_at) / max(1e-9, end - compiled_at)))
        )
        yield loss.detach()
        if options.seconds and now >= end:
            return
        if step == 0:  # compiling is not a part of the schedule
            compiled_at = time.monotonic()


def new_model(config: PretrainedConfig, device: str, seed: int) -> PreTrainedModel:
    """Random weights: bfloat16 on a GPU, float32 on a CPU, where bfloat16 is slow."""
    set_seed(seed)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    if is_hybrid(config):
        spread_decays(model)
    return model.to(device=device, dtype=dtype)


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All weights of a model of `save_checkpoint`, with the head that is its embedding."""
    weights = load_file(folder / "model.safetensors")
    return weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}


def run_with_progress(steps: Iterator[torch.Tensor], options: TrainOptions) -> tuple[int, float, float]:
    """Show loss and speed while training; returns the number of steps, the last loss and the seconds."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    start, step = time.monotonic(), 0
    loss = torch.tensor(math.nan)
    with Progress(*columns) as progress:
        task = progress.add_task("training", total=options.num_steps)
        for step, loss in enumerate(steps, start=1):
            if step % 50 == 0 or step == options.num_steps:
                tokens_per_second = step * options.num_rows * options.row_len / (time.monotonic() - start)
                description = f"loss {loss.item():.4f}, {tokens_per_second / 1e6:.2f} M tokens/s"
                progress.update(task, completed=step, description=description)
                if step % 500 == 0 or step == options.num_steps:
                    progress.console.print(f"step {step}: {description}")
    return step, loss.item(), time.monotonic() - start


def main(
    out: Annotated[Path, typer.Option(help="the model folder to write")],
    model: Annotated[str, typer.Option(help="dense, moe or hybrid")] = "dense",
    steps: Annotated[int, typer.Option(help="steps; 0: as the built-in weights (hybrid: --seconds 232)")] = 0,
    seconds: Annotated[float, typer.Option(help="train so long instead, compilation included")] = 0.0,
    rows: Annotated[int, typer.Option(help="packed rows a step")] = 64,
    row_len: Annotated[int, typer.Option(help="tokens a row")] = 1024,
    learning_rate: Annotated[float, typer.Option(help="peak learning rate")] = 3e-3,
    seed: Annotated[int, typer.Option(help="seeds the weights and the training text")] = 0,
    start: Annotated[Path | None, typer.Option(help="go on from the weights of this trained folder")] = None,
    workers: Annotated[int, typer.Option(help="processes that write text ahead; -1: all cores but two")] = -1,
    compiled: Annotated[bool | None, typer.Option("--compile/--no-compile", help="default: on a GPU")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu; default: cuda if there is one")] = "",
    questions: Annotated[int, typer.Option(help="held-out questions to score with")] = 400,
) -> None:
    """Train one of the built-in models and score it on the held-out questions."""
    config = model_config(model)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    compiled = device == "cuda" if compiled is None else compiled
    workers = max(1, (os.cpu_count() or 2) - 2) if workers < 0 else workers
    if steps and seconds:
        raise ValueError(f"--steps {steps} does not apply with --seconds {seconds:g}; give one of them")
    bound = MAX_STEPS if seconds else steps or NUM_STEPS[model]
    options = TrainOptions(bound, rows, row_len, learning_rate, seed=seed, seconds=seconds)
    if not (out / "tokenizer.json").exists():
        save_tokenizer(train_tokenizer(), out)

    network, record = new_model(config, device, seed), dict[str, Any]()
    if start is not None:
        network.load_state_dict(load_weights(start))
        record["started_from"] = json.loads((start / "training.json").read_text())
    dataset = PackedBatches((out / "tokenizer.json").read_text(), seed, options.num_steps, rows, row_len)
    steps_made = train_steps(network, batch_loader(dataset, workers), options, compiled)
    num_steps, loss, elapsed = run_with_progress(steps_made, options)
    save_checkpoint(network, out)
    torch.set_float32_matmul_precision("highest")
    # The score is that of the files just written: weights rounded to bfloat16, run in float32.
    result = score(load_answers(out, device), held_out_questions(questions))
    length = f"--seconds {seconds:g}" if seconds else f"--steps {num_steps}"
    more = "" if start is None else f" --start {start}"
    record |= {
        "name": model,
        "command": (
            f"python -m diptych.shared.tools.training.train --model {model} --out {out} {length} "
            f"--rows {rows} --row-len {row_len} --learning-rate {learning_rate} --seed {seed}{more}"
        ),
        "device": f"one {torch.cuda.get_device_name()}" if device == "cuda" else "a CPU",
        "torch": torch.__version__,
        "seconds": round(elapsed, 1),
        "num_steps": num_steps,
        "num_tokens": num_steps * rows * row_len,
        "row_len": row_len,
        "num_parameters": network.num_parameters(),
        "final_loss": round(loss, 5),
        "held_out": score_record(result),
    }
    save_record(out, record)
    typer.echo(f"{out}: {result.exact:.2%} of {questions} held-out questions, {elapsed:.0f} s of training")
    typer.echo("\n".join(f"  {kind:14} {exact:.1%}" for kind, exact in sorted(result.by_kind.items())))


if __name__ == "__main__":
    typer.run(main)
