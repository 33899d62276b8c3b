"""Planted bugs in the overlapping scheduler: words of its sources, changed."""

from __future__ import annotations

from tests.conformance.mutants.mutant import bugs_in

bug = bugs_in("scheduler", "optimized.scheduler:Scheduler", folder="optimized.")

# fmt: off

# The ring
bug("NamesAreIds", "A place is taken for an id.",
    ("overlap.future_map", "return place - self.size", "return place"))
bug("StoresOnePlaceFurther", "Tokens are written one place beside the one that was promised.",
    ("overlap.future_map", "places = self.token_ids[first : first +",
     "places = self.token_ids[first + 1 : 1 + first +"))
bug("StraddlesTheEnd", "Places beyond the limit are written at the front, and read where they were promised.",
    ("overlap.future_map", "torch.clamp(next_token_ids, min=0, out=places)",
     "self.token_ids[torch.arange(first, first + len(places)) % self.limit] = next_token_ids.clamp(min=0)"))
bug("FeedsWhatIsNoToken", "After NaN, the id -1 goes into the model.",
    ("overlap.future_map", "min=0, out=places", "min=-1, out=places"))
bug("EveryBatchAtTheFront", "All batches store their tokens in the first places.",
    ("overlap.in_flight", "self.future_map.store(launched.first_place,", "self.future_map.store(1,"))

# Tokens in flight
bug("OverlapsInNameOnly", "The results of a batch are processed before the next batch is launched.",
    ("scheduler", "num_ahead if may_wait else 0", "0"))
bug("SurplusStepCounts", "What was computed for a request after its end is taken for output.",
    ("decoding", "        self.pipeline.drop(req)\n", "        pass\n"))
bug("RetractedTokenCounts", "A request that was retracted and readmitted gets an earlier token again, twice.",
    ("decoding", "        self.pipeline.drop(req)\n", "        req.finished and self.pipeline.drop(req)\n"))
bug("FreesTheSurplusSlotAgain",
    "The slot of the step in flight is freed with the request's others, and once more.",
    ("decoding",
     "        self.pipeline.drop(req)\n",
     "        for batch in self.pipeline.batches:\n            row = batch.rows.pop(req, None)\n          "
     "  if row is not None and batch.batch.forward_mode.is_decode:\n                "
     "self.parts.allocator.free(batch.batch.out_cache_loc[row : row + 1])\n"))
bug("EndByLengthComesUnexpected", "A request whose last token is in flight takes part in one step more.",
    ("overlap.in_flight", "len(req.output_ids) + num_in_flight", "len(req.output_ids)"))
bug("DecodesFromTheFirstOfTheSteps", "Behind steps launched together, a request goes on from the first.",
    ("overlap.in_flight", "launched.first_place, token_ids[-1]", "launched.first_place, token_ids[0]"))
bug("StepsTogetherCountAsOne", "Of the tokens in flight of steps that were launched together one counts.",
    ("overlap.in_flight", "0 if place is None else num_steps", "0 if place is None else 1"))
bug("SlotsOfStepsByRequest", "The slots of steps launched together are in the order of the requests.",
    ("schedule_batch", "slots.view(-1, num_steps).t().flatten()", "slots"))
bug("StepsTogetherForPenalties", "Steps are launched together though penalties read their tokens.",
    ("shared.scheduling.pages", "params.needs_penalty or params.return_logprob", "params.return_logprob"))
bug("StepsTogetherNeedFreeSlots", "Once the cache has filled the pool, no steps are launched together.",
    ("shared.scheduling.pages", "allocator.available_size() + tree_cache.evictable_size()",
     "allocator.available_size()"))
bug("CountsMissTheTokenInFlight", "Penalties lag one token behind.",
    ("overlap.in_flight", "count_in_flight(launched.keep(info), named, resolved)", "launched.keep(info)"))
bug("MinimumMissesTheTokenInFlight", "Stop tokens are banned for one token more than min_new_tokens.",
    ("overlap.in_flight", "reqs, self.parts.num_token_ids, self.device, num_in_flight, reads_texts",
     "reqs, self.parts.num_token_ids, self.device, None, reads_texts"))
bug("SamplesAsBefore", "Counts and bans stay as they were while the requests are the same.",
    ("overlap.in_flight", "None if may_change else (reqs, info)", "(reqs, info)"))
bug("GrammarMissesTheTokenInFlight", "The mask of a batch is made before the token before it is known.",
    ("overlap.in_flight", "req.needs_output and n for", "False for"))
bug("DecodesFromTheTokenBefore", "The input of a decode step is the newest token on the CPU.",
    ("overlap.in_flight", "req.output_ids[-1] if place is None else", "req.output_ids[-1] if True else"))
