"""Planted bugs in the optimized panel's MoE and its kernels: words of their sources, changed."""

from __future__ import annotations

from tests.conformance.mutants.mutant import bugs_in

bug = bugs_in("moe", "optimized.moe:MoE", folder="optimized.kernels.moe.")

# fmt: off
bug("BiasOfTheFirstChoiceForAll", "Bias of the first choice for all.",
    ("moe_gemv", "y += choice_weights[j] * bias_of(bias_ptr, ids[j],",
     "y += choice_weights[j] * bias_of(bias_ptr, ids[0],"))
bug("TiesGoToTheLast", "Ties go to the last.",
    ("moe_topk", "tl.min(tl.where(is_largest, places, values.shape[0]), axis=0)",
     "tl.max(tl.where(is_largest, places, -1), axis=0)"))
bug("BiasWeighs", "Bias weighs.",
    ("moe_topk", "tl.reshape(scores, [length])", "tl.reshape(choice, [length])"))
bug("GroupsOutCountAsZero", "Groups out count as zero.",
    ("moe_topk", 'tl.where(is_kept[:, None], choice, float("-inf"))',
     "tl.where(is_kept[:, None], choice, 0.0)"))
bug("NormalisesOverAll", "Normalises over all.",
    ("moe_topk", "tl.where(ranks < TOP_K, weights, 0.0)", "weights"))
bug("SecondBestOfAGroupIsItsBest", "Second best of a group is its best.",
    ("moe_topk", 'tl.where(slots == place[:, None], float("-inf"), choice)', "choice"))
bug("RowsArePairs", "Rows are pairs.", ("moe_gemm", "(pairs // TOP_K).to(tl.int64)", "pairs.to(tl.int64)"))
bug("WeightedAfterRounding", "Weighted after rounding.",
    ("moe_gemm", "rounded(acc * weights[:, None], out_ptr.dtype.element_ty)",
     "rounded(acc, out_ptr.dtype.element_ty) * rounded(weights, out_ptr.dtype.element_ty)[:, None]"))
bug("PaddingResultsAreAdded", "Padding results are added.",
    ("moe_combine", "mask=has_expert & (offs < HIDDEN)", "mask=(choices < TOP_K) & (offs < HIDDEN)"))
bug("FewForgetGateIsHalf", "Few forget gate is half.",
    ("moe_gemv", "row = (p % 2) * INTER + p // 2\n            weights", "row = p // 2\n            weights"))
