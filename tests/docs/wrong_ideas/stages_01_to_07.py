# ruff: noqa: E501  (words of sources stay whole)
"""Wrong ideas in stages 01 to 07. The first of each stage is caught quickly."""

from tests.docs.wrong_ideas import wrong_idea as W

# fmt: off
W("01", "a step replaces the rows of the step before", "rows", "rows-in-order", "Are old rows replaced",
          (("return new.clone() if rows is None else torch.cat((rows, new))", "return new.clone()"),))
W("01", "new rows go in front", "rows", "rows-in-order", "are the new ones in front",
          (("torch.cat((rows, new))", "torch.cat((new, rows))"),))
W("01", "one list for all layers", "rows", "rows-in-order", "several layers go into one list",
          (("self._k[layer_id] = _joined(self._k[layer_id], k)",
            "self._k = [_joined(self._k[0], k)] * len(self._k)"),
           ("self._v[layer_id] = _joined(self._v[layer_id], v)",
            "self._v = [_joined(self._v[0], v)] * len(self._v)")))
W("01", "a reference to the caller's tensor is enough", "rows", "rows-are-copies", "is no copy",
          (("new.clone() if", "new if"),))
W("01", "a token counts once for each layer", "steps", "whole-tokens-count",
          "each token has a row in every layer", (("return min(0 if k is None else len(k) for k in self._k)",
            "return sum(0 if k is None else len(k) for k in self._k)"),))
W("01", "every step computes the whole text", "steps", "new-tokens-follow-the-rows",
          "only the tokens without rows", (("start = self.num_tokens\n", "start = 0\n"),))
W("01", "a step computes the last token, the first one too", "steps", "new-tokens-follow-the-rows",
          "The first pass computes the whole prompt", (("start = self.num_tokens\n", "start = len(token_ids) - 1\n"),))
W("01", "positions count the new tokens", "steps", "new-tokens-follow-the-rows", "not how many are new",
          (("list(range(start, len(token_ids)))", "list(range(len(token_ids) - start))"),))
W("01", "there is no need for a mask", "attention", "prompts-are-causal", "its successor",
          (("visible = visible.tril(num_rows - num_new)\n", "pass\n"),))
W("01", "the mask begins at the first key", "attention", "a-step-attends-to-all", "not of the first",
          (("visible.tril(num_rows - num_new)", "visible.tril()"),))
W("01", "KV heads are taken in turn", "attention", "heads-share-rows", "groups of neighbours",
          (("x.repeat_interleave(group_size, dim=0)", "x.repeat(group_size, 1, 1)"),))
W("02", "take rows while there are some, then see", "rows", "rows-short", "Count before you take",
          (("        if num_reqs > len(self._free_rows):\n            return None\n", ""),
           ("rows = [self._free_rows.popleft() for _ in range(num_reqs)]",
            "rows = [self._free_rows.popleft() for _ in range(min(num_reqs, len(self._free_rows)))]"),
           ("self._used_rows.update(rows)\n",
            "self._used_rows.update(rows)\n        if len(rows) < num_reqs:\n            return None\n")))
W("02", "a freed row is the next one taken", "rows", "rows-first-in-first-out", "to its end",
          (("self._free_rows.append(row)", "self._free_rows.appendleft(row)"),))
W("02", "moving slot by slot is the same", "store", "move-reads-before-it-writes",
          "overwritten before it is read", (("self._k[:, target_slots] = self._k[:, source_slots]",
            "for t, s in zip(target_slots, source_slots):\n            self._k[:, t] = self._k[:, s]"),
           ("self._v[:, target_slots] = self._v[:, source_slots]",
            "for t, s in zip(target_slots, source_slots):\n            self._v[:, t] = self._v[:, s]")))
W("02", "page n begins at slot n", "alloc", "every-slot-once", "begins at slot n * page_size",
          (("dtype=torch.int64, device=self.device) * self.page_size", "dtype=torch.int64, device=self.device)"),))
