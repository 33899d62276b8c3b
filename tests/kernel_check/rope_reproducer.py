"""A reproducer for FlashInfer: RoPE of 80 and of 96 dims gives wrong values. On a CUDA GPU:

python -m tests.kernel_check.rope_reproducer
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NUM_TOKENS = 1024
ROUNDED = 2.0**-6  # half a step of bfloat16 between 4 and 8
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def wrong(rotate: Callable[..., Any], head_dim: int, is_in_place: bool) -> str:
    """What `rotate`, with FlashInfer's arguments, gives where it differs from float64: "" if nowhere."""
    torch.manual_seed(0)
    positions, half = torch.randint(0, 500, (NUM_TOKENS,), device=DEVICE), head_dim // 2
    angles = torch.arange(512.0)[:, None] * 10_000.0 ** (-torch.arange(half) / half)
    cache = torch.cat((angles.cos(), angles.sin()), 1).to(DEVICE)
    x = torch.randn(NUM_TOKENS, 8 * head_dim, device=DEVICE).clamp(-4, 4).bfloat16()
    q, k = x.clone(), x[:, :head_dim].clone()
    turned = rotate(positions, q, k, head_dim, cache, True)
    got = (q if is_in_place else turned[0]).view(NUM_TOKENS, 8, head_dim).double()
    a, b = x.view(NUM_TOKENS, 8, head_dim).double().chunk(2, -1)
    cos, sin = cache[positions].double()[:, None].chunk(2, -1)
    expected = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    places = ((got - expected).abs() > 1.01 * ROUNDED).nonzero()  # the products are in float32
    if not len(places):
        return ""
    first, dims = tuple(places[0].tolist()), places[:, 2].unique()
    tokens = f"{places[:, 0].unique().numel()} of {NUM_TOKENS} tokens, dims {dims[0]} to {dims[-1]}"
    example = f"{list(first)}: expected {expected[first]:.2f}, got {got[first]:.2f}"
    return f"{len(places)} of {got.numel()} wrong, {tokens}; {example}"


def main() -> None:
    import flashinfer

    print(f"flashinfer {flashinfer.__version__}; expected: nothing is wrong")
    for rotate in (
        flashinfer.apply_rope_with_cos_sin_cache_inplace,
        flashinfer.apply_rope_with_cos_sin_cache,
    ):
        for head_dim in (64, 80, 96, 128):
            found = wrong(rotate, head_dim, rotate.__name__.endswith("inplace"))
            print(f"{rotate.__name__}, head_dim {head_dim}: {found or 'nothing is wrong'}")


if __name__ == "__main__":
    main()
