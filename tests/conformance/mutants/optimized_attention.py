"""Bugs planted in the text of the optimized panel's attention kernels, each with what must catch it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from diptych.optimized.kernels.attention.split_kv import INTERPRETED_CTAS
from diptych.shared.interfaces import AttentionBackend

ROOT = Path(__file__).parents[3] / "optimized"
FILES = {
    name: ROOT / "kernels" / "attention" / f"{name}.py"
    for name in (
        *("paged_softmax", "split_kv", "decode_attention", "extend_attention", "tree_attention"),
        *("fp8_tiles", "fp8_decode_attention"),
    )
} | {"triton": ROOT / "attention" / "triton.py"}


def _module(path: Path) -> str:
    return ".".join(("diptych", *path.relative_to(ROOT.parent).with_suffix("").parts))


@dataclass(frozen=True)
class KernelMutant:
    """In `file`, the first of each pair becomes the second. `clause` of the contract
    catches it."""

    name: str
    clause: str
    file: str
    changes: tuple[tuple[str, str], ...]

    def build(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> type[AttentionBackend]:
        """TritonAttention over changed copies of its modules. Everywhere with as few CTAs as in the
        interpreter: on a GPU each would have a tile or none, and requests would begin where runs begin."""
        prefix = f"mutant_{self.name}_"
        for name, path in FILES.items():
            text = path.read_text()
            if name == self.file:
                for before, after in self.changes:
                    assert text.count(before) >= 1, f"{self.name}: {self.file} has no {before!r}"
                    text = text.replace(before, after)
            for other, other_path in FILES.items():
                text = text.replace(f"{_module(other_path)} ", f"{prefix}{other} ")
            (folder / f"{prefix}{name}.py").write_text(text)
        monkeypatch.syspath_prepend(str(folder))
        impl: type[AttentionBackend] = importlib.import_module(f"{prefix}triton").TritonAttention
        for name in ("decode_attention", "fp8_decode_attention", "tree_attention"):
            monkeypatch.setattr(f"{prefix}{name}.num_split_ctas", _as_few_as_interpreted)
        monkeypatch.setattr(f"{prefix}fp8_decode_attention.MIN_REQUESTS", 1)
        return impl


def _as_few_as_interpreted(device: torch.device, num_kv_heads: int, per_sm: int, max_tiles: int) -> int:
    return max(1, min(INTERPRETED_CTAS // num_kv_heads, max_tiles))


MUTANTS = (
    KernelMutant(
        "tree_sees_siblings",
        "fixed-shape",
        "tree_attention",
        (("sees = sees | (columns < 0)[None, :]", "sees = sees | (columns < TAIL)[None, :]"),),
    ),
    KernelMutant(
        "tree_of_another_request",
        "fixed-shape",
        "tree_attention",
        (("entries = (q_rows * TAIL)", "entries = (tokens * TAIL)"),),
    ),
    KernelMutant(
        "parts_of_a_tree_without_weights",
        "fixed-shape",
        "tree_attention",
        (("tl.sum(values * factors[:, None], 0)", "tl.sum(values, 0)"),),
    ),
    KernelMutant(
        "prefix_of_a_tree_too_long",
        "fixed-shape",
        "tree_attention",
        (("tl.maximum(tail_start, 0) // BLOCK_N", "tl.maximum(seq_len, 0) // BLOCK_N"),),
    ),
    KernelMutant("k_scale_forgotten", "fp8-pool", "triton", (("layer.scale * kv_scales.k", "layer.scale"),)),
    KernelMutant(
        "decode_forgets_the_scale_of_v", "fp8-pool", "split_kv", (("acc / total * v_scale", "acc / total"),)
    ),
    KernelMutant(
        "extend_forgets_the_scale_of_v",
        "fp8-pool",
        "extend_attention",
        (("[:, None] * v_scale", "[:, None]"),),
    ),
    KernelMutant(
        "tree_forgets_the_scale_of_v",
        "fp8-pool",
        "tree_attention",
        (("acc / total * v_scale", "acc / total"),),
    ),
    KernelMutant(
        "decode_window_off_by_one",
        "sliding-window",
        "decode_attention",
        (("first_visible(seq_len - 1, window)", "first_visible(seq_len, window)"),),
    ),
    KernelMutant(
        "extend_window_off_by_one",
        "sliding-window",
        "extend_attention",
        (("first_visible(query_positions, window)", "first_visible(query_positions + 1, window)"),),
    ),
    KernelMutant(
        "chunk_of_the_first_query_for_all",
        "attention-chunks",
        "extend_attention",
        (("first_visible(query_positions, window)", "first_visible(first_position + 0 * tokens, window)"),),
    ),
    KernelMutant(
        "chunk_of_the_next_token",
        "attention-chunks",
        "decode_attention",
        (("first_visible(seq_len - 1, window)", "first_visible(seq_len, window)"),),
    ),
    KernelMutant(
        "last_tile_of_a_run_dropped",
        "decode",
        "decode_attention",
        (("in range(run_start, run_end)", "in range(run_start, run_end - 1)"),),
    ),
    KernelMutant(
        "next_request_asks_with_the_query_before",
        "decode",
        "decode_attention",
        (("q_heads + request * stride_q", "q_heads + first_request * stride_q"),),
    ),
    KernelMutant(
        "softmax_goes_on_into_the_next_request",
        "decode",
        "decode_attention",
        (
            (16 * " " + 'largest = tl.full([BLOCK_G], float("-inf"), tl.float32)\n', ""),
            (16 * " " + "total = tl.zeros([BLOCK_G, BLOCK_N], tl.float32)\n", ""),
        ),
    ),
    KernelMutant(
        "merge_without_weights",
        "decode",
        "split_kv",
        (("acc * rescale + values * factor", "acc * rescale + values"),),
    ),
    KernelMutant(
        "merge_of_the_wrong_first_part",
        "decode",
        "split_kv",
        (
            (
                "2 * first_program + (tiles_start != first_program * run_len).to(tl.int32)",
                "2 * first_program",
            ),
        ),
    ),
    KernelMutant(
        "accumulated_without_rescaling",
        "extend",
        "paged_softmax",
        (("acc * rescale[:, None] + dot", "acc + dot"),),
    ),
    KernelMutant(
        "mask_rows_of_the_wrong_length",
        "any-mask",
        "extend_attention",
        (("(tokens * seq_len)[:, None]", "(tokens * prefix_len)[:, None]"),),
    ),
    KernelMutant(
        "every_request_reads_the_first_mask",
        "any-mask",
        "extend_attention",
        (("mask_ptr += mask_start", "mask_ptr += 0 * mask_start"),),
    ),
    KernelMutant(
        "rest_of_the_last_page_read",
        "decode",
        "decode_attention",
        (
            ("nearest = tl.maximum(tl.minimum(positions, seq_len - 1), first_key)", "nearest = positions"),
            ("(positions == nearest)[None, :]", "(positions < seq_len)[None, :]"),
        ),
    ),
    KernelMutant(
        "heads_by_modulo",
        "heads-in-groups",
        "decode_attention",
        (("(head * GROUP + offs_g)", "(head + offs_g * num_kv_heads)"),),
    ),
    KernelMutant(
        "scaled_twice", "decode", "paged_softmax", (("(LOG2_E * scale)", "(LOG2_E * scale * scale)"),)
    ),
    KernelMutant(
        "capped_after_masking",
        "soft-cap",
        "extend_attention",
        (
            (
                'tl.where(sees, scores, float("-inf"))',
                'tl.where(sees, scores, -LOG2_E * logit_cap if HAS_CAP else float("-inf"))',
            ),
        ),
    ),
    KernelMutant("first_slot_of_the_page_for_all", "decode", "paged_softmax", (("+ in_page\n", "\n"),)),
    KernelMutant(
        "causal_from_the_top_left",
        "extend",
        "extend_attention",
        (("query_positions = prefix_len + tokens", "query_positions = tokens"),),
    ),
    KernelMutant(
        "diagonal_tiles_unmasked",
        "extend",
        "extend_attention",
        (("(first_position + 1) // BLOCK_N", "(last_position + 1) // BLOCK_N"),),
    ),
    KernelMutant(
        "blind_rows_divide_by_zero",
        "tokens-without-visible-keys",
        "extend_attention",
        (("tl.where(total == 0.0, 1.0, total)", "total"),),
    ),
    KernelMutant(
        "sinks_of_the_first_group_for_all",
        "sinks",
        "decode_attention",
        (("sinks_ptr + head * GROUP", "sinks_ptr"),),
    ),
    KernelMutant(
        "sink_forgotten_where_keys_are_split",
        "sinks",
        "split_kv",
        ((" offs_g, offs_d, GROUP, HEAD_DIM, HAS_SINKS)", " offs_g, offs_d, GROUP, HEAD_DIM, False)"),),
    ),
    KernelMutant(
        "sink_of_a_tree_forgotten_where_keys_are_split",
        "fixed-shape",
        "tree_attention",
        (("total, sink, v_scale, HAS_SINKS)", "total, sink, v_scale, False)"),),
    ),
    KernelMutant(
        "cap_after_the_mask",
        "soft-cap",
        "extend_attention",
        (
            (
                'tl.where(sees, scores, float("-inf"))',
                'tl.where(sees, scores, -LOG2_E * logit_cap if HAS_CAP else float("-inf"))',
            ),
        ),
    ),
    KernelMutant(
        "out_forgotten",
        "output-given",
        "triton",
        (("attention_output(q, layer, out)", "attention_output(q, layer, None)"),),
    ),
)

SPLIT_MUTANTS = (
    KernelMutant("counter_not_reset", "", "split_kv", (("tl.store(counter_ptr, 0)", "pass"),)),
    KernelMutant(
        "sink_counted_for_each_part",
        "",
        "split_kv",
        (
            (
                "total * rescale + weight * factor",
                "total * rescale + weight * factor + tl.where(weight > 0,"
                " tl.exp2(tl.load(sinks_ptr + offs_g[:, None]) * LOG2_E - base), 0.0)",
            ),
        ),
    ),
)
"""Caught by the kernel's own tests: the contract asks for no sinks of requests that are long enough to be
split, and for no second step of them."""

FP8_MUTANTS = tuple(
    KernelMutant(f"fp8_{name}", "fp8-pool", file, ((before, after),))
    for name, file, before, after in (
        ("query_before", "fp8_decode_attention", "q_heads + next_request *", "q_heads + request *"),
        ("values_of_the_other_key", "fp8_tiles", "i // 2 * 8 + i % 2", "i // 2 * 8 + 1 - i % 2"),
        ("keys_beyond_the_end", "fp8_tiles", "(position < seq_len) & ", ""),
        ("window_forgotten", "fp8_tiles", " & (position >= first_key)", ""),
        ("sums_not_rescaled", "fp8_decode_attention", "* rescale0 + sum0", "+ sum0"),
    )
)
"""What decode attention over FP8 pools of 16-bit models catches."""
