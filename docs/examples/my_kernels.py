"""Kernels as bare functions, in plain torch. Check them:

diptych check kernel docs/examples/my_kernels.py:rms_norm --like rms_norm
diptych check kernel docs/examples/my_kernels.py:paged_decode --like attention.decode
"""

from __future__ import annotations

import torch


# --8<-- [start:rms-norm]
def rms_norm(
    x: torch.Tensor, normalized_shape: tuple[int, ...], weight: torch.Tensor, eps: float
) -> torch.Tensor:
    root = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (x.float() * root * weight.float()).to(x.dtype)


def rms_norm_eps_outside(
    x: torch.Tensor, normalized_shape: tuple[int, ...], weight: torch.Tensor, eps: float
) -> torch.Tensor:
    root = x.float().square().mean(-1, keepdim=True).sqrt() + eps  # a mistake: eps belongs under the root
    return (x.float() / root * weight.float()).to(x.dtype)


# --8<-- [end:rms-norm]


def paged_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    page_table: torch.Tensor,
    lens: torch.Tensor,
    window_left: int = -1,
) -> torch.Tensor:
    output, group_size = torch.empty_like(q), q.shape[1] // k.shape[2]
    for row, length in enumerate(lens.tolist()):
        start = max(length - 1 - window_left, 0) if window_left >= 0 else 0
        keys, values = (x[page_table[row]].flatten(0, 1)[start:length].float() for x in (k, v))
        keys, values = (x.repeat_interleave(group_size, dim=1) for x in (keys, values))
        scores = torch.einsum("hd,nhd->hn", q[row].float(), keys) * q.shape[2] ** -0.5
        output[row] = torch.einsum("hn,nhd->hd", scores.softmax(-1), values)
    return output


def rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _turned(q, cos, sin), _turned(k, cos, sin)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[1]
    cos, sin = cos[:, None], sin[:, None]
    a, b, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
    return torch.cat((turned, rest), dim=-1)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)
