"""Wrong ideas in stages 08 to 14. The first of each stage is caught quickly."""

from tests.docs.wrong_ideas import wrong_idea as W

_ROWS = "hidden if is_verify else hidden[forward_batch.last_token_rows]"
_PADDING = '1 if name == "seq_lens" else 0  #'

# ruff: noqa: E501
# fmt: off
W("08", "logits are computed for every token of a prompt",
  "forward", "last-token-logits", "Logits of every token", ((_ROWS, "hidden"),))
W("08", "steps that verify drafts read the last token, as others do",
  "forward", "verify-logits", "of every node", ((_ROWS, "hidden[forward_batch.last_token_rows]"),))
W("08", "prompts need no log-probabilities", "forward", "input-logprobs", "how likely its own tokens",
  (("if forward_batch.input_logprob_rows is not None:", "if False:"),))
W("08", "slot -1 means no slot", "padding", "decode-writes-its-slots", "Slot -1 is the last slot",
  ((_PADDING, '1 if name == "seq_lens" else -1 if name == "out_cache_loc" else 0  #'),))
W("08", "rows behind the batch do not matter: they keep what they held",
  "padding", "decode-writes-its-slots", "a slot of an earlier batch",
  (("            head[num:] = " + _PADDING + " slot 0 and row 0 are the dummy page's\n", ""),))
W("08", "the rows of the padding are part of the result",
  "padding", "decode-logits", "only the batch's own rows",
  (("output.next_token_logits[:num]", "output.next_token_logits"),))
W("08", "there is a graph for every batch", "padding", "decode-logits", "larger than every size",
  (("if size >= batch.batch_size), None)", "if size >= batch.batch_size))"),))
W("08", "positions follow from the lengths, so they are not copied",
  "padding", "decode-logits", "Every field of the batch",
  (("            head[:num] =", '            if name != "positions":\n                head[:num] ='),))
W("08", "a row of the head is a token", "sampling", "sampled-tokens", "more rows than there are tokens",
  (("output.next_token_logits[:, :num_token_ids]", "output.next_token_logits"),))
W("08", "a token is sampled behind the end of its request, also at nodes",
  "sampling", "sampled-nodes", "each node has its own",
  (("info, forward_batch.sampled_positions", "info, forward_batch.seq_lens - 1"),))
W("09", "a step ends when its own tokens are known", "one request", "tokens-of-a-step", "in flight",
  (("self._catch_up(num_ahead if is_launched else 0)", "self._catch_up(0)"),))
W("09", "what is in flight will be processed in time", "one request", "one-request", "last tokens",
  (("self._catch_up(num_ahead if is_launched else 0)", "self._catch_up(num_ahead)"),))
W("09", "the newest batch is processed first", "one request", "one-request", "oldest batch",
  (("oldest = batches[0]", "oldest = batches[-1]"), ("batches.popleft()", "batches.pop()")))
W("09", "a prompt is cached when its token is known",
  "one request", "ends-at-once", "before its results are known", (("            self.parts.tree_cache.cache_unfinished_req(req)\n", ""),))
W("09", "a request runs as soon as a chunk of it has run", "one request", "ends-at-once", "goes on",
  (("            if req is not requests.chunked_req:\n                requests.running.append(req)",
    "            requests.running.append(req)"),))
W("09", "tokens that arrive belong to a request that is there", "one request", "stop-token", "has left",
  (("            if batch.rows.pop(req, None) is not None:\n                self.requests",
    "            batch.rows.pop(req, None)\n            if True:\n                self.requests"),))
W("09", "without slots, requests are retracted at once",
  "shortage", "looks-before-it-retracts", "may end requests",
  (("return None if self.pipeline else self._retract_to_decode()", "return self._retract_to_decode()"),))
W("09", "slots will be free in the next step", "shortage", "shortage-retracts", "Nothing else frees",
  (("return None if self.pipeline else self._retract_to_decode()", "return None"),))
W("09", "an error of the model ends the loop",
  "failures", "failing-forward", "ends its requests", (("            self._fail(batch, error)\n            return False", "            raise"),))
W("09", "one batch may always be in flight",
  "speculation", "any-shape", "in each step", (("num_ahead = self._num_ahead()", "num_ahead = 1"),))
W("09", "a step gives a request one token", "many requests", "steps-together", "whole list",
  (("req, token_ids, logprobs)\n            if token", "req, token_ids[:1], logprobs[:1])\n            if token"),))

W("10", "the probabilities of the candidates add up to 1",
  "candidates", "top-tokens", "over the whole vocabulary", (("return TopTokens(probs.masked_fill",
    "probs = probs / probs.sum(-1, keepdim=True)\n        return TopTokens(probs.masked_fill"),))
