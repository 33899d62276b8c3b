"""The interface of MoE runners, which replace the experts' own kernels by another library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import torch

from diptych.shared.interfaces.moe import FusedExperts, TopKOutput

Rows = TypeVar("Rows")


class MoeRunner(ABC):
    """Computes what `FusedExperts.forward` does, from the parameters of `experts`. It is made before these
    are loaded, and raises `ValueError` then for weights or sizes that it cannot compute."""

    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    """Of the inputs."""
    changes_layout = False
    """Whether `prepare` changes the parameters, so that new weights do not fit them."""
    min_tokens = 1
    """Fewer are computed by the experts' own kernels. More than 1 needs parameters that stay as they are."""

    def __init__(self, experts: FusedExperts) -> None:
        self.experts = experts

    def prepare(self) -> None:  # noqa: B027
        """Change the loaded parameters to the layout of the library: their order, their shape or both. Called
        once, between loading and the first run, when the KV pool is not yet allocated."""

    @abstractmethod
    def run(self, x: torch.Tensor, topk: TopKOutput) -> torch.Tensor:
        """x [num_tokens >= 1, hidden] -> the same shape and dtype."""

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raise `ValueError` for inputs of another type than `dtypes`."""
        if dtype not in self.dtypes:
            names = " and ".join(str(one).removeprefix("torch.") for one in self.dtypes)
            raise self.refuse(f"dtype {dtype}", names)

    def refuse(self, what: str, supported: str) -> ValueError:
        return ValueError(f"{type(self).__name__}: {what} is not supported; supported: {supported}")


class PermutedRunner(MoeRunner, Generic[Rows]):
    """A runner whose GEMMs need the pairs of token and expert sorted by expert."""

    def run(self, x: torch.Tensor, topk: TopKOutput) -> torch.Tensor:
        return self.post_permute(self.run_rows(self.pre_permute(x, topk)), x, topk)

    @abstractmethod
    def pre_permute(self, x: torch.Tensor, topk: TopKOutput) -> Rows:
        """Tokens and choices -> the rows sorted by expert."""

    @abstractmethod
    def run_rows(self, rows: Rows) -> Rows:
        """Run both GEMMs of all experts."""

    @abstractmethod
    def post_permute(self, rows: Rows, x: torch.Tensor, topk: TopKOutput) -> torch.Tensor:
        """The weighted sum of each token's rows, in the shape and dtype of x."""
