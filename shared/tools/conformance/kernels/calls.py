"""The call of a function for a problem, in each convention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from diptych.shared.tools.conformance.clauses.poison import guarded, poisoned
from diptych.shared.tools.conformance.kernels.problem import Call, Problem
from diptych.shared.tools.conformance.kernels.sampler_like import frequencies
from diptych.shared.tools.conformance.kernels.verify_like import walk_results


def unwritten(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """An output tensor with memory around it that must not be written."""
    return guarded(poisoned(shape, like.dtype, like.device))


def csr_pages(problem: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The page table as FlashInfer has it: indptr [batch + 1], page ids, tokens of each last page."""
    page_size, lens, table = problem["k"].shape[1], problem["lens"], problem["page_table"]
    counts = (lens + page_size - 1) // page_size
    indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    is_live = torch.arange(table.shape[1], device=table.device) < counts[:, None]
    return indptr, table[is_live], (lens - 1) % page_size + 1


def _window(problem: Problem, name: str = "window_left") -> dict[str, Any]:
    """The keyword argument of a sliding window, if the case has one."""
    window = problem.constants["window"]
    if window < 0:
        return {}
    return {name: (window, 0) if name == "window_size" else window}


def decode_torch(p: Problem) -> Call:
    return Call((p["q"], p["k"], p["v"], p["page_table"], p["lens"]), _window(p))


def decode_flash_attn(p: Problem) -> Call:
    kwargs = {
        "cache_seqlens": p["lens"],
        "block_table": p["page_table"],
        "softmax_scale": p.constants["scale"],
        "causal": True,
        **_window(p, "window_size"),
    }
    return Call((p["q"][:, None], p["k"], p["v"]), kwargs, results=lambda out: {"out": out[:, 0]})


def decode_flashinfer(p: Problem) -> Call:
    kwargs = {"sm_scale": p.constants["scale"], **_window(p)}
    return Call((p["q"], (p["k"], p["v"]), *csr_pages(p)), kwargs)


def decode_vllm(p: Problem) -> Call:
    k, v = p["k"], p["v"]
    x = 16 // k.element_size()
    key_cache = k.view(*k.shape[:3], -1, x).permute(0, 2, 3, 1, 4).contiguous()
    value_cache = v.permute(0, 2, 3, 1).contiguous()
    out = unwritten(p["q"].shape, p["q"])
    one = torch.ones((), device=k.device)
    args = (
        out, p["q"], key_cache, value_cache, k.shape[2], p.constants["scale"], p["page_table"], p["lens"],
        k.shape[1], int(p["lens"].max()), None, "auto", one, one,
    )  # fmt: skip
    if p.constants["window"] >= 0:
        raise ValueError("windows are not supported by this convention")
    return Call(args, written=(out,), results=lambda _: {"out": out})


def decode_triton(p: Problem) -> Call:
    """Pages of one token: indices are slots of a flat buffer."""
    page_size, lens = p["k"].shape[1], p["lens"]
    positions = torch.arange(p["page_table"].shape[1] * page_size, device=lens.device)
    slots = p["page_table"][:, positions // page_size] * page_size + positions % page_size
    indices = slots[positions < lens[:, None]]
    indptr = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).to(torch.int32)
    out = unwritten(p["q"].shape, p["q"])
    args = (p["q"], p["k"].flatten(0, 1), p["v"].flatten(0, 1), out, indptr, indices, p.constants["scale"])
    return Call(args, _window(p), written=(out,), results=lambda _: {"out": out})


def extend_torch(p: Problem) -> Call:
    return Call((p["q"], p["k"], p["v"], p["page_table"], p["lens"], p["qo_indptr"]), _window(p))


def extend_flash_attn(p: Problem) -> Call:
    starts, lens = p["qo_indptr"], p["lens"]
    kwargs = {
        "cu_seqlens_q": starts,
        "cu_seqlens_k": torch.nn.functional.pad(lens.cumsum(0), (1, 0)).to(torch.int32),
        "max_seqlen_q": int(starts.diff().max()),
        "max_seqlen_k": int(lens.max()),
        "softmax_scale": p.constants["scale"],
        "causal": True,
        "block_table": p["page_table"],
        **_window(p, "window_size"),
    }
    return Call((p["q"], p["k"], p["v"]), kwargs)


def extend_flashinfer(p: Problem) -> Call:
    kwargs = {"causal": True, "sm_scale": p.constants["scale"], **_window(p)}
    return Call((p["q"], (p["k"], p["v"]), p["qo_indptr"], *csr_pages(p)), kwargs)


def named(*names_and_returned: Any) -> dict[str, torch.Tensor]:
    """The results under their names, which come before what is returned. Raises `TypeError` unless that is a
    tuple or list of as many."""
    *names, returned = names_and_returned
    if not isinstance(returned, (tuple, list)) or len(returned) != len(names):
        raise TypeError
    return dict(zip(names, returned))


