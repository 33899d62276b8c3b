"""The tensor that attention writes to: its caller's, or a new one."""

from __future__ import annotations

import torch


def output_for(q: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """`out`, if it is what `AttentionBackend.run` asks for, else a `ValueError`; a new tensor where there is
    none."""
    if out is None:
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.shape != q.shape or out.dtype != q.dtype or out.device != q.device:
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)} on {out.device}, and the output {q.dtype} "
            f"{tuple(q.shape)} on {q.device}"
        )
    if not out.is_contiguous():
        raise ValueError(f"out of strides {out.stride()} is not contiguous; its shape is {tuple(out.shape)}")
    return out
