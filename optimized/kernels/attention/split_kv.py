"""Split-KV scheduling: the keys of a batch are divided evenly among CTAs, and partial results are merged.

The tiles of BLOCK_N keys of all requests, one after the other, are cut into runs of equal length, one for
each CTA of a KV head. A run may end in the middle of a request, or span many. One long request thus
keeps every multiprocessor busy, and so does a ragged batch, without lengths on the CPU: a CTA
finds its run from seq_lens alone.

A request that several CTAs share is merged by the last to arrive: each leaves its unnormalised
output, maximum and sum, and counts itself; the last one adds them up in the order of positions, so that the
result does not depend on which CTA was last, and sets the counter back to 0 for the next launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.attention.paged_softmax import LOG2_E, first_visible, slots_at
from diptych.optimized.kernels.portable import gpu_of, rounded, where_flag

INTERPRETED_CTAS = 6
"""The total number of CTAs without a GPU: enough that requests are split."""
PARTS: tl.constexpr = tl.constexpr(8)
"""The number of other CTAs' parts that the last CTA loads at a time."""


@triton.jit
def schedule_tiles(
    seq_lens_ptr, batch_size, window, program, num_programs,
    BLOCK_N: tl.constexpr, BLOCK_BS: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """The run of a CTA: its first tile and its end, the length of runs, the request it begins in, and the
    first tile of that request."""
    if BLOCK_BS == 1:
        seq_len = tl.load(seq_lens_ptr).to(tl.int32)
        total = tl.cdiv(seq_len, BLOCK_N)
        if HAS_WINDOW:
            total -= first_visible(seq_len - 1, window) // BLOCK_N
        first, tiles_start = 0, 0
        run_len = tl.cdiv(total, num_programs)
        run_start = program * run_len
        run_end = tl.minimum(run_start + run_len, total)
    else:
        # --8<-- [start:schedule-tiles]
        requests = tl.arange(0, BLOCK_BS)
        in_batch = requests < batch_size
        seq_lens = tl.load(seq_lens_ptr + requests, mask=in_batch, other=0).to(tl.int32)
        num_tiles = tl.cdiv(seq_lens, BLOCK_N)
        if HAS_WINDOW:
            num_tiles -= first_visible(seq_lens - 1, window) // BLOCK_N
        ends = tl.cumsum(num_tiles, 0)
        total = tl.sum(num_tiles, 0)
        run_len = tl.cdiv(total, num_programs)
        run_start = program * run_len
        run_end = tl.minimum(run_start + run_len, total)
        first = tl.sum((ends <= run_start).to(tl.int32), 0)
        tiles_start = tl.sum(tl.where(ends <= run_start, num_tiles, 0), 0)
        # --8<-- [end:schedule-tiles]
    return run_start, run_end, run_len, first, tiles_start


@triton.jit
def prefetch_tile(
    slots_ptr, start, seq_len, k_head, v_head, STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr,
    HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Prefetch K and V of the keys from start on, while the previous kernel still runs, into the L2 cache,
    which is coherent with that kernel's writes."""
    LINE: tl.constexpr = 1024 // k_head.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = triton.next_power_of_2((HEAD_DIM + LINE - 1) // LINE)
    nearest = tl.minimum(start + tl.arange(0, BLOCK_N), seq_len - 1)
    slots = slots_at(slots_ptr, nearest, PAGE_SIZE)[:, None]
    offs = tl.minimum(tl.arange(0, LINES) * LINE, HEAD_DIM - 1)[None, :]
    ask: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    k_lines, v_lines = k_head + slots * STRIDE_K + offs, v_head + slots * STRIDE_V + offs
    tl.inline_asm_elementwise(ask, "=r,l", [k_lines.to(tl.int64)], tl.int32, is_pure=False, pack=1)
    tl.inline_asm_elementwise(ask, "=r,l", [v_lines.to(tl.int64)], tl.int32, is_pure=False, pack=1)


@triton.jit
def finish(
    out_row, sinks_ptr, acc, largest, total, v_scale, offs_g, offs_d,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Adds the sinks' weights, normalises, multiplies by the scale of V, and stores [GROUP, HEAD_DIM] at
    out_row; largest and total are [heads, 1]."""
    in_group = offs_g < GROUP
    if HAS_SINKS:
        sink = LOG2_E * tl.load(sinks_ptr + offs_g, mask=in_group, other=0.0).to(tl.float32)[:, None]
        new_largest = tl.maximum(largest, sink)
        rescale = tl.exp2(largest - new_largest)
        total = total * rescale + tl.exp2(sink - new_largest)
        acc = acc * rescale
    total = tl.where(in_group[:, None], total, 1.0)
    mask = in_group[:, None] & (offs_d < HEAD_DIM)[None, :]
    output = rounded(acc / total * v_scale, out_row.dtype.element_ty)
    tl.store(out_row + offs_g[:, None] * HEAD_DIM + offs_d[None, :], output, mask=mask)


@triton.jit(noinline=True)
def _merge(
    out_row, sinks_ptr, workspace_ptr, head, num_kv_heads, num_programs,
    first_program, last_program, first_part, v_scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    MERGED_G: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """The parts of the CTAs [first_program, last_program], one after the other; but PARTS at a time are
    loaded at once, and no thread needs what another holds. Wide outputs are merged in runs of columns. Not
    inlined: kernels call it in two places, and with two copies they compile 1.7 times as long."""
    COLUMNS: tl.constexpr = BLOCK_D if BLOCK_D <= 256 else 128
    for first_column in range(0, BLOCK_D, COLUMNS):
        offs_d = first_column + tl.arange(0, COLUMNS)
        _merge_columns(
            out_row, sinks_ptr, workspace_ptr, head, num_kv_heads, num_programs,
            first_program, last_program, first_part, v_scale, offs_d,
            GROUP, HEAD_DIM, COLUMNS, MERGED_G, HAS_SINKS,
        )  # fmt: skip


@triton.jit
def _merge_columns(
    out_row, sinks_ptr, workspace_ptr, head, num_kv_heads, num_programs,
    first_program, last_program, first_part, v_scale, offs_d,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr,
    MERGED_G: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    offs_g = tl.arange(0, MERGED_G)
    in_group = (offs_g < GROUP)[:, None]
    mask = in_group & (offs_d < HEAD_DIM)[None, :]
    num_rows = 2 * num_programs * num_kv_heads * GROUP
    state_ptr = workspace_ptr + num_rows * HEAD_DIM
    acc = tl.zeros([MERGED_G, COLUMNS], tl.float32)
    largest = tl.full([MERGED_G, 1], float("-inf"), tl.float32)
    total = tl.zeros([MERGED_G, 1], tl.float32)
    for start in range(first_program, last_program + 1, PARTS):
        for i in tl.static_range(PARTS):
            program = start + i
            is_part = program <= last_program
            part = tl.where(program == first_program, first_part, 2 * program)
            rows = (part * num_kv_heads + head) * GROUP + offs_g[:, None]
            # .cg: from where the other CTAs' multiprocessors wrote it.
            values = tl.load(
                workspace_ptr + rows * HEAD_DIM + offs_d[None, :], mask=where_flag(mask, is_part), other=0.0,
                cache_modifier=".cg",
            )  # fmt: skip
            mask_row = where_flag(in_group, is_part)
            maximum = tl.load(state_ptr + rows, mask=mask_row, other=float("-inf"), cache_modifier=".cg")
            weight = tl.load(state_ptr + num_rows + rows, mask=mask_row, other=0.0, cache_modifier=".cg")
            new_largest = tl.maximum(largest, maximum)
            # Rows that are no heads hold -inf only.
            base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
            rescale, factor = tl.exp2(largest - base), tl.exp2(maximum - base)
            total = total * rescale + weight * factor
            acc = acc * rescale + values * factor
            largest = new_largest
    finish(out_row, sinks_ptr, acc, largest, total, v_scale, offs_g, offs_d, GROUP, HEAD_DIM, HAS_SINKS)


@triton.jit
def store_partial(
    workspace_ptr,  # float32: outputs [2 * num_programs, num_kv_heads, GROUP, HEAD_DIM], maxima, sums
    acc, largest, total, head, num_kv_heads, program, num_programs, begins_run,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store a CTA's partial result of a shared request. A CTA has at most two: one of the request in which
    its run begins, one of another request."""
    part = 2 * program + 1 - begins_run.to(tl.int32)
    offs_g, offs_d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    rows = (part * num_kv_heads + head) * GROUP + offs_g
    num_rows = 2 * num_programs * num_kv_heads * GROUP
    in_group = offs_g < GROUP
    tile = workspace_ptr + rows[:, None] * HEAD_DIM + offs_d[None, :]
    tl.store(tile, acc, mask=in_group[:, None] & (offs_d < HEAD_DIM)[None, :])
    tl.store(workspace_ptr + num_rows * HEAD_DIM + rows, largest, mask=in_group)
    tl.store(workspace_ptr + num_rows * (HEAD_DIM + 1) + rows, total, mask=in_group)


@triton.jit
def merge_if_last(
    out_row, sinks_ptr, counter_ptr, workspace_ptr, head, num_kv_heads, num_programs,
    tiles_start, tiles_end, run_len, v_scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MERGED_G: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of a request with the tiles [tiles_start, tiles_end). Called once, after
    store_partial."""
    first_program, last_program = tiles_start // run_len, (tiles_end - 1) // run_len
    tl.debug_barrier()  # the release below is one thread's: all others' stores come before it
    if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == last_program - first_program:
        tl.debug_barrier()
        tl.store(counter_ptr, 0)
        first_part = 2 * first_program + (tiles_start != first_program * run_len).to(tl.int32)
        _merge(
            out_row, sinks_ptr, workspace_ptr, head, num_kv_heads, num_programs,
            first_program, last_program, first_part, v_scale,
            GROUP, HEAD_DIM, BLOCK_D, MERGED_G, HAS_SINKS,
        )  # fmt: skip


def num_split_ctas(device: torch.device, num_kv_heads: int, per_sm: int, max_tiles: int) -> int:
    """The number of CTAs for each KV head: together they fill the GPU once, at most one per possible tile."""
    resident = per_sm * gpu_of(device).num_multiprocessors or INTERPRETED_CTAS
    return max(1, min(resident // num_kv_heads, max_tiles))


def split_workspace(
    device: torch.device, num_programs: int, num_kv_heads: int, group: int, head_dim: int
) -> torch.Tensor:
    return torch.empty(2 * num_programs * num_kv_heads * group * (head_dim + 2), device=device)


def split_sizes(group: int, head_dim: int) -> dict[str, int]:
    """The sizes at compile time of a group and of its parts."""
    block_d, merged_g = max(16, triton.next_power_of_2(head_dim)), triton.next_power_of_2(group)
    return {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_G": max(16, merged_g),
        "BLOCK_D": block_d,
        "MERGED_G": merged_g,
    }
