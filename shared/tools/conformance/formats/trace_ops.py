"""Operations of FlashInfer Trace whose exact results are known: constants of a Definition fix the cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from diptych.shared.tools.conformance.clauses.case import Case
from diptych.shared.tools.conformance.clauses.inputs import type_name
from diptych.shared.tools.conformance.formats.trace_chosen_tokens import chosen_tokens_op
from diptych.shared.tools.conformance.formats.trace_delta_rule import delta_rule_op
from diptych.shared.tools.conformance.formats.trace_experts import experts_op
from diptych.shared.tools.conformance.formats.trace_files import Definition
from diptych.shared.tools.conformance.formats.trace_op import (
    LSE,
    Read,
    TraceOp,
    latent_part,
    tensor,
    with_lse,
)
from diptych.shared.tools.conformance.kernels.attention_likes import (
    DECODE_LIKE,
    EXTEND_LIKE,
    MLA_LIKE,
    make_attention,
    make_mla,
)
from diptych.shared.tools.conformance.kernels.calls import csr_pages
from diptych.shared.tools.conformance.kernels.conventions import LIKES
from diptych.shared.tools.conformance.kernels.draw_frequencies import NUM_DRAWS, expect_ids, frequency
from diptych.shared.tools.conformance.kernels.problem import Problem
from diptych.shared.tools.conformance.oracles.attention_batches import AttentionCase
from diptych.shared.tools.conformance.oracles.mla_batches import MLACase

ROW_COUNTS = (1, 2, 5, 17, 33)
LENGTHS = (1, 2, 17, 127, 128, 129, 259)
NUM_LOGITS = 2**22
"""Logits of a case of a sampler: a large vocabulary has fewer rows."""


def op_of(definition: Definition, read: float | None) -> TraceOp | None:
    """None: the operation, or this form of it, is not known. `read`: what is read off the reference."""
    make = OPS.get(definition.op_type)
    op = make(definition, read) if make else None
    if op is None or set(definition.inputs) - set(op.inputs) or set(definition.outputs) - set(op.outputs):
        return None
    results = {op.outputs[name] for name in definition.outputs}
    like = op.like
    return replace(op, like=replace(like, make=partial(_with_results, like.make, frozenset(results))))


def _with_results(
    make: Callable[..., Problem],
    names: frozenset[str],
    case: Any,
    takes_scale: bool,
    seed: int = 0,
) -> Problem:
    """The problem with those results only that the Definition has."""
    problem = make(case, takes_scale, seed)
    truth = problem.truth
    return replace(problem, truth=lambda p: {name: each for name, each in truth(p).items() if name in names})


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
    if "hidden_size" not in definition.const or "hidden_states" not in definition.inputs:
        return None
    dtype = definition.inputs["hidden_states"].dtype
    cases = _rows(definition, definition.const["hidden_size"], dtype, eps=eps)
    like = LIKES["add_rms_norm" if "residual" in definition.inputs else "rms_norm"]
    names = {"hidden_states": tensor("x"), "weight": tensor("weight"), "residual": tensor("residual")}
    return TraceOp(replace(like, cases=cases, timed=lambda _: cases[4:5]), names,
                   {"output": "out", "residual_out": "residual", "updated_residual": "residual"})  # fmt: skip


def _rope(definition: Definition, eps: float | None) -> TraceOp | None:
    const = definition.const
    if "head_size" not in const or "interleave" in definition.name or "gptj" in definition.name:
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


def _attention(definition: Definition, eps: float | None) -> TraceOp | None:
    const, inputs = definition.const, definition.inputs
    if not {"num_qo_heads", "num_kv_heads", "head_dim"} <= set(const) or "q" not in inputs:
        return None
    is_ragged, is_extend = definition.op_type == "gqa_ragged", "qo_indptr" in inputs
    page_size = 1 if is_ragged else const.get("page_size", 1)
    heads = const["num_qo_heads"], const["num_kv_heads"], const["head_dim"]
    lengths = tuple(-(-n // page_size) * page_size for n in LENGTHS)  # there is no length of the last page
    cases = tuple(
        AttentionCase(f"{what}, page {page_size}", requests, page_size, inputs["q"].dtype, *heads)
        for what, requests in (
            ("one request", (_request(lengths[2], is_extend),)),
            ("lengths of 1 to 17", tuple(_request(n, is_extend) for n in lengths[:3])),
            ("around 128", tuple(_request(n, is_extend) for n in lengths[3:6])),
            ("one far longer", tuple(_request(n, is_extend) for n in (lengths[0], lengths[6], lengths[1]))),
        )
    )
    like = EXTEND_LIKE if is_extend else DECODE_LIKE
    rows = () if is_extend or is_ragged else like.rows
    like = replace(like, cases=cases, timed=lambda _: cases[-1:], make=partial(with_lse, make_attention),
                   rows=rows, paged=() if is_ragged else like.paged)  # fmt: skip
    names: dict[str, Read] = {
        "q": tensor("q"), "k_cache": tensor("k"), "v_cache": tensor("v"), "qo_indptr": tensor("qo_indptr"),
        "kv_indices": lambda p: csr_pages(p)[1], "sm_scale": lambda p: p.constants["scale"],
        "kv_indptr": lambda p: csr_pages(p)[0],
        "k": partial(_ragged, "k"), "v": partial(_ragged, "v"),
    }  # fmt: skip
    return TraceOp(like, names, {"output": "out", "lse": LSE})


def _request(length: int, is_extend: bool) -> tuple[int, int]:
    new = max(length // 2, 1) if is_extend else 1
    return length - new, new


def _ragged(name: str, problem: Problem) -> torch.Tensor:
    """The live tokens of all requests, one after another; pages have one token."""
    table, lens = problem["page_table"], problem["lens"].tolist()
    return torch.cat([problem[name][table[i, :n].long(), 0] for i, n in enumerate(lens)])


def _mla(definition: Definition, eps: float | None) -> TraceOp | None:
    const, inputs = definition.const, definition.inputs
    if not {"num_qo_heads", "head_dim_ckv", "head_dim_kpe"} <= set(const) or "qo_indptr" in inputs:
        return None
    page_size = const.get("page_size", 1)
    lengths = tuple(-(-n // page_size) * page_size for n in LENGTHS)
    cases = tuple(
        MLACase(f"{what}, page {page_size}", tuple((n - 1, 1) for n in chosen), page_size=page_size,
                dtype=inputs["q_nope"].dtype, num_qo_heads=const["num_qo_heads"],
                kv_lora_rank=const["head_dim_ckv"], qk_rope_head_dim=const["head_dim_kpe"])
        for what, chosen in (("one request", lengths[2:3]), ("lengths of 1 to 17", lengths[:3]),
                             ("around 128", lengths[3:6]))
    )  # fmt: skip
    like = replace(
        MLA_LIKE, cases=cases, timed=lambda _: cases[-1:], make=partial(with_lse, make_mla), rows=()
    )
    names: dict[str, Read] = {
        "q_nope": partial(latent_part, "q", 0), "q_pe": partial(latent_part, "q", 1),
        "ckv_cache": partial(latent_part, "k", 0), "kpe_cache": partial(latent_part, "k", 1),
        "kv_indptr": lambda p: csr_pages(p)[0], "kv_indices": lambda p: csr_pages(p)[1],
        "sm_scale": lambda p: p.constants["scale"],
    }  # fmt: skip
    return TraceOp(like, names, {"output": "out", "lse": LSE})


def _sampling(definition: Definition, eps: float | None) -> TraceOp | None:
    if "vocab_size" not in definition.const or "probs" not in definition.inputs:
        return None
    size = definition.const["vocab_size"]
    num_draws = max(min(NUM_LOGITS // size, NUM_DRAWS), 8)
    top_k, top_p = ("top_k" in definition.inputs), ("top_p" in definition.inputs)
    k, p = min(20, max(size // 2, 1)) if top_k else -1, 0.8 if top_p else 1.0
    groups = {(t, k, p) for t in (1.0, 0.4)} | {(0.4, 1 if top_k else -1, p)}
    cases = tuple(
        Case(f"{size} tokens, temperature {t:g}, top-k {k}, top-p {p:g}", vocab_size=size,
             groups=((t, k, p),), num_draws=num_draws)
        for t, k, p in sorted(groups)
    )  # fmt: skip
    like = replace(LIKES["sampler"], cases=cases, timed=lambda _: cases[-1:], rows=())
    names: dict[str, Read] = {
        "probs": lambda p: (p["logits"] / p["temperature"][:, None]).softmax(-1),
        "top_k": tensor("top_k"), "top_p": tensor("top_p"),
    }  # fmt: skip
    return TraceOp(like, names, {"samples": "frequency"}, {"frequency": _frequency})


def _frequency(problem: Problem, ids: Any) -> torch.Tensor:
    return frequency(expect_ids(ids, problem["logits"].shape[:1]), problem["logits"].shape[1])[None]


OPS: dict[str, Callable[[Definition, float | None], TraceOp | None]] = {
    "gemm": _gemm,
    "rmsnorm": _norm,
    "rope": _rope,
    "gqa_paged": _attention,
    "gqa_ragged": _attention,
    "mla_paged": _mla,
    "sampling": _sampling,
    "gdn": delta_rule_op,
    "dsa_paged": chosen_tokens_op,
    "moe": experts_op,
}
