"""Random inputs from a seed, drawn on the CPU so that they are equal on every machine."""

from __future__ import annotations

import torch

from diptych.shared.tools.conformance.clauses.device import check_device

HALF_TYPES = (torch.float16, torch.bfloat16)
FLOAT_TYPES = (torch.float32, *HALF_TYPES)


def type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Inputs:
    """A source of random tensors on the device under check."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(
        self, *shape: int, dtype: torch.dtype = torch.float32, mean: float = 0.0, std: float = 1.0
    ) -> torch.Tensor:
        return (mean + std * torch.randn(shape, generator=self.generator)).to(check_device(), dtype)

    def uniform(self, *shape: int) -> torch.Tensor:
        """float32 in [0, 1)"""
        return torch.rand(shape, generator=self.generator).to(check_device())

    def integers(self, end: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Integers in [0, end)."""
        return torch.randint(0, end, shape, generator=self.generator).to(check_device(), dtype)

    def permutation(self, size: int) -> torch.Tensor:
        return torch.randperm(size, generator=self.generator).to(check_device())

    def fill_(self, parameters: torch.nn.Module) -> None:
        """A standard deviation of fan-in^-0.5: activations keep their size."""
        for parameter in parameters.parameters():
            values = self.normal(*parameter.shape, std=parameter.shape[-1] ** -0.5)
            parameter.data.copy_(values)
