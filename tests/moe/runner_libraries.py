"""Stand-ins for the libraries of MoE runners: what their functions compute, in plain torch on a CPU.

Each is the documented function, of the layouts that the library takes. Rows that the library does not write
are left as they are, and experts without rows are not read.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from diptych.shared.interfaces import TopKOutput
from diptych.shared.tools.conformance.contracts.moe.expected import experts64
from diptych.shared.types.quant_scheme import FP4_VALUES


def install(monkeypatch: pytest.MonkeyPatch, modules: dict[str, dict[str, Any]]) -> None:
    for name, functions in modules.items():
        module: Any = ModuleType(name)
        module.__dict__.update(functions)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, leaf = name.rpartition(".")
        if parent in sys.modules:
            monkeypatch.setattr(sys.modules[parent], leaf, module, raising=False)


def blocks(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """One scale for each 128 by 128 -> float32."""
    assert scale.shape[-2:] == (weight.shape[-2] // 128, weight.shape[-1] // 128)
    return weight.float() * scale.repeat_interleave(128, -2).repeat_interleave(128, -1)


def groups(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return q.float() * scale.repeat_interleave(128, -1)


def contiguous_gemm(x: Any, w: Any, y: torch.Tensor, expert_ids: torch.Tensor) -> None:
    assert len(y) % 128 == 0
    assert expert_ids.dtype == torch.int32
    for i, e in enumerate(expert_ids.tolist()):
        assert e == expert_ids[i // 128 * 128], "a block of rows has one expert"
        if e >= 0:
            y[i] = blocks(w[0][e], w[1][e]) @ groups(x[0][i], x[1][i])


def masked_gemm(x: Any, w: Any, y: torch.Tensor, counts: torch.Tensor, expected: int) -> None:
    assert y.shape[1] % 128 == 0
    assert counts.dtype == torch.int32
    assert expected >= 1
    for e, count in enumerate(counts.tolist()):
        if count > 0:
            y[e, :count] = (groups(x[0][e, :count], x[1][e, :count]) @ blocks(w[0][e], w[1][e]).T).to(y.dtype)


DEEP_GEMM = {
    "deep_gemm": {
        "m_grouped_fp8_gemm_nt_contiguous": contiguous_gemm,
        "fp8_m_grouped_gemm_nt_masked": masked_gemm,
    }
}


def cutlass_gemm(y: torch.Tensor, *arguments: Any) -> None:
    *pointers, x, w, x_scale, w_scale, stride_a, stride_b, stride_y = arguments[:12]
    layout_a, layout_b, sizes, first, workspace = arguments[12:]
    assert all(pointer.dtype == torch.int64 for pointer in pointers)
    assert (stride_a == x.shape[1]).all()
    assert (stride_b == x.shape[1]).all()
    assert (stride_y == y.shape[1]).all()
    assert layout_a.shape == layout_b.shape == (len(w), 5)
    assert workspace.dtype == torch.uint8
    assert x.is_contiguous()
    assert w.transpose(1, 2).is_contiguous()
    assert w_scale.transpose(1, 2).is_contiguous()
    for e, (rows, out, size) in enumerate(sizes.tolist()):
        assert (out, size) == (y.shape[1], x.shape[1])
        if rows > 0:
            part = slice(first[e], first[e] + rows)
            y[part] = (groups(x[part], x_scale[part]) @ blocks(w[e], w_scale[e])).to(y.dtype)


SGL_KERNEL = {"sgl_kernel": {"fp8_blockwise_scaled_grouped_mm": cutlass_gemm}}


def mxfp4(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[..., in / 2] with two successive inputs in a byte, and [..., in / 32] -> [..., in]"""
    codes = torch.stack((values & 15, values >> 4), -1).flatten(-2).int()
    return torch.ldexp(
        torch.tensor(FP4_VALUES, device=codes.device)[codes], scale.repeat_interleave(32, -1).int() - 127
    )


@dataclass
class Wrapped:
    """triton_kernels.tensor.Tensor: [experts, in, out], the inputs next to each other in memory."""

    storage: Any
    layout: str = "strided"


def convert_layout(tensor: Wrapped, layout: str, **options: Any) -> Wrapped:
    assert options["mx_axis"] == 1
    assert tensor.storage.data.stride(-2) == 1
    return Wrapped(
        SimpleNamespace(data=tensor.storage.data.clone(memory_format=torch.preserve_format)), layout
    )


