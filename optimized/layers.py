"""The layers of the models as kernels, with merged weights and fusion.

Differs from reference: weights that multiply the same input are one matrix (q, k and v; gate and up). A norm,
an activation or a residual sum is fused with a neighbouring GEMM or kernel, which saves one pass over the
hidden states. For a few tokens the GEMMs are GEMVs that include norm and sum; for dozens of tokens they are
Triton kernels where these are faster, otherwise cuBLAS. Assumes that Triton runs, on a GPU or in its
interpreter; refuses float64.

Only layers of this file are fused: a user-provided norm or rotation is called by itself.
"""

from __future__ import annotations

from typing import Any, TypeGuard, TypeVar

import torch
from torch import nn

from diptych.optimized.kernels.attention.qk_norm_rope_store import qk_norm_rope_store, rotate
from diptych.optimized.kernels.linear import (
    cublas_linear,
    fixed_order_gemm,
    linear_choice,
    small_batch_linear,
)
from diptych.optimized.kernels.linear.rms_norm import (
    add_partial_sums_rms_norm,
    add_rms_norm,
    rms_norm,
    rms_norm_add,
)
from diptych.optimized.kernels.linear.silu_and_mul import act_and_mul
from diptych.shared.config import RopeConfig
from diptych.shared.interfaces import layers as interface
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.interfaces.collectives import Collectives
from diptych.shared.modeling.rope import rope_angles
from diptych.shared.modeling.stream import PartialSums, RankPart, Stream
from diptych.shared.types.attention import AttentionLayer

Layer = TypeVar("Layer", bound=nn.Module)