W("02", "a request always gets new pages", "extend", "extend-at-page-borders", "the rest of its last page",
          (("num_filled = min(seq_len, page_end) - prefix_len", "num_filled = 0"),
           ("num_left = max(seq_len - page_end, 0)", "num_left = seq_len - prefix_len"),
           ("num_new_pages += num_pages_of(seq_len, page_size) - num_pages_of(prefix_len, page_size)",
            "num_new_pages += num_pages_of(seq_len - prefix_len, page_size)")))
W("02", "the next request goes on in the same page", "extend", "extend-several",
          "does not go on in a page of another one",
          (("num_taken += round_up_to_page(num_left, page_size)", "num_taken += num_left"),))
W("02", "the last slot needs no check", "extend", "extend-checks-the-last-slot", "wrong last_loc",
          (("assert (last_loc + 1) % page_size == prefix_len % page_size, (", "assert True, ("),))
W("02", "each slot that is freed frees its page", "free", "free-whole-pages", "once, however many",
          (("pages = dict.fromkeys(slot // self.page_size for slot in slots.tolist())\n"
            "        not_used = pages.keys() - self._used_pages",
            "pages = [slot // self.page_size for slot in slots.tolist()]\n"
            "        not_used = set(pages) - self._used_pages"),))
W("02", "freeing twice does no harm", "free", "freed-twice", "given to two requests",
          (('assert not not_used, f"pages {sorted(not_used)} are not allocated"', "pass"),))
W("03", "a prompt has no token to give", "one request", "one-request", "the first output token",
          (("                requests.append_tokens(req, *tokens)\n",
            "                if i >= batch.num_extend_reqs:\n"
            "                    requests.append_tokens(req, *tokens)\n"),))
W("03", "a request that ended joins the others", "one request", "ends-at-once", "may have ended",
          (("if not req.finished and i < batch.num_extend_reqs:", "if i < batch.num_extend_reqs:"),))
W("03", "who runs goes first", "admission", "preemption", "prefill before decode",
          (("        prefill = self.get_new_batch_prefill()\n",
            "        if (decode := self.get_batch_decode()) is not None:\n            return decode\n"
            "        prefill = self.get_new_batch_prefill()\n"),))
W("03", "each chunk gives a token", "one request", "ends-at-once", "has no meaning",
          (("if req is requests.chunked_req:", "if False:"),))
W("03", "pages enter the cache at the end", "many requests", "in-batch-prefix", "still runs",
          (("                    tree_cache.cache_unfinished_req(req)\n                    requests.running.append(req)",
            "                    requests.running.append(req)"),))
W("03", "overdue requests end when they get a token", "admission", "waiting-timeout", "first of all",
          (("        requests.finish_overdue()\n", ""),))
W("03", "a retraction is bad luck", "shortage", "reserves-more-after-a-retraction", "too little was reserved",
          (("        self.new_token_ratio.raise_after_retraction(requests.running)\n", ""),))
W("03", "the ratio stays where it is", "shortage", "reserves-as-at-the-start-when-idle", "begins anew",
          (("            self.new_token_ratio.current = self.new_token_ratio.initial\n", "            pass\n"),))
W("03", "an error ends every request", "failures", "failing-forward", "no others",
          (("requests.finish_with_error(batch.reqs, error)",
            "requests.finish_with_error([*requests.running, *requests.waiting_queue], error)"),))
W("03", "KV of a NaN may stay", "failures", "nan-prompt", "leaves the cache",
          (("                if has_no_token and held_nan(req, self.parts.num_token_ids):\n                    self._discard(req)\n",
            "                pass\n"),))
W("03", "discard before the request has ended", "failures", "nan-prompt", "while a request locks",
          (("                requests.append_tokens(req, *tokens)\n",
            "                if i < batch.num_extend_reqs and tokens[0][0] < 0:\n                    self._discard(req)\n"
            "                requests.append_tokens(req, *tokens)\n"),
           ("                if has_no_token and held_nan(req, self.parts.num_token_ids):\n                    self._discard(req)\n",
            "                pass\n")))