def swiglu_fn(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    gate, up = x[..., ::2].clamp(max=limit), x[..., 1::2].clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


@dataclass
class Arguments:
    """A dataclass of the library: any fields, in order."""

    values: tuple[Any, ...]
    options: dict[str, Any]


def dataclass_of(*values: Any, **options: Any) -> Arguments:
    return Arguments(values, options)


def matmul_ogs(
    x: torch.Tensor,
    w: Any,
    bias: torch.Tensor | None,
    routing: Arguments,
    gather_indx: Arguments | None = None,
    precision_config: Any = None,
    fused_activation: Arguments | None = None,
) -> torch.Tensor:
    _, counts, num_experts, num_choices, tiles = routing.values
    assert counts.dtype == torch.int32
    assert len(counts) == num_experts
    assert tiles[0] is counts
    num_rows = len(x) if gather_indx is None else len(gather_indx.values[0])
    assert tiles[1] == num_rows
    scales = precision_config.options.get("weight_scale")
    weight = w
    if scales is not None:
        assert (w.layout, scales.layout) == ("values", "scales")
        values, exponents = w.storage.data.transpose(1, 2), scales.storage.data.transpose(1, 2)
        num_groups = values.shape[2] // 16
        # The library loads them four at a time without a mask: others would be of another row or expert.
        assert exponents.shape[2] % 4 == 0, f"scales of {exponents.shape[2]} groups"
        assert not exponents[..., num_groups:].any(), "scales beyond the inputs"
        weight = mxfp4(values, exponents[..., :num_groups]).transpose(1, 2)
    out = weight.shape[2] // (1 if fused_activation is None else 2)
    y = torch.full((num_rows, out), torch.nan, dtype=x.dtype, device=x.device)
    first = 0
    for e, count in enumerate(counts.tolist()):
        rows = torch.arange(first, first + count, device=x.device)
        source = rows if gather_indx is None else gather_indx.values[0][rows] // num_choices
        part = x[source.long()].float() @ weight[e].float()
        if bias is not None:
            assert bias.dtype == torch.float32
            part += bias[e]
        if fused_activation is not None:
            specs, values = fused_activation.values
            assert specs.options["reduction_n"] == 2
            part = specs.values[1](part, *values)
        y[rows] = part.to(y.dtype)
        first += count
    return y


TRITON_KERNELS: dict[str, dict[str, Any]] = {
    "triton_kernels": {},
    "triton_kernels.matmul_ogs": {
        "matmul_ogs": matmul_ogs,
        **dict.fromkeys(
            ("PrecisionConfig", "FnSpecs", "FusedActivation", "GatherIndx", "RoutingData"), dataclass_of
        ),
    },
    "triton_kernels.swiglu": {"swiglu_fn": swiglu_fn},
    "triton_kernels.tensor": {
        "FP4": "fp4",
        "convert_layout": convert_layout,
        "wrap_torch_tensor": lambda data, dtype=None: Wrapped(SimpleNamespace(data=data)),
        "make_ragged_tensor_metadata": lambda counts, num_rows: (counts, num_rows),
    },
    "triton_kernels.tensor_details": {},
    "triton_kernels.tensor_details.layout": {
        "make_default_matmul_mxfp4_w_layout": lambda mx_axis: ("values", {"mx_axis": mx_axis}),
        "make_default_matmul_mxfp4_w_scale_layout": lambda mx_axis, num_warps: (
            "scales",
            {"mx_axis": mx_axis, "num_warps": num_warps},
        ),
    },
}


def interleave_scales(scales: torch.Tensor) -> torch.Tensor:
    num_experts, rows, num_groups = scales.shape
    by_four = scales.reshape(num_experts, rows, num_groups // 4, 4)
    return by_four.permute(0, 2, 1, 3).reshape(num_experts, num_groups // 4, rows * 4)


def fused_moe(**arguments: Any) -> list[torch.Tensor]:
    x, ids, weights = (arguments[name] for name in ("input", "token_selected_experts", "token_final_scales"))
    assert ids.min() >= 0
    assert (ids.sort(1).values.diff(dim=1) > 0).all(), "the library keeps one of several choices of an expert"
    w31, w2, scales = (
        arguments["fc1_expert_weights"],
        arguments["fc2_expert_weights"],
        arguments["quant_scales"],
    )
    if arguments.get("use_deepseek_fp8_block_scale"):
        w31, w2 = blocks(w31, scales[0]), blocks(w2, scales[1])
    if arguments.get("use_w4_group_scaling"):
        w31, w2 = (
            mxfp4(255 - weight, undo(scale.view(torch.uint8))) for weight, scale in zip((w31, w2), scales)
        )
    b31, b2 = arguments.get("fc1_expert_biases"), arguments.get("fc2_expert_biases")
    limit = arguments["swiglu_limit"] if "swiglu_limit" in arguments else torch.zeros(1)
    if len(limit) > 1:
        assert (arguments["swiglu_alpha"] == 1.702).all()
        assert (arguments["swiglu_beta"] == 1.0).all()
    up, gate = w31.chunk(2, 1)
    b13 = None if b31 is None else torch.cat(b31.chunk(2, 1)[::-1], 1)
    y = experts64(x, TopKOutput(weights, ids), torch.cat((gate, up), 1), w2, b13, b2, float(limit[0]))
    return [y.to(x.device, arguments["output_dtype"])]


def undo(scales: torch.Tensor) -> torch.Tensor:
    num_experts, num_fours, columns = scales.shape
    return scales.view(num_experts, num_fours, columns // 4, 4).permute(0, 2, 1, 3).flatten(2)


FLASHINFER: dict[str, dict[str, Any]] = {
    "flashinfer": {},
    "flashinfer.fused_moe": {
        "cutlass_fused_moe": fused_moe,
        # For the library's order of bytes: a change that the function above takes back.
        "interleave_moe_weights_for_sm90_mixed_gemm": lambda weight, kind: 255 - weight,
        "interleave_moe_scales_for_sm90_mixed_gemm": interleave_scales,
    },
}
