"""`gqa_paged`, `gqa_ragged`, `mla_paged` and `mla_ragged` of FlashInfer Trace: decode and prefill."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from diptych.shared.tools.conformance.formats.trace_files import Definition
from diptych.shared.tools.conformance.formats.trace_op import (
    LSE,
    Read,
    TraceOp,
    constant,
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
from diptych.shared.tools.conformance.kernels.attention_suspects import MLA_SUSPECTS, SUSPECTS
from diptych.shared.tools.conformance.kernels.calls import csr_pages
from diptych.shared.tools.conformance.kernels.problem import Problem
from diptych.shared.tools.conformance.oracles.attention_batches import AttentionCase
from diptych.shared.tools.conformance.oracles.mla_batches import MLACase

LENGTHS = (1, 2, 17, 127, 128, 129, 259)
LAST_PAGE = ("kv_last_page_len", "last_page_len")
"""Names of the tokens in the last page of each sequence. Without them every page is full."""
GROUPS = (
    ("one request", (2,)), ("lengths of 1 to 17", (0, 1, 2)), ("around 128", (3, 4, 5)),
    ("one far longer", (0, 6, 1)),
)  # fmt: skip
"""What a batch is, places in `LENGTHS`."""


def attention_op(definition: Definition, read: float | None) -> TraceOp | None:
    const, inputs = definition.const, definition.inputs
    if not {"num_qo_heads", "num_kv_heads", "head_dim"} <= set(const) or "q" not in inputs:
        return None
    heads = const["num_qo_heads"], const["num_kv_heads"], const["head_dim"]
    return _dense_op(definition, AttentionCase("", (), 1, inputs["q"].dtype, *heads))


def latent_op(definition: Definition, read: float | None) -> TraceOp | None:
    """Attention to rows of latent KV, or to the heads that they expand to, whose values have a size of their
    own."""
    const, inputs = definition.const, definition.inputs
    if {"q", "k", "v"} <= set(inputs):
        return _op_of_heads(definition)
    if not {"num_qo_heads", "head_dim_ckv", "head_dim_kpe"} <= set(const) or "q_nope" not in inputs:
        return None
    case = MLACase("", (), const.get("page_size", 1), inputs["q_nope"].dtype, const["num_qo_heads"],
                   kv_lora_rank=const["head_dim_ckv"], qk_rope_head_dim=const["head_dim_kpe"])  # fmt: skip
    cases = _cases(definition, case, GROUPS[:3])
    is_extend = "qo_indptr" in inputs
    suspects = {name: each for name, each in SUSPECTS.items() if "KV head" not in name and "swap" not in name}
    like = replace(
        MLA_LIKE, cases=cases, timed=lambda _: cases[-1:], make=partial(with_lse, make_mla), rows=(),
        suspects=suspects if is_extend else MLA_SUSPECTS,
    )  # fmt: skip
    names: dict[str, Read] = {
        "q_nope": partial(latent_part, "q", 0), "q_pe": partial(latent_part, "q", 1),
        "ckv_cache": partial(latent_part, "k", 0), "kpe_cache": partial(latent_part, "k", 1),
    }  # fmt: skip
    return TraceOp(like, {**names, **_places()}, {"output": "out", "lse": LSE})


def _op_of_heads(definition: Definition) -> TraceOp | None:
    """The sizes of heads are those of the last axes, whatever their names are."""
    axes = [definition.inputs[name].shape or () for name in "qkv"]
    if any(len(each) != 3 or not set(each[1:]) <= set(definition.const) for each in axes):
        return None
    (_, num_heads, size), (_, num_kv_heads, _), (_, _, value_size) = axes
    const = definition.const
    heads = const[num_heads], const[num_kv_heads], const[size]
    op = _dense_op(definition, AttentionCase("", (), 1, definition.inputs["q"].dtype, *heads))
    make = partial(_with_value_size, op.like.make, const[value_size])
    suspects = {name: each for name, each in op.like.suspects.items() if "swap" not in name}
    return replace(op, like=replace(op.like, make=make, suspects=suspects))


def _dense_op(definition: Definition, case: AttentionCase) -> TraceOp:
    inputs = definition.inputs
    is_ragged, is_extend = "k_cache" not in inputs, {"qo_indptr", "seq_indptr"} & set(inputs)
    page_size = 1 if is_ragged else definition.const.get("page_size", 1)
    cases = _cases(definition, replace(case, page_size=page_size), GROUPS)
    like = EXTEND_LIKE if is_extend else DECODE_LIKE
    like = replace(
        like, cases=cases, timed=lambda _: cases[-1:], make=partial(with_lse, make_attention),
        rows=() if is_extend or is_ragged else like.rows, paged=() if is_ragged else like.paged,
    )  # fmt: skip
    names: dict[str, Read] = {
        "q": tensor("q"), "k_cache": tensor("k"), "v_cache": tensor("v"),
        "k": partial(_ragged, "k"), "v": partial(_ragged, "v"),
    }  # fmt: skip
    return TraceOp(like, {**names, **_places()}, {"output": "out", "lse": LSE})


def _cases(definition: Definition, case: AttentionCase, groups: Any) -> tuple[AttentionCase, ...]:
    size = case.page_size
    is_full = not set(LAST_PAGE) & set(definition.inputs)
    lengths = tuple(-(-n // size) * size if is_full else n for n in LENGTHS)
    make = partial(_request, definition)
    return tuple(
        replace(case, name=f"{what}, page {size}", requests=tuple(make(lengths[i]) for i in places))
        for what, places in groups
    )


def _request(definition: Definition, length: int) -> tuple[int, int]:
    """Cached tokens, new tokens."""
    if "seq_indptr" in definition.inputs:  # of queries, keys and values
        return 0, length
    new = max(length // 2, 1) if "qo_indptr" in definition.inputs else 1
    return length - new, new


def _places() -> dict[str, Read]:
    """Where queries and KV are, and the scale."""
    last: dict[str, Read] = {name: lambda p: csr_pages(p)[2].to(torch.int32) for name in LAST_PAGE}
    return {
        "qo_indptr": tensor("qo_indptr"), "seq_indptr": tensor("qo_indptr"), "sm_scale": constant("scale"),
        "kv_indptr": lambda p: csr_pages(p)[0], "kv_indices": lambda p: csr_pages(p)[1], **last,
    }  # fmt: skip


def _ragged(name: str, problem: Problem) -> torch.Tensor:
    """The live tokens of all requests, one after another; pages have one token."""
    table, lens = problem["page_table"], problem["lens"].tolist()
    return torch.cat([problem[name][table[i, :n].long(), 0] for i, n in enumerate(lens)])


def _with_value_size(make: Any, size: int, case: Any, takes_scale: bool, seed: int = 0) -> Problem:
    problem: Problem = make(case, takes_scale, seed)
    return problem.with_tensors(v=problem["v"][..., :size].contiguous())
