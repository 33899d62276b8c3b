"""Planted bugs in the optimized policies and prefill adder: words of their sources, changed."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import diptych.optimized.prefill_adder as adder
import diptych.optimized.schedule_policy as policy
import diptych.optimized.waiting_forest as forest
import diptych.optimized.waiting_matches as matches
from tests.conformance.mutants.mutant import mutant_of


def changed(module: ModuleType, before: str, after: str) -> dict[str, Any]:
    """The names of a module in whose source `before`, which is there once, became `after`."""
    source = Path(str(module.__file__)).read_text("utf-8")
    assert source.count(before) == 1, f"{source.count(before)} times: {before!r}"
    names: dict[str, Any] = {"__name__": module.__name__}
    exec(source.replace(before, after), names)
    return names


def policy_with(before: str, after: str) -> Any:
    return changed(policy, before, after)["SchedulePolicy"]


def matches_with(before: str, after: str) -> Any:
    """The policy over changed matches."""
    names: dict[str, Any] = {"__name__": policy.__name__}
    exec(Path(str(policy.__file__)).read_text("utf-8"), names)
    names["WaitingMatches"] = changed(matches, before, after)["WaitingMatches"]
    return names["SchedulePolicy"]


def forest_with(before: str, after: str) -> Any:
    """The policy over matches with a changed depth-first order."""
    own: dict[str, Any] = {"__name__": matches.__name__}
    exec(Path(str(matches.__file__)).read_text("utf-8"), own)
    own["Forest"] = changed(forest, before, after)["Forest"]
    names: dict[str, Any] = {"__name__": policy.__name__}
    exec(Path(str(policy.__file__)).read_text("utf-8"), names)
    names["WaitingMatches"] = own["WaitingMatches"]
    return names["SchedulePolicy"]


def adder_with(before: str, after: str) -> Any:
    return changed(adder, before, after)["PrefillAdder"]


# Following the queue


@mutant_of("schedule_policy")
class NewcomersAheadOfEquals(policy_with("(*self.key(req), ticket)", "(*self.key(req), -ticket)")):
    """Among equals the newest comes first."""


@mutant_of("schedule_policy")
class WhoLeftIsStillRouted(policy_with("del self._waiting[req.routing_key][req]", "pass")):
    """A request with a routing key is ordered after it left."""


@mutant_of("schedule_policy")
class RareRoutesFirst(policy_with("(-item[1], str(item[0]))", "(item[1], str(item[0]))")):
    """The least frequent routing key goes first."""


@mutant_of("schedule_policy")
class OthersTwice(policy_with("if req.routing_key not in counts", "")):
    """Requests whose key is running are given again with the others."""


# Matches that are kept


@mutant_of("schedule_policy")
class InsertsAreMissed(matches_with("self._stale |= self._ending_at.get(parent, {}).pop(key, {})", "pass")):
    """A match is not looked at again when the cache gets more of the prompt."""


@mutant_of("schedule_policy")
class EvictionsAreMissed(matches_with("            self._stale |= reqs", "            pass")):
    """A match is not looked at again when its last node is evicted."""


@mutant_of("schedule_policy")
class SplitsAreMissed(forest_with("self._unlist(lower)\n        self._list(upper)", "return")):
    """A node that was split keeps its old parent."""


@mutant_of("schedule_policy")
class FlushIsMissed(matches_with("self._stale = dict.fromkeys(self.by_req)", "self._stale = {}")):
    """Matches outlive the tree."""


@mutant_of("schedule_policy")
class ResetKeepsNumbers(matches_with("match.node_id = NO_NODE", "pass")):
    """Requests are looked for at numbers of nodes that no longer stand for anything."""


@mutant_of("schedule_policy")
class TiesByNumber(
    forest_with("return -len(self.tickets), self.tickets[0]", "return -len(self.tickets), self.node_id")
):
    """Children that weigh the same go in the order in which they were made."""


@mutant_of("schedule_policy")
class NoRequestBelowChildren(
    forest_with(
        "stack.append((entry[2], iter(list(entry[2].children))))",
        "stack.append((entry[2], iter(())))",
    )
):
    """Requests below the root's children are not visited."""


@mutant_of("schedule_policy")
class SharersCrossNamespaces(
    matches_with("(req.extra_key, *token_ids[: self.shared_len])", "(*token_ids[: self.shared_len],)")
):
    """Requests of different namespaces wait for each other."""


@mutant_of("schedule_policy")
class SharersOfHalfAPage(
    matches_with("self.shared_len = num_shared + tree_cache.is_bigram", "self.shared_len = num_shared - 1")
):
    """One token less in common is enough to be deferred."""


@mutant_of("schedule_policy")
class LeadersStayPutOff(matches_with("self.deprioritized.discard(self.by_ticket[tickets[0]].rid)", "pass")):
    """The first request after the first one left is deferred for ever."""


@mutant_of("schedule_policy")
class CachedPrefixesArePutOff(matches_with("if match.length <= self.check_threshold:", "if True:")):
    """Requests wait for a prefix that the cache has."""


@mutant_of("schedule_policy")
class PairsAreTokens(
    matches_with("self.page_len = page_size + tree_cache.is_bigram", "self.page_len = page_size")
):
    """In a cache of pairs of tokens, pages are looked for by one token too few."""


# The adder


@mutant_of("prefill_adder")
class NeverLooksAgain(adder_with("if matched_len > 0 and not", "if matched_len > 1000 and not")):
    """Memory is not looked at again once a prefix is locked."""


@mutant_of("prefill_adder")
class ReservesInOneSum(adder_with("num_left.clip(0, CLIP_MAX_NEW_TOKENS)", "num_left")):
    """A huge max_new_tokens reserves all of itself."""


@mutant_of("prefill_adder")
class PreemptedStillReserve(
    adder_with("self.reserved_tokens -= sum(self._reservation(victim) for victim in victims)", "pass")
):
    """What preempted requests had reserved is not given back."""


@mutant_of("prefill_adder")
class SharedPrefixesAreFreed(
    adder_with("victim.kv_allocated_len - victim.cache_protected_len", "victim.kv_allocated_len")
):
    """A prefix that other requests use counts as freed when one of them is preempted."""


@mutant_of("prefill_adder")
class FillsAllOfIt(adder_with("req.all_ids[: prefix_len + extend_len]", "req.all_ids")):
    """A request that is cut gets all of its tokens to fill."""


@mutant_of("prefill_adder")
class ForgetsToCharge(
    adder_with("self.reserved_tokens += num_tokens + (_clipped_max_new(req) if is_last_chunk else 0)", "pass")
):
    """What is added reserves nothing."""


@mutant_of("prefill_adder")
class WaitsAcrossNamespaces(adder_with("(extra_key, start, *token_ids", "(start, *token_ids")):
    """Requests of different namespaces wait for each other."""


@mutant_of("prefill_adder")
class ForgetsTheCachedPart(adder_with("other.fill_ids[:matched_len] == before", "True")):
    """Requests that go on alike behind different prefixes wait for each other."""


@mutant_of("prefill_adder")
class WaitsForPartOfAPage(
    adder_with("round_up_to_page(max(threshold, 1), self.page_size)", "max(threshold, 1)")
):
    """Less than a page is waited for, and never found in the cache."""


@mutant_of("prefill_adder")
class ChunkedPrefixesAreMissed(
    adder_with("first = self._first_computed(req.fill_ids", "first = self._first_computed(req.all_ids")
):
    """A request waits for tokens behind the end of a chunk."""