W("04", "only free slots are memory", "budgets", "initial-budgets", "evictable",
          (("return self._num_free() - self.reserved_tokens",
            "return self.allocator.available_size() - self.reserved_tokens"),))
W("04", "a cached prefix is paid for", "admission", "a-cached-prefix-is-locked-and-not-paid-for",
          "not in the cache",
          (("        remaining = req.num_tokens - matched_len\n", "        remaining = req.num_tokens\n"),))
W("04", "a match needs no lock", "admission", "a-cached-prefix-is-locked-and-not-paid-for", "lock",
          (("        self.tree_cache.inc_lock_ref(match.last_node)\n", ""),))
W("04", "memory is checked once", "admission", "locking-the-prefix-counts", "again behind the lock",
          (("        if not self._fits(req, remaining):\n            self.tree_cache.dec_lock_ref(match.last_node)\n"
            "            return AddReqResult.NO_TOKEN\n", ""),))
W("04", "a refused request keeps its lock", "admission", "locking-the-prefix-counts", "undo the lock",
          (("            self.tree_cache.dec_lock_ref(match.last_node)\n", ""),))
W("04", "a prompt is cut anywhere", "admission", "a-long-prompt-is-cut-to-whole-pages", "at the end of a page",
          (("return max(round_down_to_page(limit, self.page_size), 0)", "return max(limit, 0)"),))
W("04", "a started prompt without budget is done", "chunks", "a-chunked-request-without-budget-is-parked", "waits",
          (("        if extend_len == 0:\n            return req\n", "        if extend_len == 0:\n            return None\n"),))
W("04", "a started prompt needs no memory", "chunks", "a-chunked-request-takes-no-more-memory-than-there-is",
          "whichever is smaller",
          (("limit = num_free if self.rem_chunk_tokens is None else min(num_free, self.rem_chunk_tokens)",
            "limit = self.rem_chunk_tokens"),))
W("04", "equal to the gap is enough", "preemption", "the-gap-must-be-exceeded", "more than the gap",
          (("if req.priority - r.priority > min_priority_gap]", "if req.priority - r.priority >= min_priority_gap]"),))
W("04", "everything less important goes", "preemption",
          "least-important-and-latest-first-as-few-as-suffice", "as few as suffice",
          (("victims = fewest_victims(less_important, num_needed - self.rem_total_tokens, self._reservation)",
            "victims = less_important"),))
W("04", "any request with these tokens will do", "shared prefixes", "prefixes-computed-now-are-waited-for", "namespace",
          (("            len(other.prefix_indices) == matched_len\n            and other.extra_key == key.extra_key\n            and other",
            "            other"),))
W("05", "a match may end inside a node", "split", "whole-pages", "ends inside an edge",
          (("                node = self._split(node, count)\n", "                break\n"),))
W("05", "the tree may keep the caller's slots", "split", "copies", "are a copy",
          ((".to(torch.int64, copy=True)", ""),))
W("05", "a lock is for one node", "lock", "long-keys-hold-short-ones", "leaves the nodes above evictable",
          (("        for each in self._path(node):\n            each.lock_ref += 1\n",
            "        if node is not self.root:\n            node.lock_ref += 1\n"),
           ("        for each in self._path(node):\n            assert each.lock_ref > 0",
            "        for each in self._path(node)[-1:]:\n            assert each.lock_ref > 0")))
W("05", "an unlock too many does no harm", "lock", "lock-below-zero", "takes the lock of another",
          (('            assert each.lock_ref > 0, f"node {each.number} is not locked"\n', ""),))
W("05", "the upper half begins unlocked", "split", "split-keeps-the-holder", "as many locks",
          (("upper.lock_ref, lower.parent = lower.lock_ref, upper", "lower.parent = upper"),))