bug("ChunksGiveTokens", "The token sampled in the middle of a prompt counts as being in flight.",
    ("overlap.in_flight", "return None if req is self.chunked_req else super()", "return super()"))
bug("AsksWhoIsChunkedNow",
    "Whether a prompt was complete is decided when results come: the next chunk may be launched by then.",
    ("decoding", "        chunked_req = launched.chunked_req\n",
     "        newest = self.pipeline.batches[-1] if self.pipeline.batches else launched\n        "
     "chunked_req = newest.chunked_req\n"))
bug("ChunksAreCachedWhenResultsCome", "A chunk begins where the one before it began.",
    ("scheduler",
     "            self.parts.tree_cache.cache_unfinished_req(req)\n            if req is not "
     "requests.chunked_req:\n",
     "            if req is not requests.chunked_req:\n                "
     "self.parts.tree_cache.cache_unfinished_req(req)\n"))
bug("ProcessesTheNewestFirst", "Results are taken in the wrong order.",
    ("scheduler", "oldest = batches[0]", "oldest = batches[-1]"))
bug("AbortWaitsForTheToken",
    "An abort is a wish that is looked at when the token in flight has come: two steps late.",
    ("scheduler",
     "        return self.requests.abort(rid)\n",
     "        from diptych.shared.types import FinishAbort\n\n        req = self.requests.live.get(rid)\n"
     "        if req is None or not self.pipeline.place_of(req):\n            return "
     'self.requests.abort(rid)\n        req.to_finish = FinishAbort("aborted")\n        return True\n'))

# What is left behind
bug("CachesWhatTheModelDidNotCompute",
    "A request that ended before the model failed leaves a slot in the cache that was never written.",
    ("scheduler", "req.kv_committed_len -= batch.num_steps", "pass"))
bug("NaNPromptsStayCached", "A prompt whose logits are NaN goes on being found.",
    ("scheduler", "if token_ids[0] < 0 and req", "if False and req"))
bug("WhoFoundItGoesOn", "Requests that found a prompt before it came out as NaN go on with it.",
    ("scheduler", "if (req in new or req not in requests.running) and", "if False and"))
bug("WhoCameWithItGoesOn", "So do those whose slots were exchanged for its own in the same batch.",
    ("scheduler", "requests, (launched, *self.pipeline.batches)", "requests, self.pipeline.batches"))
bug("ForgetsWhatWasFound", "Not only the computed part of a prompt is discarded, but the matched part too.",
    ("overlap.cached_prompt", "req.kv_matched_len, page_size", "0, page_size"))
bug("LeaversLeaveTheirPrompt",
    "The prompt of a request that was aborted before it came out as NaN stays in the cache.",
    ("scheduler", "            if batch.rows.pop(req, None) is not None:\n",
     "            if batch.rows.pop(req, None) is None:\n                continue\n            if True:\n"))
bug("CachesUnreadKV", "KV of the step too many goes into the cache.",
    ("overlap.in_flight", "req.kv_committed_len -= batch.batch.num_steps", "pass"))
bug("CachesUnreadKVOfLaterSteps", "Of the steps too many only one is taken back.",
    ("overlap.in_flight", "req.kv_committed_len -= batch.batch.num_steps", "req.kv_committed_len -= 1"))
bug("FailureHidesTheBatchBefore", "Tokens that were under way when the model failed are lost.",
    ("scheduler", "        self._catch_up(num_left=0)\n        if not isinstance(error, Exception)",
     "        if not isinstance(error, Exception)"))
bug("LateSamplingFailsAlone", "A grammar that fails loses its batch without an output.",
    ("scheduler",
     "            self.pipeline.batches.remove(batch)\n            self._fail(batch.batch, error)\n",
     "            self.pipeline.batches.remove(batch)\n"))
bug("LosesALeaversLogprobs", "A request that left takes no log-probabilities along: the next one gets them.",
    ("overlap.in_flight", "extending = [req if req in self.rows else None for req in ids]",
     "extending = [req for req in ids if req in self.rows]"))
bug("CountsLogprobsWhenResultsCome",
    "How much a chunk tells of its prompt is counted when the next chunk is under way.",
    ("overlap.in_flight", "counts = [len(wanted) for wanted in ids.values()]",
     "counts = [len(input_logprob_positions(req)) for req in ids]"))
bug("RetractsBeforeItLooks", "Retraction is decided while the batch in flight may be about to end a request.",
    ("scheduler", "        if batch is None and not self.pipeline:\n", "        if batch is None:\n"))
