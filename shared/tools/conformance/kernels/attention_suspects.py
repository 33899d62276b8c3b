"""Known mistakes of paged attention, each computed in float64 from a problem's own tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from diptych.shared.tools.conformance.kernels.problem import Problem, Suspect


def dense(problem: Problem, **change: Any) -> dict[str, torch.Tensor]:
    """Attention in float64 from the problem's own tensors, with a change for each known mistake."""
    q, k, v = inputs_of(problem)
    if change.get("swapped"):
        k, v = v, k
    table, lens = changed_table(problem["page_table"].cpu().long(), change), problem["lens"].tolist()
    starts = problem["qo_indptr"].tolist()
    page_size, group = k.shape[1], q.shape[1] // k.shape[2]
    heads = torch.arange(q.shape[1])
    kv_heads = heads % k.shape[2] if change.get("interleaved_heads") else heads // group
    scale = change.get("scale", problem.constants["scale"])
    if "scale_exponent" in change:
        scale = q.shape[2] ** change["scale_exponent"]
    window = problem.constants["window"] + change.get("window", 0)
    has_window = problem.constants["window"] >= 0 and not change.get("no_window")
    output, lse = q.new_zeros(*q.shape[:2], v.shape[3]), q.new_zeros(q.shape[:2])
    for i, length in enumerate(lens):
        keys, values = (_of_heads(x[table[i]].flatten(0, 1), kv_heads) for x in (k, v))
        new = starts[i + 1] - starts[i]
        if set(change) <= {"lse"} and not has_window and length >= new:
            rows = slice(starts[i], starts[i + 1])
            output[rows], lse[rows] = causal(q[rows], keys[:length], values[:length], scale)
            continue
        for t in range(new):
            seen = num_seen(length, new, t, change.get("mask", ""))
            end = min(seen + change.get("end", 0), len(keys))
            if change.get("whole_pages"):
                end = min(-(-seen // page_size) * page_size, len(keys))
            begin = max(change.get("begin", 0), seen - 1 - window if has_window else 0)
            row = starts[i] + t
            if end <= begin:  # no key is visible: any output of a kernel is allowed
                output[row] = torch.nan
                continue
            scores = torch.einsum("hd,nhd->hn", q[row], keys[begin:end]) * scale
            output[row] = torch.einsum("hn,nhd->hd", scores.softmax(-1), values[begin:end])
            lse[row] = scores.logsumexp(-1) / math.log(2)
            if change.get("unnormalised"):
                output[row] *= (scores - scores.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True)
    return {"out": output, "lse": lse} if change.get("lse") else {"out": output}


def causal(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of all new tokens of a request, and the log of their sums to base 2."""
    is_hidden = torch.ones(len(q), len(keys), dtype=torch.bool).triu(len(keys) - len(q) + 1)
    scores = (torch.einsum("mhd,nhd->hmn", q, keys) * scale).masked_fill(is_hidden, -torch.inf)
    output = torch.einsum("hmn,nhd->mhd", scores.softmax(-1), values)
    return output, scores.logsumexp(-1).T / math.log(2)


def inputs_of(problem: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v in float64. Without v the first `rank` numbers of a row of k are the value."""
    q, k = problem["q"].cpu().double(), problem["k"].cpu().double()
    v = problem["v"].cpu().double() if "v" in problem.tensors else k[..., : problem.constants["rank"]]
    return q, k, v


def rounding_of_scores(problem: Problem) -> float:
    """How far an element of the output may be off when scores are sums in float32, in any order.

    The roundings of a sum of n products are a random walk: they add up to sqrt(n) * 2^-24 * sum(|q_i * k_i|)
    or less (Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019). Scores that
    are off by d_t move the output, sum(p_t * v_t), by sum(p_t * d_t * (v_t - output))."""
    q, k, v = inputs_of(problem)
    kv_heads = torch.arange(q.shape[1]) // (q.shape[1] // k.shape[2])
    starts, lens, largest = problem["qo_indptr"].cpu(), problem["lens"].tolist(), 0.0
    for i, rows in enumerate(q.split(starts.diff().tolist())):
        pages = problem["page_table"][i].cpu().long()
        keys, values = (_of_heads(x[pages].flatten(0, 1)[: lens[i]], kv_heads) for x in (k, v))
        is_seen = torch.ones(len(rows), lens[i], dtype=torch.bool).tril(lens[i] - len(rows))
        scores = torch.einsum("mhd,nhd->hmn", rows, keys) * problem.constants["scale"]
        shares = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
        sizes = torch.einsum("mhd,nhd->hmn", rows.abs(), keys.abs()) * problem.constants["scale"]
        output = torch.einsum("hmn,nhd->hmd", shares, values)
        apart = (values.movedim(1, 0)[:, None] - output[:, :, None]).abs()
        largest = max(largest, float(torch.einsum("hmn,hmnd->hmd", shares * sizes, apart).max()))
    return float(q.shape[2] ** 0.5 * 2.0**-24 * largest)


def _of_heads(rows: torch.Tensor, kv_heads: torch.Tensor) -> torch.Tensor:
    """The rows [num_tokens, kv_heads, size] of each query head; those of one KV head are not copied."""
    return rows.expand(-1, len(kv_heads), -1) if rows.shape[1] == 1 else rows[:, kv_heads]


def changed_table(table: torch.Tensor, change: Mapping[str, Any]) -> torch.Tensor:
    """The page ids [batch, max_pages] that a function with the mistake reads."""
    pages = change.get("pages")
    if pages == "in order":
        return torch.arange(table.shape[1]).repeat(len(table), 1)
    if pages == "of the first":
        return table[:1].expand_as(table)
    if pages == "of the next":
        return table.roll(-1, 0)
    if pages == "one column off":
        return torch.cat((table[:, 1:], table[:, -1:]), dim=1)
    return table


def num_seen(length: int, new: int, t: int, mask: str) -> int:
    """The keys that new token t of `new` sees, in a request of `length` tokens."""
    if mask == "top-left":
        return t + 1
    if mask == "one later":
        return min(length - new + t + 2, length)
    return length if mask == "none" else length - new + t + 1


SUSPECTS: dict[str, Suspect] = {
    "the last token is not seen": partial(dense, end=-1),
    "one token too many is seen": partial(dense, end=1),
    "the last page is read to its end": partial(dense, whole_pages=True),
    "the first token is not seen": partial(dense, begin=1),
    "the page table is ignored: pages are read in order": partial(dense, pages="in order"),
    "every request reads the pages of the first": partial(dense, pages="of the first"),
    "every request reads the pages of the next": partial(dense, pages="of the next"),
    "the page table is read one column too far": partial(dense, pages="one column off"),
    "K and V are swapped": partial(dense, swapped=True),
    "query head h reads KV head h % num_kv_heads, not h // group": partial(dense, interleaved_heads=True),
    "the scale is forgotten": partial(dense, scale=1.0),
    "the scale argument is ignored: head_dim ** -0.5 is used": partial(dense, scale_exponent=-0.5),
    "scores are divided by head_dim, not by its root": partial(dense, scale_exponent=-1.0),
    "the softmax is not divided by its sum": partial(dense, unnormalised=True),
    "the window is one token too long": partial(dense, window=1),
    "the window is one token too short": partial(dense, window=-1),
    "the window is ignored": partial(dense, no_window=True),
    "tokens of a prompt see later tokens": partial(dense, mask="none"),
    "tokens of a prompt see one later token": partial(dense, mask="one later"),
    "the causal mask of a prompt is aligned top-left: cached tokens are not counted": partial(
        dense, mask="top-left"
    ),
}
DECODE_SUSPECTS = {name: suspect for name, suspect in SUSPECTS.items() if "prompt" not in name}
MLA_SUSPECTS = {
    name: suspect
    for name, suspect in DECODE_SUSPECTS.items()
    if "KV head" not in name and "swapped" not in name  # one latent head, whose rows are K and V
}
