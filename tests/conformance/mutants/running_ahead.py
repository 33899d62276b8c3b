"""Planted bugs in rounds that are launched ahead: words of their sources, changed."""

from __future__ import annotations

from diptych.reference.speculative.tree import TreeRound
from diptych.shared.sampling.sampling_batch import make_sampling_batch_info
from diptych.shared.speculation.node_sampling import expand_to_nodes, make_early_bans
from tests.conformance.mutants.optimized_scheduler import bug
from tests.conformance.mutants.speculation import speculating

# Where a round begins

# fmt: off
bug("BeginsWhereTheHostKnows", "The KV of the round in flight does not count.",
    ("speculative.round_batch", "seq_lens=starts.kv_lens + num_new", "seq_lens=starts.kv_lens"))
bug("NoEndByLength", "Who has all its tokens begins a round behind the slots that it owns.",
    ("speculative.round_batch",
     "torch.minimum(starts.is_round * run_lens, starts.last_starts - starts.kv_lens)",
     "starts.is_round * run_lens"))

# What is in flight
bug("CountsMissTheRun", "Penalties do not know the tokens of the round in flight.",
    ("speculative.chain", "        count_runs(info, runs)\n", ""))
bug("BansMissTheRun", "Stop tokens are banned for as many tokens more as are in flight.",
    ("speculative.chain", "num_left=bans.num_left - run_lens", "num_left=bans.num_left"))
bug("LeavesOldTokensBehindTheRun", "Behind a plain step's token stand those of an older round.",
    ("overlap.future_runs", "        self.token_ids[first : first + bs, n:] = -1\n", ""))
bug("StoresNoLengths", "Every round gives one token, as far as the next one knows.",
    ("overlap.future_runs", "self.lens[first : first + bs] = lens", "self.lens[first : first + bs] = 1"))

# What is kept
bug("AcceptedKVStaysWhereItIs", "Nodes of a tree are not moved behind the root.",
    ("speculative.tree", "self.parts.kv_pool.move(targets.flatten(), sources.flatten())", "pass"))
bug("CommitsOneToken", "The CPU counts one token of a round.",
    ("speculative.speculative_decoding", "req.kv_committed_len += num_kept", "req.kv_committed_len += 1"))
bug("FreesUnderARound",
    "Surplus slots are given back while the next round, already launched, writes to them.",
    ("speculative.speculative_decoding",
     "            req.kv_committed_len += num_kept\n",
     "            req.kv_committed_len += num_kept\n            page_size = "
     "self.parts.allocator.page_size\n            start, end = round_up_to_page(req.kv_committed_len, "
     "page_size), req.kv_allocated_len\n            if start < end:\n                "
     "self.parts.allocator.free(self.parts.req_to_token_pool.read(req.req_pool_idx, start, end))\n        "
     "    req.kv_allocated_len = req.kv_committed_len\n"))

# Who may run ahead
bug("GrammarsRunAhead", "A grammar is asked about a text without the round in flight.",
    ("speculative.speculative_decoding", "not any(req.needs_output for req in running)", "True"))
bug("PlainStepsKeepTheSurplus", "A plain step takes one more slot, where the request had some.",
    ("speculative.speculative_decoding", "            return None\n        self._give_back(reqs)\n",
     "            return None\n"))
# fmt: on


@speculating
class GrammarOfTheRoot(TreeRound):
    """At every node of a tree the tokens are allowed that may follow the root."""

    def _node_sampling_info(self, reqs, tree):
        num_token_ids = self.parts.num_token_ids
        info = make_sampling_batch_info(reqs, num_token_ids, "cpu")
        return expand_to_nodes(info, tree, make_early_bans(reqs, num_token_ids, "cpu"))
