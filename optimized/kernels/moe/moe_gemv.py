"""The experts of a few tokens, pair by pair, without sorting: two launches.

Roofline bound: the weights of the chosen experts, read once: 6 * inter * hidden bytes per pair in bfloat16.
One token of Qwen3-30B-A3B: 8 * 9.4 MB, 17.6 us at 4.3 TB/s. Each further token reads as much again, except
for experts that several tokens chose. So for many tokens the blocks of moe_gemm.py are faster.

Shape: as in warp_gemv.py, a warp computes whole rows, from register tiles [32 lanes, WARPS, STEPS, VECTOR].
_up takes GROUPS rows of gate and the same of up for one pair. _down takes GROUPS rows of the result for one
token and loops over its choices; their weighted sum is made in registers, in float32, in a fixed order.

The routing is complete before _up starts. So _down, launched before _up has ended (programmatic dependent
launch), may read it, and loads its first AHEAD tiles of weights before it waits for _up's results.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.moe.moe_act import bias_of, gated
from diptych.optimized.kernels.moe.moe_tiles import GemvTile
from diptych.optimized.kernels.portable import INTERPRETED, pdl_options, rounded, where_flag, widened

_INTERPRETED_TILES = (GemvTile(64, 2, 8, 2), GemvTile(64, 2, 8, 2))
"""The interpreter is faster with one large tile than with many small ones."""


@triton.jit
def _load(tile, mask, IS_MASKED: tl.constexpr):
    if IS_MASKED:
        return tl.load(tile, mask=mask, other=0.0)
    else:
        return tl.load(tile)


@triton.jit
def _columns(WARPS: tl.constexpr, STEPS: tl.constexpr, VECTOR: tl.constexpr):
    """[32, WARPS, STEPS, VECTOR]: which column of a row each element of a tile is."""
    lanes, warps = tl.arange(0, 32)[:, None, None, None], tl.arange(0, WARPS)[None, :, None, None]
    steps, elements = tl.arange(0, STEPS)[None, None, :, None], tl.arange(0, VECTOR)[None, None, None, :]
    return (steps * 32 + lanes) * VECTOR + elements + warps * 0


@triton.jit
def _up_kernel(
    x_ptr, w13_ptr, bias_ptr, act_ptr, ids_ptr, stride_x,
    TOP_K: tl.constexpr, HIDDEN: tl.constexpr, INTER: tl.constexpr,
    HAS_BIAS: tl.constexpr, LIMIT: tl.constexpr,
    WARPS: tl.constexpr, GROUPS: tl.constexpr, STEPS: tl.constexpr, AHEAD: tl.constexpr,
    VECTOR: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = STEPS * 32 * VECTOR
    TILES: tl.constexpr = (HIDDEN + COLUMNS - 1) // COLUMNS
    PARTS: tl.constexpr = 2 * GROUPS  # rows of weights of a warp: gate, up, gate, up, ...
    MASK_COLUMNS: tl.constexpr = HIDDEN % COLUMNS != 0
    IS_MASKED: tl.constexpr = MASK_COLUMNS or INTER % (WARPS * GROUPS) != 0
    pair = tl.program_id(1)
    columns = _columns(WARPS, STEPS, VECTOR)
    first_rows = tl.program_id(0) * (WARPS * GROUPS) + tl.arange(0, WARPS) * GROUPS
    tile_rows = first_rows[None, :, None, None]
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(ids_ptr + pair)
    if expert < 0:
        return
    tile = w13_ptr + expert.to(tl.int64) * (2 * INTER * HIDDEN) + (tile_rows * HIDDEN + columns)
    x_tile = x_ptr + (pair // TOP_K).to(tl.int64) * stride_x + columns
    weights = ()
    for i in tl.static_range(AHEAD):
        for p in tl.static_range(PARTS):
            mask = (columns + i * COLUMNS < HIDDEN) & (tile_rows + p // 2 < INTER)
            row = (p % 2) * INTER + p // 2
            weights += (_load(tile + (row * HIDDEN + i * COLUMNS), mask, IS_MASKED),)
    sums = ()
    for _ in tl.static_range(PARTS):
        sums += (tl.zeros([32, WARPS], tl.float32),)
    for i in tl.static_range(TILES):
        if i + AHEAD < TILES:
            for p in tl.static_range(PARTS):
                mask = (columns + (i + AHEAD) * COLUMNS < HIDDEN) & (tile_rows + p // 2 < INTER)
                row = (p % 2) * INTER + p // 2
                weights += (_load(tile + (row * HIDDEN + (i + AHEAD) * COLUMNS), mask, IS_MASKED),)
        x = widened(_load(x_tile + i * COLUMNS, columns + i * COLUMNS < HIDDEN, MASK_COLUMNS), USE_PDL)
        new_sums = ()
        for p in tl.static_range(PARTS):
            products = x * widened(weights[i * PARTS + p], USE_PDL)
            new_sums += (sums[p] + tl.sum(tl.sum(products, 3), 2),)
        sums = new_sums
    for g in tl.static_range(GROUPS):
        gate, up = tl.sum(sums[2 * g], 0), tl.sum(sums[2 * g + 1], 0)
        rows = first_rows + g
        if HAS_BIAS:
            gate += bias_of(bias_ptr, expert, 0, rows, rows < INTER, 2 * INTER)
            up += bias_of(bias_ptr, expert, INTER, rows, rows < INTER, 2 * INTER)
        act = rounded(gated(gate, up, LIMIT), act_ptr.dtype.element_ty)
        tl.store(act_ptr + pair * INTER + rows, act, mask=rows < INTER)


@triton.jit
def _load_choice(tiles, ids, offsets, columns, tile_rows, g: tl.constexpr, s: tl.constexpr,
                 HIDDEN: tl.constexpr, INTER: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Tile s of all choices' tiles, of a warp's row g."""
    TILES: tl.constexpr = (INTER + COLUMNS - 1) // COLUMNS
    mask = (columns + (s % TILES) * COLUMNS < INTER) & (tile_rows + g < HIDDEN)
    mask = where_flag(mask, ids[s // TILES] >= 0)
    return tl.load(tiles[s // TILES] + offsets + (g * INTER + (s % TILES) * COLUMNS), mask=mask, other=0.0)


@triton.jit
def _down_kernel(
    act_ptr, w2_ptr, bias_ptr, y_ptr, ids_ptr, weights_ptr,
    TOP_K: tl.constexpr, HIDDEN: tl.constexpr, INTER: tl.constexpr, HAS_BIAS: tl.constexpr,
    WARPS: tl.constexpr, GROUPS: tl.constexpr, STEPS: tl.constexpr, AHEAD: tl.constexpr,
    VECTOR: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = STEPS * 32 * VECTOR
    TILES: tl.constexpr = (INTER + COLUMNS - 1) // COLUMNS
    ALL: tl.constexpr = TOP_K * TILES
    token = tl.program_id(1)
    columns = _columns(WARPS, STEPS, VECTOR)
    first_rows = tl.program_id(0) * (WARPS * GROUPS) + tl.arange(0, WARPS) * GROUPS
    tile_rows = first_rows[None, :, None, None]
    offsets = tile_rows.to(tl.int64) * INTER + columns
    # For a padding choice nothing is read.
    ids, tiles, choice_weights = (), (), ()
    for j in tl.static_range(TOP_K):
        expert = tl.load(ids_ptr + token * TOP_K + j)
        ids += (expert,)
        tiles += (w2_ptr + expert.to(tl.int64) * (HIDDEN * INTER),)
        choice_weights += (tl.load(weights_ptr + token * TOP_K + j, mask=expert >= 0, other=0.0),)
    weights = ()
    for s in tl.static_range(AHEAD):
        for g in tl.static_range(GROUPS):
            weights += (_load_choice(tiles, ids, offsets, columns, tile_rows, g, s, HIDDEN, INTER, COLUMNS),)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    sums = ()
    for _ in tl.static_range(GROUPS):
        sums += (tl.zeros([32, WARPS], tl.float32),)
    for s in tl.static_range(ALL):
        if s + AHEAD < ALL:
            for g in tl.static_range(GROUPS):
                weights += (
                    _load_choice(
                        tiles, ids, offsets, columns, tile_rows, g, s + AHEAD, HIDDEN, INTER, COLUMNS
                    ),
                )
        act_tile = act_ptr + (token * TOP_K + s // TILES) * INTER + (s % TILES) * COLUMNS + columns
        act_mask = where_flag(columns + (s % TILES) * COLUMNS < INTER, ids[s // TILES] >= 0)
        act = widened(tl.load(act_tile, mask=act_mask, other=0.0), USE_PDL)
        new_sums = ()
        for g in tl.static_range(GROUPS):
            products = act * widened(weights[s * GROUPS + g], USE_PDL)
            new_sums += (sums[g] + choice_weights[s // TILES] * tl.sum(tl.sum(products, 3), 2),)
        sums = new_sums
    for g in tl.static_range(GROUPS):
        y, rows = tl.sum(sums[g], 0), first_rows + g
        if HAS_BIAS:
            for j in tl.static_range(TOP_K):
                mask = where_flag(rows < HIDDEN, ids[j] >= 0)
                y += choice_weights[j] * bias_of(bias_ptr, ids[j], 0, rows, mask, HIDDEN)
        y_row = y_ptr + token.to(tl.int64) * HIDDEN
        tl.store(y_row + rows, rounded(y, y_ptr.dtype.element_ty), mask=rows < HIDDEN)


def gemv_experts(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    tiles: tuple[GemvTile, GemvTile],
    b13: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    swiglu_limit: float = 0.0,
) -> torch.Tensor:
    """x [num_tokens, hidden] -> the weighted sum of its experts' results, [num_tokens, hidden]."""
    num_tokens, top_k = topk_ids.shape
    hidden, inter = w2.shape[1:]
    act = torch.empty(num_tokens * top_k, inter, dtype=x.dtype, device=x.device)
    y = torch.empty(num_tokens, hidden, dtype=x.dtype, device=x.device)
    up, down = _INTERPRETED_TILES if INTERPRETED else tiles
    sizes = {"TOP_K": top_k, "HIDDEN": hidden, "INTER": inter}
    _up_kernel[(triton.cdiv(inter, up.warps * up.groups), num_tokens * top_k)](
        x, w13, x if b13 is None else b13, act, topk_ids, x.stride(0), **sizes,
        HAS_BIAS=b13 is not None, LIMIT=swiglu_limit, **_options(x, up, hidden, 1),
    )  # fmt: skip
    _down_kernel[(triton.cdiv(hidden, down.warps * down.groups), num_tokens)](
        act, w2, x if b2 is None else b2, y, topk_ids, topk_weights, **sizes,
        HAS_BIAS=b2 is not None, **_options(x, down, inter, top_k),
    )  # fmt: skip
    return y


def _options(x: torch.Tensor, tile: GemvTile, size: int, num_rows: int) -> dict[str, Any]:
    vector = 16 // x.element_size()
    warps, groups, steps, ahead = tile
    steps = min(steps, max(triton.next_power_of_2(size) // (32 * vector), 1))
    num_tiles = num_rows * triton.cdiv(size, steps * 32 * vector)
    return {
        "WARPS": warps,
        "GROUPS": groups,
        "STEPS": steps,
        "AHEAD": min(ahead, num_tiles),
        "VECTOR": vector,
        "num_warps": warps,
        **pdl_options(x),
    }
