"""Moves the KV of slots to other slots in all layers: one launch, which reads all sources before it writes.

A CTA takes some columns of one layer's K and V, and all of the slots: it reads the sources of its columns,
waits for all of its threads, and writes the targets. No other CTA accesses these columns, so no source is
overwritten before it is read. A tile holds all slots in registers, which limits their number.

Roofline bound: reading and writing 2 * slots * bytes of a token over the memory's bandwidth. For the few
slots that speculative decoding moves in a step it is one launch, instead of four and the copies between them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_SLOTS = 256
WORDS_PER_TILE = 4096
"""32-bit words of K (and as many of V) that a CTA holds: 32 registers of each of its 128 threads."""


@triton.jit(do_not_specialize=["num_slots"])
def _move_kernel(
    k,
    v,
    target_slots,
    source_slots,
    num_slots,
    layer_stride,
    slot_words,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    layer = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    i = tl.arange(0, SLOTS)
    is_slot = i < num_slots
    mask = is_slot[:, None] & (columns < slot_words)[None, :]
    start = layer * layer_stride + columns[None, :]
    source = start + tl.load(source_slots + i, mask=is_slot, other=0)[:, None] * slot_words
    target = start + tl.load(target_slots + i, mask=is_slot, other=0)[:, None] * slot_words
    k_rows = tl.load(k + source, mask=mask)
    v_rows = tl.load(v + source, mask=mask)
    tl.debug_barrier()
    tl.store(k + target, k_rows, mask=mask)
    tl.store(v + target, v_rows, mask=mask)


def can_move(k: torch.Tensor, num_slots: int) -> bool:
    """Whether `move_kv` supports this number of slots of these buffers."""
    return 0 < num_slots <= MAX_SLOTS and k[0, 0].numel() * k.element_size() % 4 == 0


def move_kv(k: torch.Tensor, v: torch.Tensor, target_slots: torch.Tensor, source_slots: torch.Tensor) -> None:
    """k, v [num_layers, num_slots, num_kv_heads, head_dim], contiguous and of one type: the KV of
    source_slots[i] goes to target_slots[i], in all layers. Slots int64 on the buffers' device, targets
    distinct."""
    num_slots = target_slots.shape[0]
    assert can_move(k, num_slots), f"{num_slots} slots of {tuple(k.shape[2:])} {k.dtype}"
    assert k.is_contiguous()
    assert v.is_contiguous()
    assert k.shape == v.shape
    num_layers, slots_of_a_layer = k.shape[:2]
    words = [buffer.view(num_layers, slots_of_a_layer, -1).view(torch.int32) for buffer in (k, v)]
    slot_words = words[0].shape[2]
    tile_slots = triton.next_power_of_2(num_slots)
    columns = min(max(WORDS_PER_TILE // tile_slots, 1), triton.next_power_of_2(slot_words))
    _move_kernel[(num_layers, triton.cdiv(slot_words, columns))](
        words[0],
        words[1],
        target_slots,
        source_slots,
        num_slots,
        slots_of_a_layer * slot_words,
        slot_words,
        SLOTS=tile_slots,
        COLUMNS=columns,
    )
