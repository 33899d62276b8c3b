"""Stage 01, the forward pass: complete the functions that raise NotImplementedError.

cp docs/exercises/my_layers.py my_layers.py
diptych check --stage 01 my_layers.py

The contract is in shared/interfaces/layers.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from diptych.shared.config import RopeConfig
from diptych.shared.interfaces import layers as interface
from diptych.shared.modeling.rope import rope_angles


class Linear(nn.Module):
    """y = x @ weightᵀ + bias. The parameters hold nothing until weights are loaded."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class RMSNorm(interface.RMSNorm):
    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps)
        self.weight = nn.Parameter(torch.empty(hidden_size), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden_size] -> the same shape and dtype."""
        raise NotImplementedError("TODO norm: x / sqrt(mean(x²) + eps) * weight, the mean in float32")


class RotaryEmbedding(interface.RotaryEmbedding):
    """One object serves all layers of a model: cos and sin of every position are computed once."""

    def __init__(self, rope: RopeConfig, head_dim: int, context_len: int) -> None:
        super().__init__(rope, head_dim, context_len)
        assert rope.rotary_dim <= head_dim
        self.rope = rope
        self.context_len = context_len
        self.table: torch.Tensor | None = None  # [context_len, 2, 1, rotary_dim], made when first used

    def forward(
        self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self._cos_sin(positions).unbind(1)
        return self._rotate(q, cos, sin), self._rotate(k, cos, sin)

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, heads, head_dim]; cos, sin [num_tokens, 1, rotary_dim] float32. For a pair (a, b):
        (a cos - b sin, b cos + a sin). `roll` puts b where a is and a where b is."""
        raise NotImplementedError("TODO rotation: for each pair (a, b): (a cos - b sin, b cos + a sin)")

    def _cos_sin(self, positions: torch.Tensor) -> torch.Tensor:
        """float32 [num_tokens, 2, 1, rotary_dim]: (cos, cos), then (-sin, sin)."""
        raise NotImplementedError(
            "TODO rotation: rope_angles gives angles [n, rotary_dim / 2] and a factor; keep a table"
        )


class SiluAndMul(interface.SiluAndMul):
    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """gate, up [..., n] -> [..., n]."""
        raise NotImplementedError("TODO activation: silu of gate, in float32, times up")


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        act_fn: type[interface.SiluAndMul] = SiluAndMul,
    ) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, bias)
        self.up_proj = Linear(hidden_size, intermediate_size, bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias)
        self.act_fn = act_fn()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x), self.up_proj(x)))