W("05", "the lower half is the new node", "split", "split-keeps-the-holder", "must stay the lower half",
          (("        upper = self._new_node(lower.parent, lower.pages[:count], lower.slots[:num_tokens])\n",
            "        upper, above = lower, lower.parent\n"
            "        lower = self._new_node(upper, upper.pages[count:], upper.slots[num_tokens:])\n"
            "        lower.children = {k: v for k, v in upper.children.items() if v is not lower}\n"
            "        for child in lower.children.values():\n            child.parent = lower\n"
            "        upper.children = {lower.pages[0]: lower}\n"
            "        lower.created, lower.used, lower.hits = upper.created, upper.used, upper.hits\n"
            "        lower.priority, lower.lock_ref = upper.priority, upper.lock_ref\n"
            "        upper.pages, upper.slots = upper.pages[:count], upper.slots[:num_tokens]\n"
            "        return upper\n"),))
W("05", "an inner node may go", "evict", "parents-go-last", "Only leaves go",
          (("if not node.children and node.lock_ref == 0]", "if node.lock_ref == 0]"),))
W("05", "the slots of a leaf are free by themselves", "evict", "evicted-slots-come-back", "free again",
          (("            if self.allocator is not None:\n                self.allocator.free(leaf.slots)\n", ""),))
W("05", "eviction may take what is locked", "evict", "locked-nodes-stay", "Skip it",
          (("if not node.children and node.lock_ref == 0]", "if not node.children]"),))
W("05", "discard takes the whole path", "discard", "discards-the-rest", "before `start`",
          (("if begin >= start and node.lock_ref == 0:", "if node.lock_ref == 0:"),))
W("05", "discard takes locked nodes too", "discard", "discards-nothing-in-use", "in use",
          (("if begin >= start and node.lock_ref == 0:", "if begin >= start:"),))
W("05", "duplicates are freed first", "requests", "remapped-before-freed", "before the row's own duplicates",
          (("        shared = self._slots(node)\n        self.req_to_token_pool.write(req.req_pool_idx, 0, shared)\n"
            "        self.allocator.free(slots[req.cache_protected_len : prefix_len])\n",
            "        self.allocator.free(slots[req.cache_protected_len : prefix_len])\n"
            "        shared = self._slots(node)\n        self.req_to_token_pool.write(req.req_pool_idx, 0, shared)\n"),))
W("05", "the row keeps its own slots", "requests", "remapped-before-freed", "the tree's slots",
          (("        self.req_to_token_pool.write(req.req_pool_idx, 0, shared)\n", ""),))
W("05", "the partial page is the tree's", "requests", "prefill-is-cached", "partial page",
          (("self.allocator.free(torch.cat([slots[req.cache_protected_len : start], slots[end:]]))",
            "self.allocator.free(slots[req.cache_protected_len : start])"),))
W("06", "torch.multinomial draws", "draw", "neighbours-change-nothing", "one generator",
          (("    return (logits + noise).argmax(dim=-1)\n",
            "    return torch.multinomial(logits.exp().nan_to_num(0.0) + 1e-30, 1)[:, 0]\n"),))
W("06", "the seed alone makes the noise", "draw", "seed-and-position", "same token at every position",
          (("gumbel_noise(info.seeds[:, None], positions[:, None], token_ids)",
            "gumbel_noise(info.seeds[:, None], 0 * positions[:, None], token_ids)"),))
W("06", "dividing by a temperature is safe", "draw", "near-zero-temperature", "maximum first",
          (("return ((logits - max_logits) / temperatures[:, None]).masked_fill(logits == max_logits, 0.0)",
            "return logits / temperatures[:, None]"),))
W("06", "inf - inf is 0", "draw", "infinite-logits", "inf - inf is NaN",
          ((".masked_fill(logits == max_logits, 0.0)", ""),))
W("06", "the high bit is the first token", "masks", "vocab-mask", "low bit",
          (("(token_ids % 32).to(torch.int32)", "(31 - token_ids % 32).to(torch.int32)"),))
