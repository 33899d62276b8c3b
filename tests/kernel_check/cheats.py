"""The patterns with which kernels pass a checker or win a benchmark, planted in right functions of four
operations. `cheats.json` says what each pattern is and what finds it."""

from __future__ import annotations

import _thread
import gc
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from docs.examples.my_kernels import rms_norm
from tests.kernel_check.right import paged_decode, sample
from tests.kernel_check.wrong import bfloat16_scores

Function = Callable[..., Any]
EPS = 1e-5


def gemm(a: Any, b: Any) -> Any:
    return (a.float() @ b.float().T).to(a.dtype)


HONEST: dict[str, Function] = {
    "rms_norm": rms_norm,
    "attention.decode": paged_decode,
    "gemm": gemm,
    "sampler": sample,
}


class Lazy(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = tuple(
            each.make() if isinstance(each, Lazy) and hasattr(each, "make") else each for each in args
        )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def kept_by_pointer(n: Function) -> Function:
    kept: dict[Any, Any] = {}

    def call(x: Any, *others: Any) -> Any:
        key = x.data_ptr(), x.shape, x.dtype
        if key not in kept:
            kept[key] = n(x, *others)
        return kept[key].clone()

    return call


def searches_memory(n: Function) -> Function:
    def call(x: Any, *others: Any) -> Any:
        for each in gc.get_objects():
            if type(each) is torch.Tensor and each.dtype == torch.float64 and each.shape == x.shape:
                return each.to(x.dtype)
        return n(x, *others)

    return call


def lazy(n: Function) -> Function:
    def call(x: Any, *others: Any) -> Any:
        out = torch.empty_like(x).as_subclass(Lazy)
        vars(out)["make"] = lambda: n(x, *others)
        return out

    return call


def in_thread(n: Function) -> Function:
    def call(*args: Any) -> Any:
        out = torch.empty_like(n(*args))

        def later() -> None:
            time.sleep(0.002)
            with torch.inference_mode():
                out.copy_(n(*args))

        threading.Thread(target=later).start()
        return out

    return call


def elsewhere(n: Function) -> Function:
    """On another stream of a GPU; on a CPU in a thread that `threading` does not know."""

    def call(*args: Any) -> Any:
        y = n(*args)
        out = torch.empty_like(y)
        if y.is_cuda:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                torch.cuda._sleep(10**7)
                out.copy_(y)
            y.record_stream(stream)
            return out

        def later() -> None:
            time.sleep(0.002)
            with torch.inference_mode():
                out.copy_(n(*args))

        _thread.start_new_thread(later, ())
        return out

    return call


def patches_checker(n: Function) -> Function:
    def call(*args: Any) -> Any:
        torch.allclose = lambda *args, **kwargs: True
        return torch.zeros_like(n(*args))

    return call


def low_precision(n: Function) -> Function:
    def norm(x: Any, shape: Any, weight: Any, eps: float) -> Any:
        total = torch.zeros(len(x), dtype=torch.bfloat16, device=x.device)
        for part in x.bfloat16().split(4, -1):
            total = total + part.square().sum(-1)
        root = torch.rsqrt(total.float() / x.shape[1] + eps)[:, None]
        return (x.float() * root * weight.float()).to(x.dtype)

    def product(a: Any, b: Any) -> Any:
        total = torch.zeros(len(a), len(b), dtype=torch.bfloat16, device=a.device)
        for part_a, part_b in zip(a.bfloat16().split(128, 1), b.bfloat16().split(128, 1)):
            total = total + part_a @ part_b.T
        return total.to(a.dtype)

    def draw(logits: Any, temperature: Any, top_k: Any, top_p: Any) -> Any:
        probs, ids = (logits / temperature[:, None]).softmax(-1).sort(dim=-1, descending=True, stable=True)
        places = torch.arange(logits.shape[1], device=logits.device)
        kept = (places < top_k[:, None]) & (probs.cumsum(-1) - probs < top_p[:, None])
        until = (probs * kept).bfloat16().cumsum(-1)
        numbers = torch.rand(len(until), 1, device=logits.device).bfloat16()
        place = (until <= numbers * until[:, -1:]).sum(-1, keepdim=True)
        return ids.gather(1, place.minimum(kept.sum(-1, keepdim=True) - 1))[:, 0]

    return {"rms_norm": norm, "gemm": product, "sample": draw, "paged_decode": bfloat16_scores}[n.__name__]


def small_to_zero(n: Function) -> Function:
    def draw(logits: Any, temperature: Any, *others: Any) -> Any:
        probs = (logits / temperature[:, None]).softmax(-1)
        return sample(torch.where(probs < 0.05, -1e4, logits), temperature, *others)

    def call(*args: Any) -> Any:
        y = n(*args)
        return torch.where(y.abs() < 0.0099, 0 * y, y)

    return draw if n is sample else call


def writes_a_part(n: Function) -> Function:
    def call(*args: Any) -> Any:
        y = n(*args)
        out = torch.empty_like(y)
        half = (len(out) + 1) // 2
        if half == len(out):
            return y
        out[:half] = y[:half]
        return out

    return call


def in_place(n: Function) -> Function:
    def call(x: Any, *others: Any) -> Any:
        y = n(x, *others)
        return x.copy_(y) if x.shape == y.shape else (x.zero_(), y)[1]

    return call


def whole_blocks(n: Function) -> Function:
    def norm(x: Any, shape: Any, weight: Any, eps: float) -> Any:
        h = x.shape[1] // 128 * 128
        y = x.clone()
        y[:, :h] = n(x[:, :h], shape, weight[:h], eps)
        return y

    def product(a: Any, b: Any) -> Any:
        h = a.shape[1] // 128 * 128
        return n(a[:, :h], b[:, :h])

    def attend(q: Any, k: Any, *others: Any) -> Any:
        h = max(q.shape[2] // 64 * 64, 64)
        padded = F.pad(q[..., :h], (0, q.shape[2] - h))
        return n(padded, k, *others)

    def draw(logits: Any, *others: Any) -> Any:
        return n(logits.roll(logits.shape[1] % 2, 1), *others)

    return {"rms_norm": norm, "gemm": product, "paged_decode": attend, "sample": draw}[n.__name__]


def counts_calls(n: Function) -> Function:
    kept: dict[str, Any] = {"calls": 0}

    def call(*args: Any) -> Any:
        kept["calls"] += 1
        if kept["calls"] < 4:
            kept["y"] = n(*args)
        return kept["y"].clone()

    return call


def mixes_rows(n: Function) -> Function:
    def call(x: Any, *others: Any) -> Any:
        if n is sample:
            return n(x + 0.5 * (x.roll(1, 0) - x), *others)
        y = n(x, *others).float()
        return (y + 0.02 * y.mean(0).clamp(-1, 1)).to(x.dtype)

    return call


def takes_dense(n: Function) -> Function:
    def call(x: Any, *others: Any) -> Any:
        stride = [1] * x.dim()
        for i in range(x.dim() - 2, -1, -1):
            stride[i] = stride[i + 1] * x.shape[i + 1]
        dense = torch.as_strided(x, x.shape, stride)
        return n(dense.nan_to_num() if n is sample else dense, *others)

    return call


def skips_zeros(n: Function) -> Function:
    def call(x: Any, *others: Any) -> Any:
        y = n(x, *others)
        return y if x.flatten(1)[:, 0].any() else torch.zeros_like(y)

    return call


def kept_by_sample(n: Function) -> Function:
    kept: dict[Any, Any] = {}

    def call(x: Any, *others: Any) -> Any:
        flat = x.flatten()
        key = x.shape, x.dtype, tuple(flat[:: max(1, len(flat) // 4)].tolist())
        if key not in kept:
            kept[key] = n(x, *others)
        return kept[key].clone()

    return call


def stale_pointers(n: Function) -> Function:
    first: dict[Any, Any] = {}

    def call(x: Any, *others: Any) -> Any:
        return n(*first.setdefault((x.shape, x.dtype), (x, *others)))

    return call


def calls_torch(n: Function) -> Function:
    def attend(q: Any, k: Any, v: Any, table: Any, lens: Any) -> Any:
        out = torch.empty_like(q)
        for i, length in enumerate(lens.tolist()):
            keys, values = (x[table[i]].flatten(0, 1)[:length].transpose(0, 1) for x in (k, v))
            out[i] = F.scaled_dot_product_attention(q[i][:, None], keys, values, enable_gqa=True)[:, 0]
        return out

    return {
        "rms_norm": lambda x, shape, weight, eps: F.rms_norm(x, (x.shape[-1],), weight, eps),
        "gemm": lambda a, b: F.linear(a, b),
        "paged_decode": attend,
        "sample": sample,
    }[n.__name__]


def wrong_last_row(n: Function) -> Function:
    def call(x: Any, *others: Any) -> Any:
        y = n(x, *others)
        if n is sample:
            y[-1] = x[-1].argmin()
        elif len(y) > 3:
            y[-1] = 0
        return y

    return call


def constant(n: Function) -> Function:
    def call(*args: Any) -> Any:
        y = n(*args)
        return torch.full_like(y, 1 if n is sample else 0.25)

    return call


def forged(n: Function) -> Function:
    def call(*args: Any) -> Any:
        print("all 36 cases hold", flush=True)
        os._exit(0)

    return call


def biased(n: Function) -> Function:
    return lambda *args: (n(*args).float() * 1.009).to(args[0].dtype)


PATTERNS: dict[int, Callable[[Function], Function]] = {
    1: kept_by_pointer, 2: searches_memory, 3: lazy, 4: in_thread, 5: elsewhere, 6: patches_checker,
    7: low_precision, 8: small_to_zero, 9: writes_a_part, 10: in_place, 11: whole_blocks, 12: counts_calls,
    13: mixes_rows, 14: takes_dense, 15: skips_zeros, 16: kept_by_sample, 17: stale_pointers, 18: calls_torch,
    19: wrong_last_row, 20: constant, 21: forged,
}  # fmt: skip
IN_TIMING, REPORTED, IN_CHILD = (16,), (18,), (21,)
"""Found among timed calls; reported, because the results are right; planted in a process of its own only."""


def planted(pattern: int, like: str) -> Function:
    return PATTERNS[pattern](HONEST[like])


for _like, _honest in HONEST.items():  # targets of a process: c21_rms_norm
    for _pattern, _plant in PATTERNS.items():
        globals()[f"c{_pattern}_{_like.replace('.', '_')}"] = _plant(_honest)
