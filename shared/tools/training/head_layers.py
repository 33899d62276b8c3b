"""What the heads that are trained here have in common: layers under the names of public checkpoints."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import typer
from torch import nn
from torch.nn import functional

from diptych.shared.tools.training.train import MasterAdamW, TrainOptions

OUTPUT_SCALE = 0.3
"""Of the random weights at the end of a layer's halves: at first the residual stream changes little."""


REPORT_SECONDS = 20.0
WARM_UP_SHARE = 0.05  # of the seconds of a training


def command_line() -> str:
    """The command that trains, for the record beside the weights."""
    return shlex.join(["python", "-m", "diptych.shared.tools.training.train_dflash", *sys.argv[1:]])


def attention_linears(
    input_size: int, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> nn.ModuleDict:
    q_size, kv_size = num_heads * head_dim, num_kv_heads * head_dim
    return nn.ModuleDict(
        {
            "q_proj": nn.Linear(input_size, q_size, bias=False),
            "k_proj": nn.Linear(input_size, kv_size, bias=False),
            "v_proj": nn.Linear(input_size, kv_size, bias=False),
            "o_proj": nn.Linear(q_size, hidden_size, bias=False),
        }
    )


def mlp_linears(hidden_size: int, intermediate_size: int) -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "gate_proj": nn.Linear(hidden_size, intermediate_size, bias=False),
            "up_proj": nn.Linear(hidden_size, intermediate_size, bias=False),
            "down_proj": nn.Linear(intermediate_size, hidden_size, bias=False),
        }
    )


def swiglu(mlp: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = mlp["down_proj"](functional.silu(mlp["gate_proj"](x)) * mlp["up_proj"](x))
    return output


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """RoPE. x [..., n, num_heads, head_dim], positions [..., n]."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device) / half)
    angles = (positions[..., None] * frequencies)[..., None, :]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.split(half, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def init_head(head: nn.Module) -> None:
    """Random matrices; norms keep their ones."""
    for name, parameter in head.named_parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                with torch.no_grad():
                    parameter.mul_(OUTPUT_SCALE)


def rounded(head: nn.Module) -> dict[str, Any]:
    """The weights as they are saved."""
    return {name: tensor.to("cpu", torch.bfloat16) for name, tensor in head.state_dict().items()}


def train_steps(
    head: nn.Module, losses: Iterator[torch.Tensor], options: TrainOptions
) -> Iterator[torch.Tensor]:
    """Train in place by losses that are computed one by one; yields each. It ends after `options.seconds`, if
    there are any."""
    optimizer: Any = MasterAdamW(head, options)
    begin = time.monotonic()
    for step, loss in enumerate(losses):
        loss.backward()
        share = min(1.0, (time.monotonic() - begin) / options.seconds) if options.seconds else 0.0
        # A step may take a millisecond or a second.
        warm_up = min(1.0, share / WARM_UP_SHARE) if options.seconds else 1.0
        begun = options.num_warmup_steps * bool(options.seconds)
        optimizer.step(warm_up * options.learning_rate_at(begun + step, share))
        yield loss.detach()
        if share == 1.0:
            return


def run_steps(steps: Iterator[torch.Tensor], evaluate: Callable[[], Any]) -> tuple[int, float, float]:
    """Every REPORT_SECONDS say how the training goes; returns the steps, the last loss and the seconds."""
    begin = reported = time.monotonic()
    step, loss = 0, torch.tensor(0.0)
    for step, loss in enumerate(steps, start=1):
        now = time.monotonic()
        if now - reported >= REPORT_SECONDS:
            typer.echo(f"{now - begin:.0f} s, step {step}, loss {loss.item():.4f}, held out: {evaluate()}")
            reported = now
    return step, loss.item(), time.monotonic() - begin
