"""Attention of one new token per request over the paged KV pool: one launch, for any lengths.

Roofline bound: the bytes of live K and V, read once: 2 * sum(seq_lens) * num_kv_heads * head_dim * itemsize
over the memory's bandwidth; each is used for 2 operations per query head, far below what the tensor cores can
do. For few short requests the bound is latency: a launch, three dependent reads (length, slot, key) and a
merge.

Shape: the query heads of one KV head are the rows of one GEMM (padded to 16), so K and V are read once for
all of them. The grid is [num_kv_heads, CTAs], as many CTAs as fill the GPU once. Keys are divided among them
on the device (split_kv.py), so a CUDA graph can hold the launch. CTAs of different heads and the same keys
are neighbours in the grid: together they read whole rows of the pool.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from diptych.optimized.kernels.attention.fp8 import for_pool, from_pool, kernel_view, values_from_pool
from diptych.optimized.kernels.attention.paged_softmax import accumulate, first_visible, scores_of, slots_at
from diptych.optimized.kernels.attention.split_kv import (
    finish,
    merge_if_last,
    num_split_ctas,
    prefetch_tile,
    schedule_tiles,
    split_sizes,
    split_workspace,
    store_partial,
)
from diptych.optimized.kernels.portable import Gpu, batch_block, gpu_of, pdl_options


@triton.jit
def keys_of(request, seq_lens_ptr, req_pool_indices_ptr, req_to_token_ptr, stride_row):
    """The number of keys of a request, and the row of their slots."""
    seq_len = tl.load(seq_lens_ptr + request).to(tl.int32)
    return seq_len, req_to_token_ptr + tl.load(req_pool_indices_ptr + request) * stride_row


@triton.jit(do_not_specialize=["batch_size", "window"])
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, sinks_ptr,
    req_to_token_ptr, req_pool_indices_ptr, seq_lens_ptr, workspace_ptr, counters_ptr,
    batch_size, scale, v_scale, logit_cap, window,
    stride_q, stride_q_head, stride_k_head, stride_v_head, stride_row,
    STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_BS: tl.constexpr,
    MERGED_G: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr, USE_PDL: tl.constexpr, Q_EACH_TILE: tl.constexpr,
):  # fmt: skip
    head, program = tl.program_id(0), tl.program_id(1)
    num_kv_heads, num_programs = tl.num_programs(0), tl.num_programs(1)
    if USE_PDL:
        # The next kernel may read its weights meanwhile.
        tl.extra.cuda.gdc_launch_dependents()
    run_start, run_end, run_len, first_request, first_start = schedule_tiles(
        seq_lens_ptr, batch_size, window, program, num_programs, BLOCK_N, BLOCK_BS, HAS_WINDOW
    )
    if run_start < run_end:
        offs_g, offs_d, offs_n = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
        in_dim = offs_d < HEAD_DIM
        mask_q = (offs_g < GROUP)[:, None] & in_dim[None, :]
        q_heads = q_ptr + (head * GROUP + offs_g)[:, None] * stride_q_head + offs_d[None, :]
        k_head, v_head = k_ptr + head * stride_k_head, v_ptr + head * stride_v_head
        out_head, sinks_ptr = out_ptr + head * GROUP * HEAD_DIM, sinks_ptr + head * GROUP
        stride_out = num_kv_heads * GROUP * HEAD_DIM
        request, tiles_start = first_request, first_start
        seq_len, slots_ptr = keys_of(
            request, seq_lens_ptr, req_pool_indices_ptr, req_to_token_ptr, stride_row
        )
        first_key = 0
        if HAS_WINDOW:
            first_key = first_visible(seq_len - 1, window)
        start = (first_key // BLOCK_N + run_start - tiles_start) * BLOCK_N
        first_end = tiles_start + tl.cdiv(seq_len, BLOCK_N) - first_key // BLOCK_N
        if USE_PDL:
            # Lengths, rows of slots and all keys but the newest were written before this step, so they need
            # no wait.
            prefetch_tile(
                slots_ptr, start, seq_len, k_head, v_head, STRIDE_K, STRIDE_V, HEAD_DIM, PAGE_SIZE, BLOCK_N
            )
            tl.extra.cuda.gdc_wait()
        if not Q_EACH_TILE:
            loaded = tl.load(q_heads + request * stride_q, mask=mask_q, other=0.0)
            q, q_scale = for_pool(loaded, scale, k_ptr.dtype.element_ty)
        acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
        largest = tl.full([BLOCK_G], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_G, BLOCK_N], tl.float32)
        # One loop over all requests of the run, so that reads of the next request's keys start before the
        # previous one ends.
        for tile in range(run_start, run_end):
            # --8<-- [start:decode-loop]
            if Q_EACH_TILE:
                loaded = tl.load(q_heads + request * stride_q, mask=mask_q, other=0.0)
                q, q_scale = for_pool(loaded, scale, k_ptr.dtype.element_ty)
            # Beyond the end the last key is read again, which is live; its score is
            # masked.
            positions = start + offs_n
            nearest = tl.maximum(tl.minimum(positions, seq_len - 1), first_key)
            slots = slots_at(slots_ptr, nearest, PAGE_SIZE)
            k_tile = k_head + slots[:, None] * STRIDE_K + offs_d[None, :]
            k = from_pool(tl.load(k_tile, mask=in_dim[None, :], other=0.0), q.dtype)
            scores = scores_of(q, k, q_scale, logit_cap, HAS_CAP, PRECISION)
            scores = tl.where((positions == nearest)[None, :], scores, float("-inf"))
            v_tile = v_head + slots[:, None] * STRIDE_V + offs_d[None, :]
            v = values_from_pool(tl.load(v_tile, mask=in_dim[None, :], other=0.0), q.dtype)
            acc, largest, total = accumulate(acc, largest, total, scores, v, PRECISION)
            # --8<-- [end:decode-loop]
            is_last = start + BLOCK_N >= seq_len
            if is_last:
                sums = tl.sum(total, 1)
                if tiles_start >= run_start:
                    out_row = out_head + request * stride_out
                    finish(
                        out_row, sinks_ptr, acc, largest[:, None], sums[:, None], v_scale, offs_g, offs_d,
                        GROUP, HEAD_DIM, HAS_SINKS,
                    )  # fmt: skip
                else:
                    store_partial(
                        workspace_ptr, acc, largest, sums, head, num_kv_heads, program, num_programs,
                        tiles_start <= run_start, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D,
                    )  # fmt: skip
                acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
                largest = tl.full([BLOCK_G], float("-inf"), tl.float32)
                total = tl.zeros([BLOCK_G, BLOCK_N], tl.float32)
            is_next = is_last & (tile + 1 < run_end)
            if is_next:
                request += 1
                seq_len, slots_ptr = keys_of(
                    request, seq_lens_ptr, req_pool_indices_ptr, req_to_token_ptr, stride_row
                )
                if not Q_EACH_TILE:
                    loaded = tl.load(q_heads + request * stride_q, mask=mask_q, other=0.0)
                    q, q_scale = for_pool(loaded, scale, k_ptr.dtype.element_ty)
            if HAS_WINDOW:
                first_key = first_visible(seq_len - 1, window)
            start = tl.where(is_next, first_key // BLOCK_N * BLOCK_N, start + BLOCK_N)
            tiles_start = tl.where(is_next, tile + 1, tiles_start)

        # Barriers in the loop would prevent pipelining by Triton, so parts are counted and merged after it.
        tiles_end = tiles_start + tl.cdiv(seq_len, BLOCK_N) - first_key // BLOCK_N
        if tiles_end > run_end:
            sums = tl.sum(total, 1)
            store_partial(
                workspace_ptr, acc, largest, sums, head, num_kv_heads, program, num_programs,
                tiles_start <= run_start, GROUP, HEAD_DIM, BLOCK_G, BLOCK_D,
            )  # fmt: skip
            merge_if_last(
                out_head + request * stride_out, sinks_ptr, counters_ptr + request * num_kv_heads + head,
                workspace_ptr, head, num_kv_heads, num_programs, tiles_start, tiles_end, run_len, v_scale,
                GROUP, HEAD_DIM, BLOCK_D, MERGED_G, HAS_SINKS,
            )  # fmt: skip
        if (first_start < run_start) & (first_end <= run_end):
            merge_if_last(
                out_head + first_request * stride_out, sinks_ptr,
                counters_ptr + first_request * num_kv_heads + head,
                workspace_ptr, head, num_kv_heads, num_programs, first_start, first_end, run_len, v_scale,
                GROUP, HEAD_DIM, BLOCK_D, MERGED_G, HAS_SINKS,
            )  # fmt: skip


class Tile(NamedTuple):
    block_n: int  # keys
    ctas_per_sm: int
    num_stages: int


def _tile(block_g: int, row_bytes: int, q_row_bytes: int, gpu: Gpu) -> Tile:
    """The largest tile whose loads in flight fit the shared memory, for BLOCK_G query heads, rows of K of
    row_bytes and of q of q_row_bytes. Large tiles mean fewer softmax steps and fewer partial outputs, for any
    number of requests."""
    if row_bytes >= 256:
        largest = Tile(max(16, 32768 // q_row_bytes), 1, 5)  # FP8 is widened in shared memory
    else:
        largest = Tile(max(16, min(128, 16384 // row_bytes)), 2, 5)
    limit = gpu.shared_memory_per_cta(largest.ctas_per_sm)
    for num_stages in (largest.num_stages, 3):
        block_n = largest.block_n
        while block_n >= 16:
            tile = largest._replace(block_n=block_n, num_stages=num_stages)
            if _shared_memory(tile, block_g, row_bytes, q_row_bytes, gpu) <= limit:
                return tile
            block_n //= 2
    raise ValueError(
        f"decode attention of {block_g} query heads a KV head, in rows of {row_bytes} bytes, needs more than "
        f"the {limit} bytes of shared memory that a CTA has on this GPU"
    )


def _shared_memory(tile: Tile, block_g: int, row_bytes: int, q_row_bytes: int, gpu: Gpu) -> int:
    """Bytes of a CTA, an upper bound. A read of K waits for a read of its slot: 3 stages hold one tile of K
    and V, 5 stages two, 7 stages three. With rows of q of more than 512 bytes 3 stages hold q once more, as
    compiled kernels show. From 64 query heads on, Hopper's GEMM instruction (wgmma) reads K, V
    and q where they are in shared memory: a tile for every stage but one."""
    is_wgmma = block_g >= 64 and gpu.capability[0] == 9
    tiles_in_flight = (tile.num_stages - 1) // (1 if is_wgmma else 2)
    kv = 2 * tiles_in_flight * tile.block_n * (row_bytes + 8)
    if row_bytes < q_row_bytes:  # FP8, and V in 16 bits as well; with wgmma also K
        kv += (2 if is_wgmma else 1) * tile.block_n * q_row_bytes
    q_copies = 4 if is_wgmma or tile.num_stages == 5 else 3 if q_row_bytes > 512 else 2
    return kv + max(4096, q_copies * block_g * q_row_bytes)


def decode_attention(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    counters: torch.Tensor,
    *,
    out: torch.Tensor,
    scale: float,
    v_scale: float = 1.0,
    page_size: int = 1,
    sliding_window: int = -1,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [bs, num_qo_heads, head_dim] of the tokens at seq_lens - 1 -> out, alike and contiguous. K and V in
    FP8 are multiplied by their scales: `scale` includes that of K.

    counters: int32 [>= bs * num_kv_heads] of zeros, and zeros again afterwards; launches that may run at the
    same time need their own. req_to_token, req_pool_indices and seq_lens are read before the previous launch
    has ended: they must be from before the last one that was no programmatic dependent launch.
    """
    batch_size, num_qo_heads, head_dim = q.shape
    num_kv_heads = k_buffer.shape[1]
    assert q.stride(2) == k_buffer.stride(2) == v_buffer.stride(2) == req_to_token.stride(1) == 1
    assert counters.numel() >= batch_size * num_kv_heads
    if batch_size == 0:
        return out
    sizes = split_sizes(num_qo_heads // num_kv_heads, head_dim)
    k_buffer, v_buffer = kernel_view(k_buffer), kernel_view(v_buffer)
    row_bytes = sizes["BLOCK_D"] * k_buffer.element_size()
    tile = _tile(sizes["BLOCK_G"], row_bytes, sizes["BLOCK_D"] * q.element_size(), gpu_of(q.device))
    max_tiles = batch_size * triton.cdiv(req_to_token.shape[1], tile.block_n)
    num_programs = num_split_ctas(q.device, num_kv_heads, tile.ctas_per_sm, max_tiles)
    _decode_kernel[(num_kv_heads, num_programs)](
        q, k_buffer, v_buffer, out, q if sinks is None else sinks,
        req_to_token, req_pool_indices, seq_lens,
        split_workspace(q.device, num_programs, num_kv_heads, sizes["GROUP"], head_dim), counters,
        batch_size, scale, v_scale, logit_cap, sliding_window,
        q.stride(0), q.stride(1), k_buffer.stride(1), v_buffer.stride(1), req_to_token.stride(0),
        STRIDE_K=k_buffer.stride(0), STRIDE_V=v_buffer.stride(0),
        **sizes, PAGE_SIZE=page_size, BLOCK_N=tile.block_n,
        BLOCK_BS=1 if batch_size == 1 else batch_block(batch_size),
        HAS_WINDOW=sliding_window != -1, HAS_CAP=logit_cap > 0, HAS_SINKS=sinks is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        # Prefetching q as keys are would take shared memory for each tile in flight, too much for two CTAs.
        Q_EACH_TILE=tile.ctas_per_sm == 1,
        num_warps=4, num_stages=tile.num_stages, **pdl_options(q),
    )  # fmt: skip
    return out
