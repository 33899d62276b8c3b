"""Planted bugs in the optimized sampler: words of its kernels' source, changed."""

from __future__ import annotations

from tests.conformance.mutants.mutant import bugs_in

bug = bugs_in("sampler", "optimized.sampler:Sampler", folder="optimized.kernels.sampling.sampling_")

# fmt: off

# Whole rows in registers
bug("SmallTopPStopsOneLate", "The token after a sum of exactly top_p is kept as well: <= for <.",
    ("small", "(mass_before < enough)", "(mass_before <= enough)"))
bug("SmallTopLogprobsTakeTheLastOfTies", "The best tokens are listed highest id first where they tie.",
    ("small", "best_ids = lowest_id(left & (s == best[:, None]), ids, 1)",
     "best_ids = tl.max(tl.where(left & (s == best[:, None]), ids, -1), axis=1)"))

# Adjusted logits
bug("AdjustingHidesNan", "A NaN whose token is banned is lost.",
    ("adjust", "tl.where(raw != raw, raw, x)", "x"))
bug("AdjustingReadsMasksBackwards", "The bits of vocab_mask are read from the other end of each word.",
    ("adjust", "(ids % 32)[None, :]", "(31 - ids % 32)[None, :]"))
bug("AdjustingForgetsThePrompt", "The repetition penalty looks at the output only.",
    ("adjust", "            if given & 2:", "            if given & 2 == 0:"))

# Noise

# Rows that a temperature alone decides
bug("BoundsOfAnotherTemperature", "Bounds are those of temperature 1.",
    ("race", "rate = LOG2_E / tl.load(temperatures_ptr + row)", "rate = LOG2_E"))
bug("RaceTakesTheLastOfTies", "Of parts with equal scores, the last one that is computed gives the token.",
    ("race", "((score == best) & (best_id < token_id))", "(score == best)"))

# Large vocabularies
bug("BoundAboveTheKthLargest", "The bound is reached by half of the groups that it should be reached by.",
    ("gather", "if num_first >= k:", "if num_first >= k // 2:"))
bug("PickKeepsOneMore", "In gathered rows a token with top_k tokens before it is kept.",
    ("pick", "is_kept = count < top_k", "is_kept = count <= top_k"))
bug("GreedyTakesTheFirstSlice",
    "Greedy rows of a mixed batch take the lowest id among the slices' best, not only among the largest.",
    ("pick", "lowest_id(\n                is_largest & is_slice,", "lowest_id(\n                is_slice,"))

# Sequential filters
bug_of_order = bugs_in("sampler", "optimized.sampler:Sampler", folder="optimized.")
bug_of_order("OneRowMakesAllSequential", "A sequential row makes top_p a share of top_k in all rows.",
    ("sampler", "(ranks < info.top_ks[:, None]) | ~info.is_sequential[:, None]",
     "ranks < info.top_ks[:, None]"))