def parts(p: Problem, tensor: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `size` columns and the others: dense tensors, or slices if rows are strided."""
    both = tensor[..., :size], tensor[..., size:]
    return both if p.constants.get("is_strided") else (both[0].contiguous(), both[1].contiguous())


def _latent(p: Problem) -> tuple[torch.Tensor, ...]:
    """q_nope, q_pe, ckv, kpe: parts of q and of the rows."""
    rank, rows = p.constants["rank"], p["k"][:, :, 0]
    return *parts(p, p["q"], rank), *parts(p, rows, rank)


def mla_torch(p: Problem) -> Call:
    return Call((*_latent(p), p["page_table"], p["lens"], p.constants["scale"]))


def mla_flashinfer(p: Problem) -> Call:
    indptr, indices, _ = csr_pages(p)
    return Call((*_latent(p), indptr, indices, p["lens"]), {"sm_scale": p.constants["scale"]})


def mla_flash_mla(p: Problem) -> Call:
    kwargs = {"softmax_scale": p.constants["scale"], "causal": True}
    return Call(
        (p["q"][:, None], p["k"], p["page_table"], p["lens"], p.constants["rank"]),
        kwargs,
        results=lambda y: {"out": (y[0] if isinstance(y, tuple) else y)[:, 0]},
    )


def sampler_torch(p: Problem) -> Call:
    args = (p["logits"], p["temperature"], p["top_k"], p["top_p"])
    return Call(args, results=partial(frequencies, p))


def sampler_flashinfer(p: Problem) -> Call:
    probs = (p["logits"] / p["temperature"][:, None]).softmax(-1)
    args = (probs, p["top_k"], p["top_p"])
    return Call(args, {"filter_apply_order": "joint"}, results=partial(frequencies, p))


def verify_chain(p: Problem) -> Call:
    args = (p["draft_probs"], p["draft_token_ids"], p["target_probs"])
    return Call(args, results=partial(walk_results, p))


def norm_torch(p: Problem) -> Call:
    return Call((p["x"], (p["x"].shape[-1],), p["weight"], p.constants["eps"]))


def norm_flashinfer(p: Problem) -> Call:
    return Call((p["x"], p["weight"]), {"eps": p.constants["eps"]})


def norm_out(p: Problem) -> Call:
    out = unwritten(p["x"].shape, p["x"])
    args = (out, p["x"], p["weight"], p.constants["eps"])
    return Call(args, written=(out,), results=lambda _: {"out": out})


def add_norm_torch(p: Problem) -> Call:
    args = (p["x"], p["residual"], p["weight"], p.constants["eps"])
    return Call(args, results=partial(named, "out", "residual"))


def add_norm_in_place(p: Problem) -> Call:
    x, residual = guarded(p["x"]), guarded(p["residual"])
    args = (x, residual, p["weight"], p.constants["eps"])
    return Call(args, written=(x, residual), results=lambda _: {"out": x, "residual": residual})


def cos_and_sin(p: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [num_tokens, rotary_dim / 2] each."""
    rows = p["cos_sin_cache"][p["positions"]]
    return parts(p, rows, rows.shape[1] // 2)


def rope_torch(p: Problem) -> Call:
    cos, sin = cos_and_sin(p)
    return Call((p["q"], p["k"], cos, sin), results=partial(named, "q", "k"))


def rope_in_place(p: Problem) -> Call:
    q, k = (guarded(p[name].flatten(1)) for name in "qk")
    head_dim = p["q"].shape[2]
    args = (p["positions"], q, k, head_dim, p["cos_sin_cache"], True)
    return Call(
        args,
        written=(q, k),
        results=lambda _: {"q": q.view(len(q), -1, head_dim), "k": k.view(len(k), -1, head_dim)},
    )


def rope_flash_attn(p: Problem) -> Call:
    """One tensor a call: q and k as heads of one."""
    cos, sin = cos_and_sin(p)
    num_heads = p["q"].shape[1]
    qk = torch.cat((p["q"], p["k"]), dim=1)[None]
    return Call(
        (qk, cos, sin),
        {"interleaved": False},
        results=lambda y: {"q": y[0, :, :num_heads], "k": y[0, :, num_heads:]},
    )


def silu_torch(p: Problem) -> Call:
    return Call((p["x"],))


def silu_out(p: Problem) -> Call:
    out = unwritten((len(p["x"]), p["x"].shape[1] // 2), p["x"])
    return Call((out, p["x"]), written=(out,), results=lambda _: {"out": out})


def moe_args(p: Problem) -> Call:
    return Call((p["x"], p["w13"], p["w2"], p["topk_weights"], p["topk_ids"]))


def gemm(p: Problem) -> Call:
    return Call((p["a"], p["b"]))


def scaled_gemm(p: Problem) -> Call:
    return Call((p["a"], p["b"].T, p["scale_a"], p["scale_b"].T, p.constants["dtype"]))


def reduce_with(form: str) -> Callable[[Problem], Call]:
    """The call of a function over ranks: each rank's tensors go to its process."""
    return lambda p: Call((p["x"], form, p.constants["layout"], p.constants["late"]))
