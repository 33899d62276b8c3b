"""Bugs planted in the text of the optimized panel's MoE and its kernels, each with what must catch it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

import pytest

from diptych.shared.interfaces import MoE

ROOT = Path(__file__).parents[3] / "optimized"
KERNELS = ("moe_act", "moe_topk", "moe_tiles", "moe_align", "moe_gemm", "moe_gemv", "moe_combine")


@dataclass(frozen=True)
class KernelMutant:
    """In `file`, `before`, which is there once, becomes `after`. `clause` of the contract catches it."""

    name: str
    clause: str
    file: str
    before: str
    after: str

    def build(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> type[MoE]:
        """The optimized MoE over changed copies of its modules."""
        prefix = f"mutant_{self.name}_"
        for path in (ROOT / "moe.py", *(ROOT / "kernels" / "moe" / f"{name}.py" for name in KERNELS)):
            text = path.read_text("utf-8")
            if path.stem == self.file:
                assert text.count(self.before) == 1, f"{self.name}: {text.count(self.before)} {self.before!r}"
                text = text.replace(self.before, self.after)
            for name in KERNELS:
                text = text.replace(f"diptych.optimized.kernels.moe.{name} ", f"{prefix}{name} ")
            (folder / f"{prefix}{path.stem}.py").write_text(text, "utf-8")
        monkeypatch.syspath_prepend(str(folder))
        impl: type[MoE] = importlib.import_module(f"{prefix}moe").MoE
        return impl


MUTANTS = (
    KernelMutant(
        "up_gets_the_bias_of_gate",
        "biases-and-clamps",
        "moe_gemm",
        "up += bias_of(bias_ptr, expert, INTER,",
        "up += bias_of(bias_ptr, expert, 0,",
    ),
    KernelMutant(
        "bias_of_the_first_choice_for_all",
        "biases-and-clamps",
        "moe_gemv",
        "y += choice_weights[j] * bias_of(bias_ptr, ids[j],",
        "y += choice_weights[j] * bias_of(bias_ptr, ids[0],",
    ),
    KernelMutant(
        "clamps_the_product",
        "biases-and-clamps",
        "moe_act",
        "up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)",
        "up = tl.minimum(up, LIMIT)",
    ),
    KernelMutant(
        "ties_go_to_the_last",
        "ties",
        "moe_topk",
        "tl.min(tl.where(is_largest, places, values.shape[0]), axis=0)",
        "tl.max(tl.where(is_largest, places, -1), axis=0)",
    ),
    KernelMutant(
        "bias_weighs",
        "bias-does-not-weigh",
        "moe_topk",
        "tl.reshape(scores, [length])",
        "tl.reshape(choice, [length])",
    ),
    KernelMutant(
        "a_group_is_its_best_expert",
        "routes",
        "moe_topk",
        "if BIASED and size > 1:",
        "if BIASED and size > 99:",
    ),
    KernelMutant(
        "groups_out_count_as_zero",
        "negative-choice",
        "moe_topk",
        'tl.where(is_kept[:, None], choice, float("-inf"))',
        "tl.where(is_kept[:, None], choice, 0.0)",
    ),
    KernelMutant(
        "normalises_over_all", "renormalised", "moe_topk", "tl.where(ranks < TOP_K, weights, 0.0)", "weights"
    ),
    KernelMutant(
        "second_best_of_a_group_is_its_best",
        "routes",
        "moe_topk",
        'tl.where(slots == place[:, None], float("-inf"), choice)',
        "choice",
    ),
    KernelMutant("never_scales", "routes", "moe_topk", "ranks, weights * scale", "ranks, weights"),
    KernelMutant(
        "places_from_1_on",
        "fused-experts",
        "moe_align",
        "tl.cumsum(is_expert, axis=0) - 1",
        "tl.cumsum(is_expert, axis=0)",
    ),
    KernelMutant(
        "blocks_one_too_few",
        "fused-experts",
        "moe_align",
        "tl.cdiv(counts, BLOCK_SIZE)",
        "counts // BLOCK_SIZE",
    ),
    KernelMutant(
        "end_of_a_block_is_pair_0",
        "fused-experts",
        "moe_align",
        "tl.store(own_pairs + rest, num_pairs,",
        "tl.store(own_pairs + rest, 0,",
    ),
    KernelMutant(
        "up_before_gate",
        "fused-experts",
        "moe_gemm",
        "gated(gate, up, LIMIT)",
        "gated(up, gate, LIMIT)",
    ),
    KernelMutant(
        "rows_are_pairs", "fused-experts", "moe_gemm", "(pairs // TOP_K).to(tl.int64)", "pairs.to(tl.int64)"
    ),
    KernelMutant("unweighted", "fused-experts", "moe_gemm", "acc * weights[:, None]", "acc"),
    KernelMutant(
        "weighted_after_rounding",
        "weights-in-float32",
        "moe_gemm",
        "rounded(acc * weights[:, None], out_ptr.dtype.element_ty)",
        "rounded(acc, out_ptr.dtype.element_ty) * rounded(weights, out_ptr.dtype.element_ty)[:, None]",
    ),
    KernelMutant(
        "padding_results_are_added",
        "padding",
        "moe_combine",
        "mask=has_expert & (offs < HIDDEN)",
        "mask=(choices < TOP_K) & (offs < HIDDEN)",
    ),
    KernelMutant(
        "few_are_the_first_token",
        "fused-experts",
        "moe_gemv",
        "(pair // TOP_K).to(tl.int64)",
        "(pair * 0).to(tl.int64)",
    ),
    KernelMutant(
        "few_forget_gate_is_half",
        "fused-experts",
        "moe_gemv",
        "row = (p % 2) * INTER + p // 2\n            weights",
        "row = p // 2\n            weights",
    ),
    KernelMutant(
        "few_add_padding_weight",
        "padding",
        "moe_gemv",
        "mask=expert >= 0, other=0.0)",
        "mask=expert >= -1, other=0.0)",
    ),
)
