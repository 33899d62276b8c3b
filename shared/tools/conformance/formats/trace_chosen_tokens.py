"""`dsa_paged` of FlashInfer Trace: attention to chosen tokens of latent KV, and the indexer that chooses
them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from diptych.shared.tools.conformance.clauses.case import Case
from diptych.shared.tools.conformance.clauses.inputs import Inputs
from diptych.shared.tools.conformance.clauses.tolerance import Tolerance
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
from diptych.shared.tools.conformance.kernels.attention_likes import MLA_LIKE, make_mla
from diptych.shared.tools.conformance.kernels.draw_frequencies import expect_ids
from diptych.shared.tools.conformance.kernels.problem import Like, Problem, Tensors, bytes_of
from diptych.shared.tools.conformance.oracles.mla_batches import MLACase

FP8_NAN = 0x7F
SCALE_BYTES = 4
INDEXER_INPUTS = {"q_index_fp8": "q", "weights": "weights", "seq_lens": "lens", "block_table": "table"}


def chosen_tokens_op(definition: Definition, read: float | None) -> TraceOp | None:
    const = definition.const
    if {"num_qo_heads", "head_dim_ckv", "head_dim_kpe", "topk"} <= set(const):
        return _attention(definition)
    sizes = {"num_index_heads", "index_head_dim", "page_size", "topk"}
    return _indexer(definition) if sizes <= set(const) and "k_index_cache_fp8" in definition.inputs else None


def _attention(definition: Definition) -> TraceOp | None:
    const = definition.const
    topk, page_size = const["topk"], const.get("page_size", 1)
    cases = tuple(
        MLACase(f"{what}, {topk} chosen", tuple((n - 1, 1) for n in lengths), page_size=page_size,
                dtype=definition.inputs["q_nope"].dtype, num_qo_heads=const["num_qo_heads"],
                kv_lora_rank=const["head_dim_ckv"], qk_rope_head_dim=const["head_dim_kpe"])
        for what, lengths in (("1 to 17 tokens", (1, 2, 17)), ("around 128 tokens", (127, 128, 129)),
                              ("more tokens than chosen ones", (topk + 7, topk, topk - 1)))
    )  # fmt: skip
    like = replace(
        MLA_LIKE, name="dsa_paged", cases=cases, timed=lambda _: cases[-1:], more_cases={},
        make=partial(_make_attention, topk), rows=("q", "page_table", "lens"),
    )  # fmt: skip
    names: dict[str, Read] = {
        "q_nope": partial(latent_part, "q", 0), "q_pe": partial(latent_part, "q", 1),
        "ckv_cache": partial(_pages, page_size, 0), "kpe_cache": partial(_pages, page_size, 1),
        "sparse_indices": _indices, "sm_scale": constant("scale"),
    }  # fmt: skip
    return TraceOp(like, names, {"output": "out", "lse": LSE})


def _make_attention(topk: int, case: MLACase, takes_scale: bool, seed: int = 0) -> Problem:
    """Attention with pages of one token: a row of the page table has the chosen ones, at most `topk`."""
    problem = with_lse(make_mla, case, True, seed)
    inputs, table = Inputs(case.seed + seed + 5), problem["page_table"].long()
    slots = (table[:, :, None] * case.page_size + torch.arange(case.page_size, device=table.device)).flatten(
        1
    )
    chosen = torch.zeros(len(table), topk, dtype=torch.int32, device=table.device)
    for i, length in enumerate(case.seq_lens):
        picked = inputs.permutation(length)[:topk]
        chosen[i, : len(picked)] = slots[i, picked].int()
    k = problem["k"].flatten(0, 1)[:, None]
    return problem.with_tensors(k=k, page_table=chosen, lens=problem["lens"].clamp(max=topk))


def _pages(page_size: int, index: int, problem: Problem) -> torch.Tensor:
    whole = problem["k"].view(-1, page_size, 1, problem["k"].shape[-1])
    return latent_part("k", index, replace(problem, tensors={**problem.tensors, "k": whole}))


def _indices(problem: Problem) -> torch.Tensor:
    """The chosen slots [num_tokens, topk], behind them -1."""
    table = problem["page_table"]
    is_chosen = torch.arange(table.shape[1], device=table.device) < problem["lens"][:, None]
    return torch.where(is_chosen, table, -1)


def _indexer(definition: Definition) -> TraceOp:
    const = definition.const
    lengths = ((1, 2, 17), (127, 128, 129), (const["topk"] + 7, const["topk"], 3 * const["topk"]))
    cases = tuple(
        Case(f"{min(each)} to {max(each)} tokens", lengths=each, seed=i) for i, each in enumerate(lengths)
    )
    like = Like(
        "dsa_paged", "The topk tokens with the largest scores: sums of weights times relu(q k).", "tokens",
        cases, lambda _: cases[-1:], partial(_make_indexer, const), INDEXER_SUSPECTS,
        rows=("q", "weights", "lens", "table"),
    )  # fmt: skip
    names: dict[str, Read] = {name: tensor(mine) for name, mine in INDEXER_INPUTS.items()}
    names["k_index_cache_fp8"] = _packed
    return TraceOp(like, names, {"topk_indices": "scores"}, {"scores": _scores_of})


def _make_indexer(const: dict[str, int], case: Case, takes_scale: bool, seed: int = 0) -> Problem:
    """q float8 [batch, heads, size]; keys float8 [num_pages, page_size, size] with scales float32; weights
    float32 [batch, heads]; lens, table [batch, max_pages] int32. Memory of no token holds NaN."""
    inputs = Inputs(case.seed + 1000 * seed)
    heads, size, page_size = const["num_index_heads"], const["index_head_dim"], const["page_size"]
    batch, counts = len(case.lengths), [-(-n // page_size) for n in case.lengths]
    num_pages = sum(counts) + 2
    order = inputs.permutation(num_pages - 1)
    q = inputs.normal(batch, heads, size).to(torch.float8_e4m3fn)
    keys = inputs.normal(num_pages, page_size, size).to(torch.float8_e4m3fn)
    scales = 0.5 + inputs.uniform(num_pages, page_size)
    table = torch.full((batch, max(counts)), num_pages - 1, device=q.device)
    is_live = torch.zeros(num_pages, page_size, dtype=torch.bool, device=q.device)
    start = 0
    for i, (length, count) in enumerate(zip(case.lengths, counts)):
        table[i, :count] = pages = order[start : start + count]
        places = torch.arange(count * page_size, device=q.device).view(count, page_size)
        is_live[pages] = places < length
        start += count
    keys.view(torch.uint8)[~is_live] = FP8_NAN
    scales[~is_live] = torch.nan
    tensors = {
        "q": q, "keys": keys, "scales": scales, "weights": inputs.normal(batch, heads),
        "lens": torch.tensor(case.lengths, device=q.device).int(), "table": table.int(),
    }  # fmt: skip
    flops = 2.0 * sum(case.lengths) * heads * size
    return Problem(
        case.name, tensors, {"topk": const["topk"]}, _best, "gemm", torch.float32, max(case.lengths),
        bytes_of(*tensors.values()), flops, limit=_limit,
    )  # fmt: skip


def _limit(expected: Tensors) -> Tolerance:
    size = max(float(each.square().mean().sqrt()) for each in expected.values())
    reason = "FP8 tensor cores keep about 14 bits of a sum: tokens whose scores are as near may change places"
    return Tolerance(1e-3 * size, 1e-3, 1e-3, reason)


def _packed(problem: Problem) -> torch.Tensor:
    """int8 [num_pages, page_size, 1, size + 4]: the keys of a page, then its scales."""
    keys, scales = problem["keys"], problem["scales"]
    num_pages, page_size, size = keys.shape
    raw = [each.contiguous().view(torch.uint8).view(num_pages, -1) for each in (keys, scales)]
    return torch.cat(raw, 1).view(torch.int8).view(num_pages, page_size, 1, size + SCALE_BYTES)


def _scores(problem: Problem, row: int, mistake: str = "") -> tuple[torch.Tensor, torch.Tensor]:
    """The slots of the tokens of a sequence, and their scores in float64."""
    length, page_size = int(problem["lens"][row]), problem["keys"].shape[1]
    pages = problem["table"][row].cpu().long()
    slots = (pages[:, None] * page_size + torch.arange(page_size)).flatten()[:length]
    keys = problem["keys"].cpu().double().flatten(0, 1)[slots]
    if mistake != "scales":
        keys = keys * problem["scales"].cpu().double().flatten()[slots, None]
    products = problem["q"][row].cpu().double() @ keys.T
    weights = problem["weights"][row].cpu().double()
    if mistake == "weights":
        weights = torch.ones_like(weights)
    return slots, weights @ (products if mistake == "relu" else products.relu())


def _best(problem: Problem, mistake: str = "") -> dict[str, torch.Tensor]:
    """The exact scores of the tokens with the largest scores; with a mistake, with the largest wrong ones."""
    topk = problem.constants["topk"]
    ids = torch.full((len(problem["lens"]), topk), -1)
    for i in range(len(ids)):
        slots, scores = _scores(problem, i, mistake)
        best = scores.topk(min(topk, len(slots))).indices
        ids[i, : len(best)] = slots[best]
    return {"scores": _sorted_scores(problem, ids)}


def _scores_of(problem: Problem, ids: Any) -> torch.Tensor:
    """float32, as the check compares results."""
    expect_ids(ids, (len(problem["lens"]), problem.constants["topk"]))
    return _sorted_scores(problem, ids.cpu().long()).float().to(problem.device)


def _sorted_scores(problem: Problem, ids: torch.Tensor) -> torch.Tensor:
    """The exact scores [batch, topk] of chosen slots, the largest first, zeros behind them; NaN for a row
    with a slot that is not of the sequence, twice a slot, or another number of slots."""
    found = torch.zeros(ids.shape, dtype=torch.float64)
    for i, row in enumerate(ids):
        slots, scores = _scores(problem, i)
        of_slot = dict(zip(slots.tolist(), scores.tolist()))
        chosen = [each for each in row.tolist() if each != -1]
        is_right = len(set(chosen)) == len(chosen) == min(len(row), len(slots)) and set(chosen) <= set(
            of_slot
        )
        values = sorted((of_slot[each] for each in chosen), reverse=True) if is_right else []
        found[i, : len(values)] = torch.tensor(values, dtype=torch.float64)
        if not is_right:
            found[i] = torch.nan
    return found


INDEXER_SUSPECTS = {
    "negative products count: relu is forgotten": partial(_best, mistake="relu"),
    "the weights of the heads are forgotten": partial(_best, mistake="weights"),
    "the scales of the keys are forgotten": partial(_best, mistake="scales"),
}