W("10", "the score of a candidate is its own probability", "candidates", "next-beams", "of its whole path",
  (("(beams.scores[:, :, None] * top.probs).flatten(1)", "top.probs.flatten(1)"),))
W("10", "the parent of candidate number n is n modulo K",
  "candidates", "next-beams", "number // K", (("indices // k, indices", "indices % k, indices"),))
W("10", "a node attends to all nodes before it, as in a chain", "links", "from-parents", "not its siblings",
  (("            visible[:, n, n] = True\n", "            visible[:, n, : n + 1] = True\n"),))
W("10", "the children of a node are linked last first", "links", "from-parents", "ascending order",
  (("for n in reversed(range(1, num)):", "for n in range(1, num):"),))
W("10", "without a matching child nothing is gained", "acceptance", "accept", "bonus token",
  (("[[samples[b][n] for n in path] for", "[[samples[b][n] for n in path[:-1]] for"),))
W("10", "a draft is right if it is the most likely child", "acceptance", "accept", "look at its siblings",
  (("                while child >= 0 and drafts[b][child] != samples[b][node]:\n"
    "                    child = sibling[b][child]\n" "                if child < 0:",
    "                if child < 0 or drafts[b][child] != samples[b][node]:"),))
W("10", "the tree keeps the candidates that went on as beams", "tree", "build", "of all steps",
  (("scores = torch.cat([step.candidate_scores for step in steps], dim=1)",
    "scores = torch.cat([torch.zeros_like(step.candidate_scores).scatter(1, step.indices, step.scores)"
    " for step in steps], dim=1)"),))
W("10", "nodes are in the order of their scores",
  "tree", "build", "parents before their children", (("best.sort(dim=1).values", "best"),))

W("11", "the weights are those of the choice, so the bias is in them",
  "routing", "bias-does-not-weigh", "without the bias", (("weights = scores.gather(1, ids)", "weights = choice.gather(1, ids)"),))
W("11", "an expert is masked with 0",
  "routing", "negative-choice", "Zero is not", (('float("-inf")).flatten(1)', "0.0).flatten(1)"),))
W("11", "topk gives equal scores in order", "routing", "ties", "topk promises no order",
  (("order = choice.sort(dim=-1, descending=True, stable=True).indices\n        ids",
    "order = choice.flip(-1).sort(dim=-1, descending=True, stable=True).indices\n"
    "        order = choice.shape[-1] - 1 - order\n        ids"),))
W("11", "softmax may be computed in the type of the logits",
  "routing", "half-logits", "float32", (("router_logits.to(torch.float32)", "router_logits"),))
W("11", "the id -1 is an expert: the last one",
  "experts", "padding", "last expert", (("            if expert < 0:\n                continue\n", ""),))
W("11", "a sum of k results may be kept in 16 bits", "experts", "weights-in-float32", "rounds once",
  (("dtype=torch.promote_types(x.dtype, torch.float32), device=x.device", "dtype=x.dtype, device=x.device"),
   ("result * topk.topk_weights[tokens, places, None])",
    "result * topk.topk_weights[tokens, places, None].to(y.dtype))")))
W("11", "the first half of w13 is up",
  "experts", "fused-experts", "gate rows first", (("gate, up = F.linear(", "up, gate = F.linear("),))
W("11", "shared experts are weighted by the router too",
  "layer", "layer", "router has no say", (("return y + shared", "return y + shared * topk.topk_weights.sum(-1, keepdim=True).to(x.dtype)"),))

W("12", "each token has a text of its own", "text", "prompt-is-context", "behind its context",
  (("return self._tokenizer.decode(self._context + ids)[len(self._context_text) :]",
    "return self._tokenizer.decode(ids)"),))
W("12", "the answer begins a new text",
  "text", "prompt-is-context", "prompt", (("self._prompt_tail(prompt_ids)", "[]"),))
W("12", "what is decoded can be sent", "characters", "characters-come-whole", "bytes of a character",
  (("if text and not text.endswith(REPLACEMENT):\n            return self._take(len(self._pending)",
    "if text:\n            return self._take(len(self._pending)"),))
W("12", "a step ends where a character ends", "characters", "steps-end-inside-characters", "several tokens",
  (('num_whole, whole = self._whole_characters() if num_new > 1 else (0, "")', 'num_whole, whole = 0, ""'),))
W("12", "U+FFFD is never text", "characters", "end-inside-a-character", "at the end",
  (("        if self._is_finished:\n            return self._take(len(self._pending), text)\n",
    '        if self._is_finished:\n            return ""\n'),))
W("12", "with stop strings the text comes at the end", "stop strings", "near-match-comes-out", "as soon as",
  (("        elif stop_regex:\n            text", "        elif stop or stop_regex:\n            text"),))
