"""Planted bugs in the optimized policies and prefill adder: words of their sources, changed."""

from __future__ import annotations

from tests.conformance.mutants.mutant import bugs_in

policy_bug = bugs_in("schedule_policy", "optimized.schedule_policy:SchedulePolicy", folder="optimized.")
adder_bug = bugs_in("prefill_adder", "optimized.prefill_adder:PrefillAdder", folder="optimized.")

# fmt: off

# Following the queue
policy_bug("NewcomersAheadOfEquals", "Among equals the newest comes first.",
           ("schedule_policy", "(*self.key(req), ticket)", "(*self.key(req), -ticket)"))
policy_bug("WhoLeftIsStillRouted", "A request with a routing key is ordered after it left.",
           ("schedule_policy", "del self._waiting[req.routing_key][req]", "pass"))
policy_bug("RareRoutesFirst", "The least frequent routing key goes first.",
           ("schedule_policy", "(-item[1], str(item[0]))", "(item[1], str(item[0]))"))
policy_bug("OthersTwice", "Requests whose key is running are given again with the others.",
           ("schedule_policy", "if req.routing_key not in counts", ""))

# Matches that are kept
policy_bug("InsertsAreMissed", "A match is not looked at again when the cache gets more of the prompt.",
           ("waiting_matches", "self._stale |= self._ending_at.get(parent, {}).pop(key, {})", "pass"))
policy_bug("TiesByNumber", "Children that weigh the same go in the order in which they were made.",
           ("waiting_forest", "return -len(self.tickets), self.tickets[0]",
            "return -len(self.tickets), self.node_id"))
policy_bug("NoRequestBelowChildren", "Requests below the root's children are not visited.",
           ("waiting_forest", "stack.append((entry[2], iter(list(entry[2].children))))",
            "stack.append((entry[2], iter(())))"))
policy_bug("SharersCrossNamespaces", "Requests of different namespaces wait for each other.",
           ("waiting_matches", "(req.extra_key, *token_ids[: self.shared_len])",
            "(*token_ids[: self.shared_len],)"))
policy_bug("SharersOfHalfAPage", "One token less in common is enough to be deferred.",
           ("waiting_matches", "self.shared_len = num_shared + tree_cache.is_bigram",
            "self.shared_len = num_shared - 1"))
policy_bug("CachedPrefixesArePutOff", "Requests wait for a prefix that the cache has.",
           ("waiting_matches", "if match.length <= self.check_threshold:", "if True:"))

# The adder
adder_bug("NeverLooksAgain", "Memory is not looked at again once a prefix is locked.",
          ("prefill_adder", "if matched_len > 0 and not", "if matched_len > 1000 and not"))
adder_bug("ReservesInOneSum", "A huge max_new_tokens reserves all of itself.",
          ("prefill_adder", "num_left.clip(0, CLIP_MAX_NEW_TOKENS)", "num_left"))
adder_bug("PreemptedStillReserve", "What preempted requests had reserved is not given back.",
          ("prefill_adder", "self.reserved_tokens -= sum(self._reservation(victim) for victim in victims)",
           "pass"))
adder_bug("SharedPrefixesAreFreed",
          "A prefix that other requests use counts as freed when one of them is preempted.",
          ("shared.scheduling.admission", "victim.kv_allocated_len - victim.cache_protected_len",
           "victim.kv_allocated_len"))
adder_bug("FillsAllOfIt", "A request that is cut gets all of its tokens to fill.",
          ("prefill_adder", "req.all_ids[: prefix_len + extend_len]", "req.all_ids"))
adder_bug("ForgetsToCharge", "What is added reserves nothing.",
          ("prefill_adder",
           "self.reserved_tokens += num_tokens + (_clipped_max_new(req) if is_last_chunk else 0)",
           "pass"))
adder_bug("WaitsAcrossNamespaces", "Requests of different namespaces wait for each other.",
          ("prefill_adder", "(extra_key, start, *token_ids", "(start, *token_ids"))
adder_bug("ForgetsTheCachedPart", "Requests that go on alike behind different prefixes wait for each other.",
          ("prefill_adder", "other.fill_key_ids[:matched_len] == before", "True"))
adder_bug("WaitsForPartOfAPage", "Less than a page is waited for, and never found in the cache.",
          ("prefill_adder", "round_up_to_page(max(threshold, 1), self.page_size)", "max(threshold, 1)"))
