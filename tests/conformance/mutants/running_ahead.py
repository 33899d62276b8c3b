"""Planted bugs in rounds that are launched ahead: words of their sources, changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from diptych.reference.speculative.tree import TreeRound
from diptych.shared.sampling.sampling_batch import make_sampling_batch_info
from diptych.shared.speculation.node_sampling import expand_to_nodes, make_early_bans
from tests.conformance.mutants.mutant import Mutant
from tests.conformance.mutants.optimized_scheduler import changed
from tests.conformance.mutants.speculation import speculating

AHEAD = ("scheduler.speculation_ahead",)


def ahead(impl: type[Any]) -> Mutant:
    assert impl.__doc__, f"{impl.__name__}: say what goes wrong"
    return Mutant("scheduler", impl.__name__, impl, AHEAD)


def asking_grammars(impl: type[TreeRound]) -> Mutant:
    return replace(speculating(impl), first=AHEAD)


# Where a round begins


@ahead
class BeginsWhereTheHostKnows(
    changed("round_batch", "seq_lens=starts.kv_lens + num_new", "seq_lens=starts.kv_lens")
):
    """The KV of the round in flight does not count."""


@ahead
class WritesWhereTheRoundBeforeDid(
    changed(
        "round_batch",
        "columns = num_new[:, None] + self.numbers",
        "columns = 0 * num_new[:, None] + self.numbers",
    )
):
    """The slots are those of the round in flight."""


@ahead
class EveryBatchAddsKV(
    changed(
        "round_batch",
        "torch.minimum(starts.is_round * run_lens,",
        "torch.minimum((starts.places > 0) * run_lens,",
    )
):
    """KV of a prefill in flight, which the CPU counts already, is counted again."""


@ahead
class NoEndByLength(
    changed(
        "round_batch",
        "torch.minimum(starts.is_round * run_lens, starts.last_starts - starts.kv_lens)",
        "starts.is_round * run_lens",
    )
):
    """Who has all its tokens begins a round behind the slots that it owns."""


@ahead
class RootsThatTheHostKnows(
    changed(
        "round_batch",
        "torch.where(starts.places > 0, newest,",
        "torch.where(starts.places < 0, newest,",
    )
):
    """A round in flight gives no root."""


@ahead
class BoundOfAPlainStep(
    changed("speculative", "req.kv_committed_len + self.max_kept", "req.kv_committed_len + 1")
):
    """Slots are allocated as if a round gave one token."""


@ahead
class SlotsForTheTreeOnly(
    changed("speculative", "return self._bound(req) + self.num_slots", "return self._bound(req) + 1")
):
    """A round has one slot to draft in."""


# What is in flight


@ahead
class CountsMissTheRun(changed("chain", "        count_runs(info, runs)\n", "")):
    """Penalties do not know the tokens of the round in flight."""


@ahead
class CountsOneTokenOfTheRun(changed("chain", "count_runs(info, runs)", "count_runs(info, runs[:, :1])")):
    """Penalties know the first token of the round in flight."""


@ahead
class BansMissTheRun(changed("chain", "num_left=bans.num_left - run_lens", "num_left=bans.num_left")):
    """Stop tokens are banned for as many tokens more as are in flight."""


@ahead
class LeavesOldTokensBehindTheRun(
    changed("future_runs", "        self.token_ids[first : first + bs, n:] = -1\n", "")
):
    """Behind a plain step's token stand those of an older round."""


@ahead
class StoresNoLengths(
    changed("future_runs", "self.lens[first : first + bs] = lens", "self.lens[first : first + bs] = 1")
):
    """Every round gives one token, as far as the next one knows."""


# What is kept


@ahead
class AcceptedKVStaysWhereItIs(
    changed("tree", "self.parts.kv_pool.move(targets.flatten(), sources.flatten())", "pass")
):
    """Nodes of a tree are not moved behind the root."""


@ahead
class PaddingOverwritesWithTheRoot(
    changed(
        "tree",
        "        sources = torch.where(is_behind[:, 1:], targets, sources)\n",
        "        targets = torch.where(is_behind[:, 1:], targets.roll(1, 1), targets)\n",
    )
):
    """What stands behind a path is moved over it."""


@ahead
class TellsOfPadding(changed("chain", "num_kept=num_kept)\n", "num_kept=None)\n")):
    """The drafter takes padding for accepted tokens."""


@ahead
class TellsHiddenStatesOfTheFirstNodes(
    changed(
        "chain",
        "states[rows],",
        "states[self.batches.rows_of(tree, nodes * 0 + torch.arange(nodes.shape[1]))],",
    )
):
    """The drafter gets the hidden states of as many first nodes."""


@ahead
class LooksAtTheTreeTooLate(
    changed("chain", "depths[:, None]], dim=1)", "tree.depths.amax(dim=1)[:, None]], dim=1)")
):
    """The depth of a tree is read when the drafter has it back."""


@ahead
class CommitsOneToken(
    changed("speculative", "req.kv_committed_len += num_kept", "req.kv_committed_len += 1")
):
    """The CPU counts one token of a round."""


@ahead
class KeepsWhatIsBehindTheEnd(
    changed("base", "req.kv_committed_len -= len(token_ids) - num_new", "req.kv_committed_len -= 0")
):
    """KV of tokens behind a stop token is cached under no tokens."""


@ahead
class ForgetsItsSurplus(
    changed(
        "speculative",
        "            req.kv_committed_len += num_kept\n",
        """            req.kv_committed_len += num_kept
            req.kv_allocated_len = req.kv_committed_len
""",
    )
):
    """After each round the slots behind the KV have no owner."""


@ahead
class FreesUnderARound(
    changed(
        "speculative",
        "            req.kv_committed_len += num_kept\n",
        """            req.kv_committed_len += num_kept
            page_size = self.parts.allocator.page_size
            start, end = round_up_to_page(req.kv_committed_len, page_size), req.kv_allocated_len
            if start < end:
                self.parts.allocator.free(self.parts.req_to_token_pool.read(req.req_pool_idx, start, end))
            req.kv_allocated_len = req.kv_committed_len
""",
    )
):
    """Surplus slots are given back while the next round, already launched, writes to them."""


# Who may run ahead


@ahead
class GrammarsRunAhead(changed("speculative", "not any(req.needs_output for req in running)", "True")):
    """A grammar is asked about a text without the round in flight."""


@ahead
class EverybodyRunsAhead(
    changed(
        "chain",
        "self.drafter.runs_ahead and parts.model_runner.accepts_seq_len_upper_bounds",
        "True",
    )
):
    """A drafter that reads tokens on the CPU is called before they are there."""


@ahead
class PlainStepsInTheDark(
    changed(
        "speculative",
        """        if any(map(self.is_in_round, reqs)):
            return None
        self._give_back(reqs)
""",
        """        self._give_back([req for req in reqs if not self.is_in_round(req)])
""",
    )
):
    """A plain step follows a round before it is known how much that kept."""


@ahead
class PlainStepsKeepTheSurplus(
    changed(
        "speculative", "            return None\n        self._give_back(reqs)\n", "            return None\n"
    )
):
    """A plain step takes one more slot, where the request had some."""


@asking_grammars
class GrammarOfTheRoot(TreeRound):
    """At every node of a tree the tokens are allowed that may follow the root."""

    def _node_sampling_info(self, reqs, tree):
        num_token_ids = self.parts.num_token_ids
        info = make_sampling_batch_info(reqs, num_token_ids, "cpu")
        return expand_to_nodes(info, tree, make_early_bans(reqs, num_token_ids, "cpu"))