W("12", "what is held back belongs to a stop string",
  "stop strings", "near-match-at-the-end", "no stop string",
  (("        elif self._is_finished:\n            text = self._held_text[: _match(self._held_text, finished_reason)[0]]",
    '        elif self._is_finished:\n            text = ""'),))
W("12", "a stop string is found when it is there, so nothing is held back",
  "stop strings", "near-match-comes-out", "cannot be taken back",
  (("len(self._held_text) - num_held_chars(self._held_text, stop)", "None"),))
W("12", "the stop token is the end of the text",
  "ends", "stop-token", "no text", (("            new_ids = new_ids[:-1]\n", "            pass\n"),))
W("12", "all text so far is context", "cost", "cost-of-a-token", "not the whole text",
  (("self._context, self._pending = self._pending[:num_tokens],",
    "self._context, self._pending = self._context + self._pending[:num_tokens],"),))

W("13", "rank 0 is the source", "broadcast", "broadcast-comes-from-its-source", "any rank",
  (("if self.rank != source:\n            return self.receive(x, source)",
    "if self.rank != 0:\n            return self.receive(x, 0)"), ("if other != source:", "if other != 0:")))
W("13", "the own tensor comes first", "gather", "all-gather-keeps-the-order", "order of ranks",
  (('return torch.cat(self._gather("all_gather", x))',
    'parts = self._gather("all_gather", x)\n        return torch.cat(parts[self.rank :] + parts[: self.rank])'),))
W("13", "a mean over ranks", "sums", "all-reduce-is-the-sum", "sum, not a mean",
  (("        return total.to(dtype)\n", "        return (total / len(parts)).to(dtype)\n"),))
W("13", "the order of a sum does not matter", "sums", "sums-have-the-same-bits", "own part first",
  (('return self._sum(self._gather("all_reduce", x))',
    'parts = self._gather("all_reduce", x)\n        return self._sum(parts[self.rank :] + parts[: self.rank])'),))
W("13", "integers may be added as floats", "sums", "all-reduce-is-the-sum", "16,777,217",
  (("torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype", "torch.float32"),))
W("13", "each rank gets the part of its neighbour",
  "sums", "reduce-scatter-gives-each-rank-its-part", "part r",
  (("part.chunk(self.size)[self.rank]", "part.chunk(self.size)[self.rank - 1]"),))
W("13", "rows arrive in the order in which they are sent",
  "rows", "all-to-all-with-uneven-counts", "by sender",
  (("        return torch.cat(received)\n", "        return torch.cat(sorted(received, key=len))\n"),))
W("13", "a log is written when the operation is over",
  "ends", "logs-name-the-first-difference", "before its first message",
  (('        self.log.add("broadcast", self.name, x)\n        if self.rank != source:\n            return self.receive(x, source)\n',
    '        if self.rank != source:\n            got = self.receive(x, source)\n'
    '            self.log.add("broadcast", self.name, x)\n            return got\n'),
   ("        return x.clone()\n", '        self.log.add("broadcast", self.name, x)\n        return x.clone()\n')))

W("14", "the zero point is added",
  "weight", "weight", "q - zero", (("return ((q - zero) *", "return ((q + zero) *"),))
W("14", "two inputs that are neighbours share a byte",
  "weight", "weight", "half a group", (("q = torch.cat((groups & 15, groups >> 4), dim=-1)", "q = torch.stack((groups & 15, groups >> 4), dim=-1).flatten(-2)"),))
W("14", "the scales repeat like a pattern",
  "weight", "weight", "its own group", (("self.weight_scale.repeat_interleave(self.scheme.group_size or size, dim=-1)", "self.weight_scale.repeat(1, self.scheme.group_size or size)"),))
W("14", "a scale per token is computed over the tokens",
  "inputs", "dequantized-input", "of one token", (("groups.abs().amax(-1, keepdim=True)", "groups.abs().amax(0, keepdim=True).amax(-1, keepdim=True)"),))
W("14", "a static scale fits every input",
  "inputs", "dequantized-input", "static scale", (("return q.round().clamp(-128, 127)", "return q.round()"),))
W("14", "rounding is a cast to integers",
  "inputs", "dequantized-input", "nearest", (("return q.round().clamp(-128, 127)", "return q.to(torch.int8).to(torch.float32)"),))
W("14", "each rank has its own scale of a token", "layer", "inputs-on-several-ranks", "all ranks",
  (('if self.tp is not None and self.scheme.inputs == "token":', "if False:"),))
W("14", "a token of zeros needs no care",
  "layer", "zeros", "0 / 0", (("return torch.where(scale == 0, 1.0, scale)", "return scale"),))
