"""The layers of models, as defined in the papers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from diptych.shared.config import RopeConfig
from diptych.shared.interfaces import layers as interface
from diptych.shared.modeling.rope import by_axis, rope_angles


class Linear(nn.Module):
    """y = x @ weightᵀ + bias. The parameters are uninitialized until weights are loaded."""

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
        x32 = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight.to(x.dtype)


class GemmaRMSNorm(RMSNorm, interface.GemmaRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x32 = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * (1.0 + self.weight.to(x32.dtype))).to(x.dtype)


class RotaryEmbedding(interface.RotaryEmbedding):
    """RoPE. All layers of a model share one object, so cos and sin of every position are computed once."""

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
        rotary_dim = self.rope.rotary_dim
        if rotary_dim < x.shape[-1]:
            rotated = self._rotate(x[..., :rotary_dim], cos, sin)
            return torch.cat((rotated, x[..., rotary_dim:]), dim=-1)
        if self.rope.is_interleaved:  # (a, b), (a, b) ... -> a, a ... b, b ... and back
            x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        rotated = (x * cos + x.roll(rotary_dim // 2, -1) * sin).to(x.dtype)
        if self.rope.is_interleaved:
            rotated = rotated.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        return rotated

    def _cos_sin(self, positions: torch.Tensor) -> torch.Tensor:
        """float32 [num_tokens, 2, 1, rotary_dim]: (cos, cos), then (-sin, sin)."""
        if self.table is None or self.table.device != positions.device:
            angles, factor = rope_angles(self.rope, torch.arange(self.context_len, device=positions.device))
            cos, sin = angles.cos() * factor, angles.sin() * factor
            both = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1)
            self.table = both.unsqueeze(2)
        rows = self.table[positions]
        return rows if positions.dim() == 1 else by_axis(rows, self.rope)


class SiluAndMul(interface.SiluAndMul):
    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate = gate.to(torch.promote_types(gate.dtype, torch.float32))
        return (F.silu(gate) * up).to(up.dtype)


class GeluTanhAndMul(interface.GeluTanhAndMul):
    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate = gate.to(torch.promote_types(gate.dtype, torch.float32))
        return (F.gelu(gate, approximate="tanh") * up).to(up.dtype)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)); or another activation, for `act_fn`."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        act_fn: type[nn.Module] = SiluAndMul,
    ) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, bias)
        self.up_proj = Linear(hidden_size, intermediate_size, bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias)
        self.act_fn = act_fn()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x), self.up_proj(x)))
