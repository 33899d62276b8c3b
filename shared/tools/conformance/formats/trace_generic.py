"""An operation of FlashInfer Trace whose exact result is not known: inputs are made by the names and types of
the Definition, or are those of Workloads, and results are compared with those of the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from diptych.shared.tools.conformance.clauses.case import Case
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.inputs import Inputs
from diptych.shared.tools.conformance.clauses.tolerance import Tolerance
from diptych.shared.tools.conformance.formats.trace_files import Definition, Spec, Workload
from diptych.shared.tools.conformance.formats.trace_op import TraceOp
from diptych.shared.tools.conformance.kernels.patterns import NATIVE
from diptych.shared.tools.conformance.kernels.problem import Like, Problem

SIZES = (1, 3, 8)
"""Of a variable axis, one for each case without a Workload."""
PAGES = 64
POOLS = ("pool_size", "cache_size")
"""Ends of the names of axes that count states, of which a batch uses some."""
SCALARS: Mapping[str, Any] = {"local_expert_offset": 0, "routed_scaling_factor": 2.5, "use_qk_l2norm": True}
RMS = {
    torch.float32: 1e-3, torch.float16: 5e-3, torch.bfloat16: 2e-2, torch.float8_e4m3fn: 2**-5,
    torch.float8_e5m2: 2**-4,
}  # fmt: skip
"""Integers are exact. Four times that of a number of 8 bits is one step of it."""
Run = Callable[[TraceOp, Problem], dict[str, torch.Tensor]]


def generic_op(definition: Definition, run: Run, workloads: Sequence[Workload] = ()) -> TraceOp:
    """`run`: the Definition's reference, which gives what is expected."""
    cases = tuple(Case(f"workload {each.uuid[:8]}", workload=each) for each in workloads) or tuple(
        Case(f"variable axes of {n}", workload=Workload(_axes(definition, n))) for n in SIZES
    )
    inputs = {name: partial(_read, name) for name in definition.inputs}
    outputs = {name: name for name in definition.outputs}
    holder: list[TraceOp] = []

    def make(case: Case, takes_scale: bool, seed: int = 0) -> Problem:
        values = _values(definition, case.workload, seed)
        tensors = {name: each for name, each in values.items() if isinstance(each, torch.Tensor)}
        scalars = {name: each for name, each in values.items() if name not in tensors}
        scalars[NATIVE] = lambda expected: expected
        dtypes = {name: spec.dtype for name, spec in definition.outputs.items()}
        main = next(iter(dtypes.values()))
        return Problem(
            case.name, tensors, scalars, partial(run, holder[0]), "reference", main,
            sum(each.numel() for each in tensors.values()), 0.0, 0.0,
            limit=partial(_limit, dtypes), limits_each=True, dtypes=dtypes,
        )  # fmt: skip

    like = Like(
        definition.name, definition.op_type, "elements of inputs", cases, lambda _: cases[-1:], make, {}
    )
    holder.append(TraceOp(like, inputs, outputs))
    return holder[0]


def _limit(dtypes: Mapping[str, torch.dtype], expected: Mapping[str, torch.Tensor]) -> Tolerance:
    """The limit of a result by itself; of several, the largest one, which is only reported. A result in
    float32 may come of steps in the type of the first one."""
    main = RMS.get(next(iter(dtypes.values())), 0.0)
    rms = max((max(RMS[dtypes[name]], main) for name in expected if dtypes[name] in RMS), default=0.0)
    size = max(
        (float(each.square().mean().sqrt()) for each in expected.values() if each.numel()), default=0.0
    )
    reason = "the reference rounds too: both errors count, relative to the size of the results"
    return Tolerance(4 * rms * size, 4 * rms, rms, reason)


def _read(name: str, problem: Problem) -> Any:
    return problem.tensors[name] if name in problem.tensors else problem.constants[name]


def _axes(definition: Definition, n: int) -> dict[str, int]:
    """Sizes of all axes: of offsets, one more than there are sequences."""
    sizes = {}
    for name, size in definition.axes.items():
        is_larger = name.startswith("len_") or name.endswith(POOLS)
        sizes[name] = size if size is not None else PAGES if name == "num_pages" else n + is_larger
    return sizes