class Linear(nn.Module):
    """y = x @ weightᵀ + bias, x [num_tokens, in_features]. The parameters are uninitialized until weights are
    loaded. Every GEMM with a weight of a model uses this class."""

    is_deterministic = False  # one kernel for any number of tokens, and no fusion that depends on that number

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_deterministic:
            return fixed_order_gemm.linear(x, self.weight, self.bias)
        if use_gemv(x):
            return small_batch_linear.linear(x, self.weight, self.bias)
        return cublas_linear.linear(x, self.weight, self.bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + forward(x), rounded once if a kernel of this project adds. May be written over
        residual."""
        if self.is_deterministic:
            return fixed_order_gemm.linear_add(x, self.weight, residual, self.bias)
        if use_gemv(x):
            return small_batch_linear.linear_add(x, self.weight, residual, self.bias)
        return cublas_linear.linear_add(x, self.weight, residual, self.bias)

    def add_later(self, residual: torch.Tensor, x: torch.Tensor) -> Stream:
        """residual + forward(x): added by `add_to` or, if faster, left to the next norm as partial sums."""
        parts = (
            small_batch_linear.linear_partial_sums(x, self.weight)
            if self.uses_gemv(x) and self.bias is None
            else None
        )
        return Stream(self.add_to(residual, x)) if parts is None else Stream(residual, PartialSums(parts))

    def activated(self, act_fn: nn.Module, gate_up: torch.Tensor) -> torch.Tensor:
        """act_fn of the halves of gate_up, as forward takes it."""
        return act_fn(*gate_up.chunk(2, dim=-1))

    def uses_gemv(self, x: torch.Tensor) -> bool:
        return use_gemv(x) and not self.is_deterministic


class RMSNorm(interface.RMSNorm):
    unit_offset = False

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps)
        self.weight = nn.Parameter(torch.empty(hidden_size), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, self.unit_offset)

    def add_and_norm(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(x, residual, self.weight, self.eps, self.unit_offset)

    def add_sums_and_norm(
        self, sums: PartialSums, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Do what add_and_norm does with the total of the partial sums."""
        return add_partial_sums_rms_norm(sums.parts, residual, self.weight, self.eps, self.unit_offset)


class GemmaRMSNorm(RMSNorm, interface.GemmaRMSNorm):
    """Kernels that know no unit offset ask for RMSNorm's forward, so this class has its own."""

    unit_offset = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class RotaryEmbedding(interface.RotaryEmbedding):
    """RoPE. All layers of a model share one object, so cos and sin of every position are computed once."""

    is_deterministic = False  # a CTA takes the same number of tokens for any batch

    def __init__(self, rope: RopeConfig, head_dim: int, context_len: int) -> None:
        super().__init__(rope, head_dim, context_len)
        assert rope.rotary_dim <= head_dim
        self.rope = rope
        self.can_store = not rope.is_interleaved  # rotate_and_store rotates the halves of a head together
        self.context_len = context_len
        self.table: torch.Tensor | None = None  # [context_len, rotary_dim], made when first used

    def forward(
        self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._rotate(q, positions), self._rotate(k, positions)

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos_sin, rotary_dim = self.cos_sin(positions.device), self.rope.rotary_dim
        if not self.rope.is_interleaved:
            return rotate(x, positions, cos_sin, self.rope.axis_ends)
        turning, rest = x[..., :rotary_dim], x[..., rotary_dim:]
        halves = turning.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        pairs = rotate(halves, positions, cos_sin).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        return torch.cat((pairs, rest), dim=-1)

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
        attention: BatchAttention,
        layer: AttentionLayer,
        means: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Output of the QKV GEMM -> q [num_tokens, num_qo_heads, head_dim], normed and rotated; k, so too,
        and v go to the pool. means: mean squares, where a norm is over all heads."""
        return qk_norm_rope_store(
            qkv,
            positions,
            self.cos_sin(positions.device),
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            0.0 if q_norm is None else q_norm.eps,
            q_norm is not None and q_norm.unit_offset,
            attention.kv_pool.k_buffer(layer.layer_id),
            attention.kv_pool.v_buffer(layer.layer_id),
            attention.out_cache_loc,
            layer.num_qo_heads,
            layer.num_kv_heads,
            layer.head_dim,
            attention.kv_pool.kv_scales[layer.layer_id],
            self.is_deterministic,
            means,
            self.rope.axis_ends,
        )

    def cos_sin(self, device: torch.device) -> torch.Tensor:
        """float32 [context_len, rotary_dim] on the device: cosines, then sines."""
        if self.table is None or self.table.device != device:
            angles, factor = rope_angles(self.rope, torch.arange(self.context_len, device=device))
            self.table = torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1)
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # kernels read it before they wait for the previous one
        return self.table


class SiluAndMul(interface.SiluAndMul):
    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return act_and_mul(gate, up)


class GeluTanhAndMul(interface.GeluTanhAndMul):
    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return act_and_mul(gate, up, is_gelu=True)


class MergedLinear(interface.MergedLinear, Linear):
    """Several Linears with the same input as one: weights are concatenated by rows, results by columns."""

    def __init__(self, in_features: int, parts: dict[str, int], bias: bool = False) -> None:
        super().__init__(in_features, sum(parts.values()), bias)
        self.parts = parts  # name -> rows of the weight

    def forward(self, x: torch.Tensor, norm: interface.RMSNorm | None = None) -> torch.Tensor:
        """The GEMM of x, or of norm(x)."""
        if self.uses_gemv(x) and is_builtin_norm(norm):
            return small_batch_linear.norm_linear(
                x, norm.weight, norm.eps, self.weight, self.bias, norm.unit_offset
            )
        return super().forward(x if norm is None else norm(x))

    def weight_views(self) -> dict[str, torch.Tensor]:
        return {
            f"{part}.{name}": view
            for name, parameter in self.named_parameters()
            for part, view in zip(self.parts, parameter.split(list(self.parts.values())))
        }

    def split(self, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return dict(zip(self.parts, y.split(list(self.parts.values()), dim=-1)))


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
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = MergedLinear(hidden_size, parts, bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias)
        self.act_fn = act_fn()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.activate(x))

    def activate(self, x: torch.Tensor, norm: interface.RMSNorm | None = None) -> torch.Tensor:
        """The input of down_proj: act_fn of gate and up of x, or of norm(x)."""
        is_plain = (
            is_builtin_layer(self.gate_up_proj, MergedLinear)
            and self.gate_up_proj.bias is None
            and is_builtin_layer(self.act_fn, SiluAndMul)
        )
        if is_plain and self.gate_up_proj.uses_gemv(x) and norm is None:
            return small_batch_linear.linear_silu(x, self.gate_up_proj.weight)
        if is_plain and self.gate_up_proj.uses_gemv(x) and is_builtin_norm(norm):
            return small_batch_linear.norm_linear_silu(
                x, norm.weight, norm.eps, self.gate_up_proj.weight, norm.unit_offset
            )
        return self.down_proj.activated(self.act_fn, self.gate_up_proj(x, norm))


def sum_later(tp: Collectives, part: torch.Tensor) -> torch.Tensor | RankPart:
    """The sum over ranks of `part`. On a GPU it is left to `add_and_norm`: one kernel may sum over ranks, add
    the residual and norm."""
    if tp.size == 1:
        return part
    return RankPart(part, tp) if part.is_cuda else tp.all_reduce(part)


def add_and_norm(norm: Any, x: Stream) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of x.total(), x.total()), both may be written over the tensors of x."""
    residual, pending = x
    if isinstance(pending, torch.Tensor):
        return norm.add_and_norm(pending, residual)
    if isinstance(pending, RankPart):
        return pending.tp.all_reduce_add_and_norm(pending.part, residual, norm)
    if isinstance(pending, PartialSums) and adds_in_kernel(norm):
        return norm.add_sums_and_norm(pending, residual)
    total = x.total()  # nothing is pending, or a user-provided norm takes no partial sums
    return norm(total), total


def norm_and_add(norm: Any, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """residual + norm(x), may be written over residual."""
    if not is_builtin_norm(norm):
        return residual + norm(x)
    return rms_norm_add(x, residual, norm.weight, norm.eps, norm.unit_offset)


def adds_in_kernel(norm: interface.RMSNorm) -> bool:
    """Whether a kernel may do what norm.add_and_norm does: a method of this file, replaced by no hook."""
    return type(norm).add_and_norm is RMSNorm.add_and_norm and "add_and_norm" not in vars(norm)


def use_gemv(x: torch.Tensor) -> bool:
    """Whether a kernel other than cuBLAS may be the fastest GEMM for x."""
    return 0 < x.shape[0] <= linear_choice.max_tokens(x.dtype)


def is_builtin_layer(module: Any, layer: type[Layer]) -> TypeGuard[Layer]:
    """Whether a kernel may replace a module: its class is `layer`, a class of this file, or a subclass
    without its own forward."""
    return isinstance(module, layer) and type(module).forward is layer.forward


def is_builtin_norm(norm: Any) -> TypeGuard[RMSNorm]:
    return is_builtin_layer(norm, RMSNorm) or is_builtin_layer(norm, GemmaRMSNorm)


def logits(x: torch.Tensor, weight: torch.Tensor, is_deterministic: bool = False) -> torch.Tensor:
    """x @ weightᵀ in float32, not rounded to the type of x on the way where the library can."""
    if is_deterministic:
        return fixed_order_gemm.linear(x, weight, out_dtype=torch.float32)
    if use_gemv(x):
        return small_batch_linear.linear(x, weight, out_dtype=torch.float32)
    return cublas_linear.linear(x, weight, out_dtype=torch.float32)
