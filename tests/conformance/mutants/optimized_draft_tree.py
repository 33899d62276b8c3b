"""Planted bugs in the optimized panel's draft trees: words of its kernels' source, changed."""

from __future__ import annotations

from tests.conformance.mutants.mutant import bugs_in

# No bug may write out of bounds.
bug = bugs_in("draft_tree", "optimized.speculative.draft_tree:DraftTreeOps", folder="optimized.kernels.")

# fmt: off

# Top tokens
bug("SlicesAreNotRescaled", "Sums of slices are added up though each is relative to its own maximum.",
    ("sampling.top_tokens", "sums * tl.exp(maxima - largest))", "sums)"))
bug("RowsOfNothingCount", "Where no token is possible, the probabilities are NaN.",
    ("sampling.top_tokens", "is_good = total >= 1.0", "is_good = total == total"))

# Beams
bug("ParentOfTheColumn", "Candidate a * K + c goes on from beam c.",
    ("draft.draft_beam_step", "(index // K)", "(index % K)"))

# Choosing nodes
bug("BoundIsTheBest", "The bound is one that a single candidate reaches.",
    ("draft.draft_select", "num_reaching >= NUM_CHOSEN", "num_reaching >= 1"))
bug("LastTiesAreChosen",
    "Of candidates that tie with the last, the last are nodes: children without their parents.",
    ("draft.draft_select", "tl.cumsum(ties, axis=0)", "tl.cumsum(ties, axis=0, reverse=True)"))

# Links
bug("PaddingHasTokens", "Whatever stands behind the nodes is taken for token ids.",
    ("draft.draft_link", "mask=nodes < num_nodes, other=0", "mask=nodes < NUM, other=0"))

# Mask

# Accepting
bug("AnyNodesToken", "A node with the right token follows, whosever child it is, if only it comes later.",
    ("draft.draft_accept", "(parents == child) & (token", "(nodes > child) & (token"))
bug("DepthIsOneMore", "The walk goes on when max_depth is reached.",
    ("draft.draft_accept", "num_accepted < MAX_DEPTH", "num_accepted <= MAX_DEPTH"))
