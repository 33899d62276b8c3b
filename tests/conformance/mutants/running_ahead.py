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
bug("WritesWhereTheRoundBeforeDid", "The slots are those of the round in flight.",
    ("speculative.round_batch", "columns = num_new[:, None] + self.numbers",
     "columns = 0 * num_new[:, None] + self.numbers"))
bug("EveryBatchAddsKV", "KV of a prefill in flight, which the CPU counts already, is counted again.",
    ("speculative.round_batch", "torch.minimum(starts.is_round * run_lens,",
     "torch.minimum((starts.places > 0) * run_lens,"))
bug("NoEndByLength", "Who has all its tokens begins a round behind the slots that it owns.",
    ("speculative.round_batch",
     "torch.minimum(starts.is_round * run_lens, starts.last_starts - starts.kv_lens)",
     "starts.is_round * run_lens"))
bug("RootsThatTheHostKnows", "A round in flight gives no root.",
    ("speculative.round_batch", "torch.where(starts.places > 0, newest,",
     "torch.where(starts.places < 0, newest,"))
bug("BoundOfAPlainStep", "Slots are allocated as if a round gave one token.",
    ("speculative.speculative_decoding", "req.kv_committed_len + self.max_kept", "req.kv_committed_len + 1"))
bug("SlotsForTheTreeOnly", "A round has one slot to draft in.",
    ("speculative.speculative_decoding", "return self._bound(req) + self.num_slots",
     "return self._bound(req) + 1"))

# What is in flight
bug("CountsMissTheRun", "Penalties do not know the tokens of the round in flight.",
    ("speculative.chain", "        count_runs(info, runs)\n", ""))
bug("CountsOneTokenOfTheRun", "Penalties know the first token of the round in flight.",
    ("speculative.chain", "count_runs(info, runs)", "count_runs(info, runs[:, :1])"))
bug("BansMissTheRun", "Stop tokens are banned for as many tokens more as are in flight.",
    ("speculative.chain", "num_left=bans.num_left - run_lens", "num_left=bans.num_left"))
bug("LeavesOldTokensBehindTheRun", "Behind a plain step's token stand those of an older round.",
    ("overlap.future_runs", "        self.token_ids[first : first + bs, n:] = -1\n", ""))
bug("StoresNoLengths", "Every round gives one token, as far as the next one knows.",
    ("overlap.future_runs", "self.lens[first : first + bs] = lens", "self.lens[first : first + bs] = 1"))

# What is kept
bug("AcceptedKVStaysWhereItIs", "Nodes of a tree are not moved behind the root.",
    ("speculative.tree", "self.parts.kv_pool.move(targets.flatten(), sources.flatten())", "pass"))
bug("PaddingOverwritesWithTheRoot", "What stands behind a path is moved over it.",
    ("speculative.tree", "        sources = torch.where(is_behind[:, 1:], targets, sources)\n",
     "        targets = torch.where(is_behind[:, 1:], targets.roll(1, 1), targets)\n"))
bug("TellsOfPadding", "The drafter takes padding for accepted tokens.",
    ("speculative.chain", "num_kept=num_kept)\n", "num_kept=None)\n"))
bug("TellsHiddenStatesOfTheFirstNodes", "The drafter gets the hidden states of as many first nodes.",
    ("speculative.chain", "states[rows],",
     "states[self.batches.rows_of(tree, nodes * 0 + torch.arange(nodes.shape[1]))],"))
bug("LooksAtTheTreeTooLate", "The depth of a tree is read when the drafter has it back.",
    ("speculative.chain", "depths[:, None]], dim=1)", "tree.depths.amax(dim=1)[:, None]], dim=1)"))
bug("CommitsOneToken", "The CPU counts one token of a round.",
    ("speculative.speculative_decoding", "req.kv_committed_len += num_kept", "req.kv_committed_len += 1"))
bug("KeepsWhatIsBehindTheEnd", "KV of tokens behind a stop token is cached under no tokens.",
    ("shared.scheduling.lifecycle", "req.kv_committed_len -= len(token_ids) - num_new",
     "req.kv_committed_len -= 0"))
bug("ForgetsItsSurplus", "After each round the slots behind the KV have no owner.",
    ("speculative.speculative_decoding",
     "            req.kv_committed_len += num_kept\n",
     "            req.kv_committed_len += num_kept\n            req.kv_allocated_len = "
     "req.kv_committed_len\n"))
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
bug("EverybodyRunsAhead", "A drafter that reads tokens on the CPU is called before they are there.",
    ("speculative.chain", "self.drafter.runs_ahead and parts.model_runner.accepts_seq_len_upper_bounds",
     "True"))
bug("PlainStepsInTheDark", "A plain step follows a round before it is known how much that kept.",
    ("speculative.speculative_decoding",
     "        if any(map(self.is_in_round, reqs)):\n            return None\n        "
     "self._give_back(reqs)\n",
     "        self._give_back([req for req in reqs if not self.is_in_round(req)])\n"))
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
