"""The parts of an operation of FlashInfer Trace whose exact results are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from diptych.shared.tools.conformance.kernels.attention_suspects import dense
from diptych.shared.tools.conformance.kernels.calls import parts
from diptych.shared.tools.conformance.kernels.problem import Like, Problem

Read = Callable[[Problem], Any]
LSE = "lse"


@dataclass(frozen=True)
class TraceOp:
    """`inputs`: name of an input -> its value in a problem. `outputs`: name of an output -> result.
    `readers`: result -> what is compared, of a problem and what the function returned; the others are
    compared as they are."""

    like: Like
    inputs: Mapping[str, Read]
    outputs: Mapping[str, str]
    readers: Mapping[str, Callable[[Problem, Any], torch.Tensor]] = field(default_factory=dict)


def tensor(name: str) -> Read:
    return lambda p: p[name]


def constant(name: str) -> Read:
    return lambda p: p.constants[name]


def with_lse(make: Callable[..., Problem], case: Any, takes_scale: bool, seed: int = 0) -> Problem:
    """The problem with the logarithm of the sum of exponentials, base 2, in float32."""
    return replace(make(case, True, seed), truth=partial(dense, lse=True), dtypes={LSE: torch.float32})


def latent_part(name: str, index: int, problem: Problem) -> torch.Tensor:
    """The compressed part (0) of latent rows, or that with positions (1)."""
    rows = problem[name][:, :, 0] if name == "k" else problem[name]
    return parts(problem, rows, problem.constants["rank"])[index]