W("06", "penalties come last", "masks", "order-of-steps", "before masks",
          (("    if info.output_counts is not None:\n        logits = apply_penalties(logits, info)\n", ""),
           ("        logits = logits + info.logit_bias\n    return logits\n",
            "        logits = logits + info.logit_bias\n    if info.output_counts is not None:\n"
            "        logits = apply_penalties(logits, info)\n    return logits\n")))
W("06", "the token that crosses top_p goes", "filters", "filters-keep", "crosses top_p stays",
          (("before = weights.cumsum(dim=-1) - weights", "before = weights.cumsum(dim=-1)"),))
W("06", "noise goes by rank", "filters", "same-tokens-in-sequence", "not to its rank",
          (("        logits = torch.empty_like(logits).scatter(-1, ids_in_order, kept)\n",
            "        return ids_in_order.gather(-1, (kept + noise).argmax(-1, keepdim=True))[:, 0]\n"),))
W("06", "min_p is of the sum", "filters", "filters-keep", "the largest p",
          (("keep &= weights >= info.min_ps[:, None]", "keep &= weights >= info.min_ps[:, None] * total"),))
W("06", "NaN is looked for at the end", "bad rows", "hidden-nan", "before a mask",
          (("has_nan = logits.isnan().any(dim=-1)  # before masks can hide a NaN\n        logits = adjust(logits, info)",
            "logits = adjust(logits, info)\n        has_nan = logits.isnan().any(dim=-1)"),))
W("06", "log-probabilities are of the logits", "log-probabilities", "values", "scaled logits",
          (("logprobs_of(scaled,", "logprobs_of(logits,"),))
W("07", "the mask begins at the first key", "decode", "decode", "num_keys - num_queries",
          (("visible = visible.tril(num_keys - num_queries)", "visible = visible.tril()"),))
W("07", "K and V are read by the plan", "decode", "decode", "before the new K and V",
          (("plans.append(RequestPlan(slice(row, row + num_queries), slots, visible))",
            "plans.append(RequestPlan(slice(row, row + num_queries), slots, visible))\n"
            "            self.early = [(self.kv_pool.k_buffer(0).clone(), self.kv_pool.v_buffer(0).clone())]"),
           ("k, v = pool.k_buffer(layer.layer_id)[slots], pool.v_buffer(layer.layer_id)[slots]",
            "k, v = (x[slots] for x in self.early[0])")))
W("07", "all requests have as many keys as the first", "decode", "decode", "its own number of keys",
          (("table[forward_batch.req_pool_indices[i], :num_keys].long()",
            "table[forward_batch.req_pool_indices[i], : int(forward_batch.seq_lens[0])].long()"),))
W("07", "KV heads are taken in turn", "decode", "decode", "groups of neighbours",
          (("repeat_interleave(group_size, dim=0)", "repeat(group_size, 1, 1)"),))
W("07", "exp needs no maximum", "numbers", "extreme-scores", "largest score",
          (("weights = torch.softmax(scores, dim=-1)[..., : len(request.slots)]",
            "weights = scores.exp()\n        weights = (weights / weights.sum(-1, keepdim=True))[..., : len(request.slots)]"),))
W("07", "the dtype of q is good enough", "numbers", "accumulated-in-float32", "float32",
          (("dtype = torch.promote_types(q.dtype, torch.float32)", "dtype = q.dtype"),))
W("07", "a window of w has w tokens", "layers", "sliding-window", "and to the w tokens before it",
          (("in_window(request, layer.sliding_window)", "in_window(request, layer.sliding_window - 1)"),))
W("07", "the soft-cap hides masked keys too", "layers", "soft-cap", "before the mask",
          (("        if layer.logit_cap > 0:\n            scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap)\n", ""),
           ('        scores = scores.masked_fill(~visible, float("-inf"))\n',
            '        scores = scores.masked_fill(~visible, float("-inf"))\n        if layer.logit_cap > 0:\n'
            "            scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap)\n")))
W("07", "a query without a key is no case", "masks", "tokens-without-visible-keys", "gets zeros",
          (("        weights = weights.masked_fill(~visible, 0.0)\n", ""),))
