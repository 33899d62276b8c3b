"""Planted bugs: functions with one mistake each, and what the check must say about them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from docs.examples.my_kernels import paged_decode, rms_norm, rms_norm_eps_outside, rope, silu_and_mul
from tests.kernel_check.right import add_norm, extend, mla, moe, w8a8
from tests.kernel_check.wrong_draws import WRONG_DRAWS
from tests.planted import Bugs


def row_of_each(counts: Any) -> Any:
    """[1, 2] -> [0, 1, 1]"""
    return torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)


def heads_interleaved(q: Any, k: Any, v: Any, table: Any, lens: Any) -> Any:
    n = q.shape[1] // k.shape[2]
    order = (
        torch.arange(q.shape[1], device=q.device).view(n, k.shape[2]).T.flatten()
    )  # heads of one KV head together
    out = torch.empty_like(q)
    out[:, order] = paged_decode(q[:, order], k, v, table, lens)
    return out


def in_order(table: Any) -> Any:
    return torch.arange(table.shape[1], device=table.device).expand_as(table)


def bfloat16_scores(q: Any, k: Any, v: Any, table: Any, lens: Any) -> Any:
    out = torch.empty_like(q)
    for row, n in enumerate(lens.tolist()):
        keys, values = (x[table[row]].flatten(0, 1)[:n].bfloat16() for x in (k, v))
        keys, values = (x.repeat_interleave(q.shape[1] // k.shape[2], dim=1) for x in (keys, values))
        scores = torch.einsum("hd,nhd->hn", q[row].bfloat16(), keys) * q.shape[2] ** -0.5
        out[row] = torch.einsum("hn,nhd->hd", scores.softmax(-1), values)
    return out


def dead_slots_times_zero(q: Any, k: Any, v: Any, table: Any, lens: Any) -> Any:
    """The weight of a masked token is 0, but 0 * NaN is NaN."""
    out, group = torch.empty_like(q), q.shape[1] // k.shape[2]
    for row, n in enumerate(lens.tolist()):
        keys, values = (x[table[row]].flatten(0, 1).float() for x in (k, v))
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
        scores = torch.einsum("hd,nhd->hn", q[row].float(), keys) * q.shape[2] ** -0.5
        scores[:, n:] = -torch.inf
        out[row] = torch.einsum("hn,nhd->hd", scores.softmax(-1), values)
    return out


def last_row_not_written(q: Any, k: Any, v: Any, table: Any, lens: Any) -> Any:
    out = torch.empty_like(q)
    out[:-1] = paged_decode(q, k, v, table, lens)[:-1]
    return out


def query_scaled_in_place(q: Any, k: Any, v: Any, table: Any, lens: Any) -> Any:
    out = paged_decode(q, k, v, table, lens)
    q *= 2
    return out


def strides_ignored(q: Any, k: Any, v: Any, table: Any, lens: Any) -> Any:
    dense = torch.as_strided(q, q.shape, (q.shape[1] * q.shape[2], q.shape[2], 1))
    return paged_decode(dense, k, v, table, lens)


def bfloat16_mean(x: Any, shape: Any, weight: Any, eps: float) -> Any:
    mean = x.bfloat16().square().mean(-1, keepdim=True)
    return (x.float() * torch.rsqrt(mean.float() + eps) * weight.float()).to(x.dtype)


def one_element_beyond(out: Any, x: Any) -> None:
    out.copy_(silu_and_mul(x))
    torch.as_strided(out, (out.numel() + 1,), (1,), out.storage_offset())[-1] = 0


def fails_at_times(x: Any, calls: list[Any] = []) -> Any:  # noqa: B006
    calls.append(x)
    if len(calls) == 2:
        raise RuntimeError("the second call")
    return silu_and_mul(x)


def never_returns(x: Any) -> Any:
    while True:
        pass


def next_page(q: Any, k: Any, v: Any, table: Any, lens: Any) -> Any:
    return paged_decode(q, k, v, torch.cat((table[:, 1:], table[:, -1:]), 1), lens)


def extend_with(visible: Callable[..., Any]) -> Callable[..., Any]:
    """Each new token as a row of its own, which sees visible(cached tokens, place among the new ones, tokens
    of its request)."""

    def call(q: Any, k: Any, v: Any, table: Any, lens: Any, starts: Any) -> Any:
        new = starts.diff()
        rows = row_of_each(new)
        place = torch.arange(len(q), device=q.device) - starts[rows]
        return paged_decode(q, k, v, table[rows], visible((lens - new)[rows], place, lens[rows]))

    return call


def last_column_zero(x: Any, shape: Any, weight: Any, eps: float) -> Any:
    y = rms_norm(x, shape, weight, eps)
    if x.shape[1] >= 1000:
        y[:, -1] = 0
    return y


def asserts_dense(x: Any, shape: Any, weight: Any, eps: float) -> Any:
    assert x.is_contiguous(), "x must be contiguous"
    return rms_norm(x, shape, weight, eps)


def dense_cos_and_sin(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    """Takes the memory behind the first element for the whole tensor."""
    cos, sin = (torch.as_strided(x, x.shape, (x.shape[1], 1), x.storage_offset()) for x in (cos, sin))
    return rope(q, k, cos, sin)


def rope_pairs(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    cos, sin = cos[:, None], sin[:, None]
    results = []
    for x in (q, k):
        n = 2 * cos.shape[-1]
        a, b = x[..., :n:2].float(), x[..., 1:n:2].float()
        y = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        results.append(torch.cat((y.to(x.dtype), x[..., n:]), -1))
    return tuple(results)


_ROWS: dict[str, tuple[str, Callable[..., Any], str]] = {
    **WRONG_DRAWS,
    "last token": (
        "attention.decode",
        lambda q, k, v, t, n: paged_decode(q, k, v, t, (n - 1).clamp(min=1)),
        "the last token is not seen",
    ),
    "one too many": (
        "attention.decode",
        lambda q, k, v, t, n: paged_decode(q, k, v, t, (n + 1).clamp(max=t.shape[1] * k.shape[1])),
        "one token too many is seen",
    ),
    "whole pages": (
        "attention.decode",
        lambda q, k, v, t, n: paged_decode(q, k, v, t, (n + k.shape[1] - 1) // k.shape[1] * k.shape[1]),
        "the last page is read to its end",
    ),
    "page table": (
        "attention.decode",
        lambda q, k, v, t, n: paged_decode(q, k, v, in_order(t), n),
        "the page table is ignored",
    ),
    "next pages": (
        "attention.decode",
        lambda q, k, v, t, n: paged_decode(q, k, v, t.roll(-1, 0), n),
        "every request reads the pages of the next",
    ),
    "next column": ("attention.decode", next_page, "read one column too far"),
    "K and V": ("attention.decode", lambda q, k, v, t, n: paged_decode(q, v, k, t, n), "K and V are swapped"),
    "scale": (
        "attention.decode",
        lambda q, k, v, t, n: paged_decode(q * q.shape[2] ** 0.5, k, v, t, n),
        "the scale is forgotten",
    ),
    "heads": ("attention.decode", heads_interleaved, "h % num_kv_heads"),
    "bfloat16 scores": ("attention.decode", bfloat16_scores, "precision is lost"),
    "dead slots": ("attention.decode", dead_slots_times_zero, "memory is read that is not live"),
    "unwritten": ("attention.decode", last_row_not_written, "are not written"),
    "input": ("attention.decode", query_scaled_in_place, "an input is modified"),
    "strides": ("attention.decode", strides_ignored, "strides are ignored"),
    "raises": ("attention.decode", lambda q, k, v, t: q, "raises TypeError"),
    "shape": ("attention.decode", lambda q, k, v, t, n: q.flatten(1), "shape of out"),
    "window": (
        "attention.decode",
        lambda q, k, v, t, n, window_left=-1: paged_decode(q, k, v, t, n, window_left + (window_left >= 0)),
        "the window is one token too long",
    ),
    "short window": (
        "attention.decode",
        lambda q, k, v, t, n, window_left=-1: paged_decode(
            q, k, v, t, n, max(window_left - 1, 0) if window_left >= 0 else -1
        ),
        "the window is one token too short",
    ),
    "no mask": (
        "attention.extend",
        lambda q, k, v, t, n, p: paged_decode(
            q, k, v, *(x[row_of_each(p.diff())] for x in (t, n))
        ),
        "tokens of a prompt see later tokens",
    ),
    "one later": (
        "attention.extend",
        extend_with(lambda cached, place, length: torch.minimum(cached + place + 2, length)),
        "see one later token",
    ),
    "top-left": (
        "attention.extend",
        extend_with(lambda cached, place, length: place + 1),
        "aligned top-left",
    ),
    "first pages": (
        "attention.extend",
        lambda q, k, v, t, n, p: extend(q, k, v, t[:1].expand_as(t), n, p),
        "every request reads the pages of the first",
    ),
    "latent scale": (
        "mla.decode",
        lambda a, b, k, r, t, n, s: mla(a, b, k, r, t, n, 1.0),
        "the scale is forgotten",
    ),
    "latent tokens": (
        "mla.decode",
        lambda a, b, k, r, t, n, s: mla(a, b, k, r, t, (n - 1).clamp(min=1), s),
        "the last token is not seen",
    ),
    "eps": ("rms_norm", rms_norm_eps_outside, "eps is added outside the root"),
    "no eps": ("rms_norm", lambda x, s, w, eps: rms_norm(x, s, w, 0.0), "eps is left out"),
    "other eps": ("rms_norm", lambda x, s, w, eps: rms_norm(x, s, w, 1e-6), "eps is 1e-6, not the argument"),
    "last column": ("rms_norm", last_column_zero, "few elements are wrong: 4 of 4000 of out"),
    "asserts": (
        "rms_norm",
        asserts_dense,
        "strided rows: raises AssertionError: x must be contiguous; refuse with a ValueError",
    ),
    "layer norm": (
        "rms_norm",
        lambda x, s, w, eps: torch.nn.functional.layer_norm(x, s, w, None, eps),
        "the mean is subtracted",
    ),
    "gemma": ("rms_norm", lambda x, s, w, eps: rms_norm(x, s, 1 + w.float(), eps), "as in Gemma"),
    "bfloat16 mean": ("rms_norm", bfloat16_mean, "precision is lost"),
    "residual": (
        "add_rms_norm",
        lambda x, r, w, eps: (rms_norm(x, (), w, eps), x + r),
        "the residual is not added",
    ),
    "residual returned": (
        "add_rms_norm",
        lambda x, r, w, eps: add_norm(x, r, w, eps)[0],
        "what is returned",
    ),
    "old residual": (
        "add_rms_norm",
        lambda x, r, w, eps: (add_norm(x, r, w, eps)[0], r.clone()),
        "the residual is not updated",
    ),
    "swapped results": (
        "add_rms_norm",
        lambda x, r, w, eps: add_norm(x, r, w, eps)[::-1],
        "the results are swapped",
    ),
    "dense cos": ("rope", dense_cos_and_sin, "strides are ignored"),
    "pairs": ("rope", rope_pairs, "dimension 2i is paired with 2i + 1"),
    "direction": ("rope", lambda q, k, c, s: rope(q, k, c, -s), "the other direction"),
    "k": ("rope", lambda q, k, c, s: (rope(q, k, c, s)[0], k.clone()), "k is not turned"),
    "halves": (
        "silu_and_mul",
        lambda x: silu_and_mul(torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1)),
        "silu is applied to the second half",
    ),
    "neighbours": (
        "silu_and_mul",
        lambda x: silu_and_mul(torch.cat((x[:, ::2], x[:, 1::2]), dim=-1)),
        "neighbours",
    ),
    "weights": (
        "moe",
        lambda x, a, b, w, i: moe(x, a, b, w / w.sum(1, keepdim=True), i),
        "normalised again",
    ),
    "unchosen": (
        "moe",
        lambda x, a, b, w, i: moe(x, a, b, w, i) + 0 * a.sum().to(x.dtype),
        "memory is read that is not live",
    ),
    "token scales": ("w8a8", lambda a, b, s, t, d: w8a8(a, b, s[:1], t, d), "the scale of the first"),
    "channel scales": ("w8a8", lambda a, b, s, t, d: w8a8(a, b, s, t * 0 + 1, d), "scales of the output"),
}  # fmt: skip
"""name -> operation, function in the convention of torch, what must be in the verdict"""
WRONG = Bugs("kernel", finder="check kernel")
for _name, (_like, _function, _says) in _ROWS.items():
    WRONG.add(_name, _function, where=_like, says=_says)
