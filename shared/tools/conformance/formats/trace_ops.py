"""Operations of FlashInfer Trace whose exact results are known: constants of a Definition fix the cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from diptych.shared.tools.conformance.clauses.case import Case
from diptych.shared.tools.conformance.clauses.inputs import type_name
from diptych.shared.tools.conformance.formats.trace_attention import attention_op, latent_op
from diptych.shared.tools.conformance.formats.trace_chosen_tokens import chosen_tokens_op
from diptych.shared.tools.conformance.formats.trace_delta_rule import delta_rule_op
from diptych.shared.tools.conformance.formats.trace_draws import draws_op
from diptych.shared.tools.conformance.formats.trace_experts import experts_op
from diptych.shared.tools.conformance.formats.trace_files import Definition
from diptych.shared.tools.conformance.formats.trace_op import TraceOp, tensor
from diptych.shared.tools.conformance.kernels.conventions import LIKES
from diptych.shared.tools.conformance.kernels.problem import Problem, Suspect

ROW_COUNTS = (1, 2, 5, 17, 33)


def op_of(definition: Definition, read: float | None) -> TraceOp | None:
    """None: the operation, or this form of it, is not known. `read`: what is read off the reference."""
    make = OPS.get(definition.op_type)
    op = make(definition, read) if make else None
    if op is None or set(definition.inputs) - set(op.inputs) or set(definition.outputs) - set(op.outputs):
        return None
    results, like = frozenset(op.outputs[name] for name in definition.outputs), op.like
    suspects = {name: partial(_only, results, suspect) for name, suspect in like.suspects.items()}
    like = replace(like, make=partial(_with_results, like.make, results), suspects=suspects)
    return replace(op, like=like)


def why_unknown(definition: Definition) -> str:
    """Returns the reason why `op_of` gives None."""
    if definition.op_type not in OPS:
        return f"the exact result of {definition.op_type} is not known"
    return FORMS.get(
        definition.op_type, f"the exact result of this form of {definition.op_type} is not known"
    )


def _with_results(
    make: Callable[..., Problem],
    names: frozenset[str],
    case: Any,
    takes_scale: bool,
    seed: int = 0,
) -> Problem:
    """The problem with those results only that the Definition has."""
    problem = make(case, takes_scale, seed)
    return replace(problem, truth=partial(_only, names, problem.truth))


def _only(names: frozenset[str], results: Suspect, problem: Problem) -> dict[str, torch.Tensor]:
    return {name: each for name, each in results(problem).items() if name in names}


def _rows(definition: Definition, size: int, dtype: torch.dtype, **fields: Any) -> tuple[Case, ...]:
    return tuple(
        Case(f"{n} x {size}{f', values of {std:g}' * (std != 1.0)}, {type_name(dtype)}", num_tokens=n,
             size=size, std=std, dtype=dtype, **fields)
        for n, std in (*((n, 1.0) for n in ROW_COUNTS), (7, 1e-3), (7, 3e-2))
    )  # fmt: skip


def _gemm(definition: Definition, eps: float | None) -> TraceOp | None:
    if not {"N", "K"} <= set(definition.const) or "A" not in definition.inputs:
        return None
    out, size, dtype = definition.const["N"], definition.const["K"], definition.inputs["A"].dtype
    cases = tuple(
        Case(f"{n} x {out} x {size}", num_tokens=n, out=out, size=size, dtype=dtype) for n in ROW_COUNTS
    )
    like = replace(LIKES["gemm"], cases=cases, timed=lambda _: cases[-1:])
    return TraceOp(like, {"A": tensor("a"), "B": tensor("b")}, {"C": "out"})


def _norm(definition: Definition, eps: float | None) -> TraceOp | None:
    if eps is None or "hidden_size" not in definition.const or "hidden_states" not in definition.inputs:
        return None
    dtype = definition.inputs["hidden_states"].dtype
    cases = _rows(definition, definition.const["hidden_size"], dtype, eps=eps)
    like = LIKES["add_rms_norm" if "residual" in definition.inputs else "rms_norm"]
    names = {"hidden_states": tensor("x"), "weight": tensor("weight"), "residual": tensor("residual")}
    return TraceOp(replace(like, cases=cases, timed=lambda _: cases[4:5]), names,
                   {"output": "out", "residual_out": "residual", "updated_residual": "residual"})  # fmt: skip


def _rope(definition: Definition, eps: float | None) -> TraceOp | None:
    const = definition.const
    if (
        not {"q", "k"} <= set(definition.inputs)
        or "head_size" not in const
        or "interleave" in definition.name
        or "gptj" in definition.name
    ):
        return None
    heads = [
        (const.get("num_qo_heads", h), const.get("num_kv_heads", k)) for h, k in ((1, 1), (6, 2), (7, 1))
    ]
    dtype, rotary = definition.inputs["q"].dtype, const.get("rotary_dim", const["head_size"])
    cases = tuple(
        Case(f"{len(places)} tokens, {h}:{k} heads", head_dim=const["head_size"], rotary_dim=rotary,
             num_qo_heads=h, num_kv_heads=k, dtype=dtype, positions=places)
        for h, k in dict.fromkeys(heads) for places in ((5,), (0, 3, 1023, 3, 255, 256, 257, 100, 63))
    )  # fmt: skip
    names = {name: tensor(name) for name in ("q", "k", "cos_sin_cache", "positions")}
    like = replace(LIKES["rope"], cases=cases, timed=lambda _: cases[-1:])
    return TraceOp(like, names, {"q_out": "q", "k_out": "k"})


OPS: dict[str, Callable[[Definition, float | None], TraceOp | None]] = {
    "gemm": _gemm,
    "rmsnorm": _norm,
    "rope": _rope,
    "gqa": attention_op,
    "gqa_paged": attention_op,
    "gqa_ragged": attention_op,
    "mla": latent_op,
    "mla_paged": latent_op,
    "mla_ragged": latent_op,
    "sampling": draws_op,
    "gdn": delta_rule_op,
    "dsa_paged": chosen_tokens_op,
    "moe": experts_op,
}
"""`gqa` and `mla` are types of drafts of the format."""
FORMS = {
    "moe": "exact results are known of experts in FP8, and in float32 with inputs in bfloat16, that are "
    "chosen as in DeepSeek-V3, Qwen3 or Llama 4, or given",
}
"""Type -> why some of its Definitions have no exact result."""