def _values(definition: Definition, workload: Workload, seed: int) -> dict[str, Any]:
    inputs, device = Inputs(seed), check_device()
    sizes = {**definition.const, **workload.axes}
    values: dict[str, Any] = {}
    for name, spec in definition.inputs.items():
        given = workload.values.get(name)
        if spec.is_optional and given is None:
            values[name] = None
        elif isinstance(given, torch.Tensor):
            values[name] = given.to(device)
        elif given is not None:
            values[name] = given
        elif spec.shape is None:
            values[name] = _scalar(definition, name, spec, sizes)
        else:
            values[name] = _random(name, spec, definition.shape_of(spec, sizes), sizes, inputs)
    return values


def _scalar(definition: Definition, name: str, spec: Spec, sizes: Mapping[str, int]) -> Any:
    """A factor is about one over the root of the first input's last dimension."""
    if name in SCALARS:
        return SCALARS[name]
    if not spec.dtype.is_floating_point:
        return spec.dtype == torch.bool or 1
    shapes = [definition.shape_of(each, sizes) for each in definition.inputs.values() if each.shape]
    return (shapes[0][-1] if shapes else 1) ** -0.5


def _random(
    name: str, spec: Spec, shape: tuple[int, ...], sizes: Mapping[str, int], inputs: Inputs
) -> torch.Tensor:
    if "indptr" in name or "seqlens" in name:
        total = next((sizes[each] for each in _totals(name) if each in sizes), shape[0] - 1)
        return torch.linspace(0, total, shape[0]).floor().to(check_device(), spec.dtype)
    pools = [size for axis, size in sizes.items() if axis.endswith(POOLS)] or [sizes.get("num_pages", PAGES)]
    num_slots = pools[0] * (sizes.get("page_size", 1) if "sparse" in name else 1)
    if spec.dtype == torch.bool:
        return inputs.integers(2, *shape, dtype=torch.bool)
    if not spec.dtype.is_floating_point:
        if name.startswith("seq_len"):
            most = sizes.get("max_num_pages", 1) * sizes.get("page_size", 1)
            return inputs.integers(most, *shape, dtype=spec.dtype) + 1
        if spec.dtype == torch.uint8:  # pairs of FP4 numbers, or scales: E8M0 or FP8, which hold no NaN
            is_scale = "scale" in name or "sf" in name.split("_")
            return (
                inputs.integers(8, *shape, dtype=spec.dtype) + 112
                if is_scale
                else inputs.integers(256, *shape, dtype=spec.dtype)
            )
        if spec.dtype == torch.int8:  # bytes of FP8 numbers and scales
            return inputs.normal(*shape).to(torch.float8_e4m3fn).view(torch.int8)
        if name == "topk_ids" and spec.dtype == torch.int32:  # an expert, and its weight in bfloat16
            experts = inputs.integers(sizes.get("num_experts", 1), *shape, dtype=spec.dtype)
            weights = (0.25 + 0.5 * inputs.uniform(*shape)).bfloat16().view(torch.int16)
            return experts * 2**16 + weights.to(torch.int32)
        if len(shape) == 1 and shape[0] <= num_slots:  # a slot for each
            return inputs.permutation(num_slots)[: shape[0]].to(spec.dtype)
        return inputs.integers(num_slots, *shape, dtype=spec.dtype)
    if name in ("g", "beta") or "scale" in name:
        return (0.5 + 0.5 * inputs.uniform(*shape)).to(spec.dtype)
    if ("weight" in name and len(shape) > 1) or ("state" in name and len(shape) > 2):
        return inputs.normal(*shape, std=shape[-1] ** -0.5).to(spec.dtype)
    return inputs.normal(*shape).to(spec.dtype)


def _totals(name: str) -> tuple[str, ...]:
    """The axes that the last offset may be the size of."""
    if "qo" in name:
        return ("total_q",)
    return ("num_kv_indices", "total_kv", "total_seq_len", "total_q")
