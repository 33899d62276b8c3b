"""Planted bugs in the optimized panel's attention kernels: words of their sources, changed."""

from __future__ import annotations

from tests.changed_modules import Change
from tests.conformance.mutants.mutant import bugs_in

FEW_CTAS = Change(
    "optimized.kernels.attention.split_kv",
    "per_sm * gpu_of(device).num_multiprocessors or INTERPRETED_CTAS",
    "INTERPRETED_CTAS",
)
"""As in the interpreter: on a GPU requests would begin where the runs of CTAs do."""
bug = bugs_in(
    "attention", "optimized.attention.triton:TritonAttention", FEW_CTAS, folder="optimized.kernels.attention."
)

# fmt: off
bug("TreeSeesSiblings", "Tree sees siblings.",
    ("tree_attention", "in_front = (columns < 0)[None, :]", "in_front = (columns < TAIL)[None, :]"))
bug("WindowsCountSiblings", "In front of a tree windows are right; within it they count slots.",
    ("tree_window", "sees = sees & (positions >= first)",
     "sees = sees & (tl.maximum(tail_start, 0) + columns >= first)"))
bug("ExtendForgetsTheScaleOfV", "Extend forgets the scale of v.",
    ("extend_attention", "[:, None] * v_scale", "[:, None]"))
bug("DecodeWindowOffByOne", "Decode window off by one.",
    ("decode_attention", "first_visible(seq_len - 1, window)", "first_visible(seq_len, window)"))
bug("MergeOfTheWrongFirstPart", "Merge of the wrong first part.",
    ("split_kv", "2 * first_program + (tiles_start != first_program * run_len).to(tl.int32)",
     "2 * first_program"))
bug("EveryRequestReadsTheFirstMask", "Every request reads the first mask.",
    ("extend_attention", "mask_ptr += mask_start", "mask_ptr += 0 * mask_start"))
bug("KernelHeadsByModulo", "Heads by modulo.",
    ("decode_attention", "(head * GROUP + offs_g)", "(head + offs_g * num_kv_heads)"))
bug("CappedAfterMasking", "Capped after masking.",
    ("extend_attention", 'tl.where(sees, scores, float("-inf"))',
     'tl.where(sees, scores, -LOG2_E * logit_cap if HAS_CAP else float("-inf"))'))
bug("DiagonalTilesUnmasked", "Diagonal tiles unmasked.",
    ("extend_attention", "(first_position + 1) // BLOCK_N", "(last_position + 1) // BLOCK_N"))
bug("PartsShareTheirKeys", "Parts of a prompt's keys share some.",
    ("extend_attention", "key_end = tl.minimum(key_end, part_end)", "part_end += BLOCK_N"))
bug("SinkForgottenWhereKeysAreSplit", "Sink forgotten where keys are split.",
    ("split_kv", " offs_g, offs_d, GROUP, HEAD_DIM, HAS_SINKS)", " offs_g, offs_d, GROUP, HEAD_DIM, False)"))
