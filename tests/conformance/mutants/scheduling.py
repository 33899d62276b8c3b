"""Planted bugs in the scheduler, the policies and the prefill adder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

from diptych.reference.prefill_adder import PrefillAdder
from diptych.reference.schedule_policy import SchedulePolicy
from diptych.reference.scheduler import Scheduler
from diptych.shared.interfaces import AddReqResult, PolicyResult, RadixKey
from diptych.shared.scheduling.lifecycle import Lifecycle
from diptych.shared.types import BatchResult, FinishReason, ForwardBatch, Req, ScheduleBatch
from tests.conformance.mutants.mutant import bugs_in, mutant_of, plant
from tests.planted import Bug


def lifecycle_of_scheduler(impl: type[Lifecycle]) -> Bug:
    """The scheduler with this lifecycle of its requests."""

    class Living(Scheduler):
        def __init__(self, config, model_config, parts) -> None:
            super().__init__(config, model_config, parts)
            self.requests.__class__ = impl

    return plant("scheduler", Living, impl)


@lifecycle_of_scheduler
class KeepsTheRetractedToken(Lifecycle):
    """Retraction drops the newest output token, though it was sent already."""

    def retract(self, req: Req) -> None:
        super().retract(req)
        if len(req.output_ids) > 1:
            req.output_ids.pop()


@lifecycle_of_scheduler
class InterruptsLeaveTheBatch(Lifecycle):
    """After Ctrl-C while results are processed, requests of the batch are in no list."""

    def finish_with_error(self, reqs: Sequence[Req], error: BaseException) -> None:
        if not isinstance(error, Exception):
            raise error
        super().finish_with_error(reqs, error)


@mutant_of("scheduler")
class PositionsOffByOne(Scheduler):
    """Decoded tokens get the position after their own."""

    def __init__(self, config, model_config, parts) -> None:
        def shifted(forward_batch: ForwardBatch, *args):
            if forward_batch.forward_mode.is_decode:
                forward_batch = replace(forward_batch, positions=forward_batch.positions + 1)
            return parts.model_runner.forward_and_sample(forward_batch, *args)

        super().__init__(config, model_config, parts)
        self.decoding.parts = replace(parts, model_runner=SimpleNamespace(forward_and_sample=shifted))


@lifecycle_of_scheduler
class LosesARetractedRequest(Lifecycle):
    """A retracted request is not put back into the queue."""

    def retract(self, req: Req) -> None:
        super().retract(req)
        self.waiting_queue.remove(req)


@mutant_of("scheduler")
class KeepsTheTokenOfAChunk(Scheduler):
    """The token sampled after an incomplete prompt is taken for output."""

    def process_batch_result(self, batch: ScheduleBatch, result: BatchResult) -> None:
        if self.requests.chunked_req in batch.reqs:
            self.requests.chunked_req = None
        super().process_batch_result(batch, result)


@lifecycle_of_scheduler
class AbortMatchesByPrefix(Lifecycle):
    """abort("req-1") ends req-10 as well."""

    def abort(self, rid: str) -> bool:
        ended = [Lifecycle.abort(self, r) for r in list(self.live) if r.startswith(rid)]
        return any(ended)


@mutant_of("scheduler")
class AbortLeaksMemory(Scheduler):
    """A running request that is aborted leaves without giving its slots back."""

    def abort(self, rid: str) -> bool:
        req = self.requests.live.get(rid)
        if req is not None and req in self.requests.running:
            self.requests.running.remove(req)
            req.req_pool_idx = None
        return super().abort(rid)


@lifecycle_of_scheduler
class EndsTwice(Lifecycle):
    """A finished request reports its end once more."""

    def finish(self, req: Req, reason: FinishReason) -> None:
        super().finish(req, reason)
        self.outputs.append(req.step_output())


@mutant_of("scheduler")
class NanEndsTheBatch(Scheduler):
    """One request's NaN ends the whole batch."""

    def process_batch_result(self, batch, result) -> None:
        if any(ids[0] < 0 for ids in result.token_ids):
            self.requests.finish_with_error(batch.reqs, RuntimeError("NaN"))
        else:
            super().process_batch_result(batch, result)


@mutant_of("scheduler")
class NaNChunksStayCached(Scheduler):
    """The first chunks of a prompt that comes out as NaN go on being found."""

    def __init__(self, config, model_config, parts) -> None:
        super().__init__(config, model_config, parts)
        parts.tree_cache.discard = lambda key, start: None


@lifecycle_of_scheduler
class FullForever(Lifecycle):
    """batch_is_full is never reset: no request is admitted after the first shortage."""

    def finish(self, req: Req, reason: FinishReason) -> None:
        was_full = self.batch_is_full
        super().finish(req, reason)
        self.batch_is_full = was_full


@mutant_of("scheduler")
class AdmitsWithoutClamping(Scheduler):
    """max_new_tokens is taken as it is: prompt and output may not fit."""

    def add_request(self, req: Req) -> None:
        wanted = req.max_new_tokens
        super().add_request(req)
        req.max_new_tokens = wanted


@mutant_of("prefill_adder")
class ForgetsTheLock(PrefillAdder):
    """The prefix of an added request is not locked: it may be evicted under it."""

    def add_one_req(self, req: Req) -> AddReqResult:
        result = super().add_one_req(req)
        if result is AddReqResult.CONTINUE:
            self.tree_cache.dec_lock_ref(req.last_node)
        return result


@mutant_of("prefill_adder")
class BudgetBeforeTheLock(PrefillAdder):
    """What is evictable is looked at once, before locking the prefix shrinks it."""

    @property
    def rem_total_tokens(self) -> int:
        if not hasattr(self, "_first_look"):
            self._first_look = self.allocator.available_size() + self.tree_cache.evictable_size()
        return self._first_look - self.reserved_tokens


@mutant_of("prefill_adder")
class KeepsTheLockOfARefusedRequest(PrefillAdder):
    """A request that does not fit after all leaves its prefix locked."""

    def add_one_req(self, req: Req) -> AddReqResult:
        result = super().add_one_req(req)
        if result is AddReqResult.NO_TOKEN:
            key = RadixKey(req.all_ids[: req.max_prefix_len], req.extra_key)
            self.tree_cache.inc_lock_ref(self.tree_cache.match_prefix(key).last_node)
        return result


@mutant_of("prefill_adder")
class MatchesTheWholePrompt(PrefillAdder):
    """The match is not capped: a fully cached prompt would have nothing left to compute."""

    def add_one_req(self, req: Req) -> AddReqResult:
        whole = Uncapped(**vars(req))
        result = super().add_one_req(whole)
        vars(req).update(vars(whole))
        self.can_run_list = [req if r is whole else r for r in self.can_run_list]
        return result


class Uncapped(Req):
    @property
    def max_prefix_len(self) -> int:
        return self.num_tokens


@mutant_of("prefill_adder")
class CutsInsideAPage(PrefillAdder):
    """A chunk ends where the budget does, not on a page."""

    def _truncate(self, remaining: int, limit: int | None) -> int:
        return remaining if limit is None else max(min(remaining, limit), 0)


@mutant_of("prefill_adder")
class CountsTokensOfTheChunkBudget(PrefillAdder):
    """A prompt whose tokens fit into the chunk budget is added whole, though its last page does not fit."""

    def _truncate(self, remaining: int, limit: int | None) -> int:
        return remaining if limit is not None and remaining <= limit else super()._truncate(remaining, limit)


@mutant_of("prefill_adder")
class AddsTheChunkedRequestAtAnyCost(PrefillAdder):
    """A chunked request takes memory that is not there."""

    def add_chunked_req(self, req: Req) -> Req | None:
        limit = self.rem_chunk_tokens
        extend_len = self._truncate(req.num_tokens - len(req.prefix_indices), limit)
        self._add(req, extend_len)
        return req if len(req.fill_ids) < req.num_tokens else None


@mutant_of("prefill_adder")
class ReservesAllOfMaxNewTokens(PrefillAdder):
    """A huge max_new_tokens is not clipped, and starves all other requests."""

    def _reservation(self, req: Req) -> int:
        return int((req.max_new_tokens - len(req.output_ids)) * self.new_token_ratio)


@mutant_of("prefill_adder")
class CountsSharedPrefixesAsFreed(PrefillAdder):
    """A prefix that other requests use counts as freed when one of them is preempted."""

    def preempt_to_schedule(self, req: Req, min_priority_gap: int) -> list[Req]:
        protected = [(r, r.cache_protected_len) for r in self.running]
        for running, _ in protected:
            running.cache_protected_len = 0
        try:
            return super().preempt_to_schedule(req, min_priority_gap)
        finally:
            for running, length in protected:
                running.cache_protected_len = length


@mutant_of("prefill_adder")
class ComputesPrefixesAgain(PrefillAdder):
    """No request waits for a prefix that this step computes."""

    def _is_computed_now(self, key: RadixKey, matched_len: int) -> bool:
        return False


@mutant_of("prefill_adder")
class WaitsForItsLastToken(PrefillAdder):
    """What a request must compute in any case is waited for too."""

    def add_one_req(self, req: Req) -> AddReqResult:
        if self._is_computed_now(RadixKey(req.all_ids, req.extra_key), 0):
            return AddReqResult.WAIT
        return super().add_one_req(req)


@mutant_of("prefill_adder")
class LetsEverybodyWait(PrefillAdder):
    """However many wait, the queue is walked on."""

    def add_one_req(self, req: Req) -> AddReqResult:
        self.num_waits = 0
        return super().add_one_req(req)


@mutant_of("scheduler")
class StopsAtWhoWaits(Scheduler):
    """A request that waits for a prefix keeps all requests behind it from being tried."""

    def _admit_waiting(self, adder: PrefillAdder) -> None:
        add_one_req = adder.add_one_req

        def stopping(req: Req) -> AddReqResult:
            result = add_one_req(req)
            return AddReqResult.OTHER if result is AddReqResult.WAIT else result

        adder.add_one_req = stopping
        super()._admit_waiting(adder)


@mutant_of("schedule_policy")
class UnstableOrder(SchedulePolicy):
    """Ties do not keep the queue's order."""

    def order(self, waiting_queue, running) -> PolicyResult:
        return super().order(list(waiting_queue)[::-1], running)


@mutant_of("schedule_policy")
class MatchesLongQueues(SchedulePolicy):
    """lpm matches and sorts any queue, however long."""

    def _effective_policy(self, num_waiting: int) -> str:
        return super()._effective_policy(min(num_waiting, 1))


policy_bug = bugs_in("schedule_policy", "reference.schedule_policy:SchedulePolicy", folder="reference.")
# fmt: off
policy_bug("EqualsInTheOrderOfTheQueue", "Among equal priorities the time in the queue does not count.",
           ("schedule_policy", '"fcfs": req.queue_start_time if by_priority else 0', '"fcfs": 0'))
policy_bug("OneSeedForAll", "The generator does not have the seed of the configuration.",
           ("schedule_policy", "random.Random(config.random_seed)", "random.Random(0)"))
policy_bug("ShortestMatchFirst", "lpm begins with the shortest match.",
           ("schedule_policy", "key=lambda req: -len(matches[req]", "key=lambda req: len(matches[req]"))
policy_bug("RandomWithoutACache", "Without a cache the order is random.",
           ("schedule_policy", 'self.tree_cache.disable:\n            return "fcfs"',
            'self.tree_cache.disable:\n            return "random"'))
policy_bug("WalksTheQueueItself", "The order is read from the queue while it changes.",
           ("schedule_policy", 'if policy == "random" else reqs,',
            'if policy == "random" else (waiting_queue[i] for i in range(len(reqs))),'))
policy_bug("EqualWeightsByNode",
           "Of equally heavy subtrees the oldest node comes first, not the first request's.",
           ("schedule_policy", "(-weight[child], first[child])", "(-weight[child], child)"))


adder_bug = bugs_in("prefill_adder", "reference.prefill_adder:PrefillAdder", folder="reference.")
adder_bug("FillsTheLastToken", "A request may take all memory with its output.",
          ("prefill_adder", "+ _clipped_max_new(req) < self.rem_total_tokens",
           "+ _clipped_max_new(req) <= self.rem_total_tokens"))
adder_bug("ALoneRequestReservesItsOutput", "A request alone needs room for all of its output.",
          ("prefill_adder", "if not self.running and not self.can_run_list:", "if False:"))
adder_bug("MeetsTheInputBudget", "The next request may use the whole input budget.",
          ("prefill_adder", ">= self.rem_input_tokens", "> self.rem_input_tokens"))
adder_bug("OldestVictimFirst", "Of equal priorities the request that waited longest is preempted.",
          ("shared.scheduling.admission", "(r.priority, -r.queue_start_time)",
           "(r.priority, r.queue_start_time)"))
adder_bug("PreemptsInVain", "Requests are preempted though they do not make enough room.",
          ("shared.scheduling.admission", "return [] if num_missing > 0 else victims", "return victims"))
adder_bug("MeetsTheGap", "A priority gap that is met suffices.",
          ("prefill_adder", "> min_priority_gap", "> min_priority_gap - 1"))
adder_bug("WaitsWithoutACache", "A request waits for a prefix that no cache will keep.",
          ("prefill_adder", "None if tree_cache.disable else budget", "budget"))
adder_bug("ChargesTokens", "Budgets are reduced by tokens, not by pages.",
          ("prefill_adder", "num_tokens = round_up_to_page(extend_len, self.page_size)",
           "num_tokens = extend_len"))
adder_bug("ChunksByTheBudgetAlone", "A chunk may be larger than the free memory.",
          ("prefill_adder",
           "limit = num_free if self.rem_chunk_tokens is None else min(num_free, self.rem_chunk_tokens)",
           "limit = self.rem_chunk_tokens"))
policy_bug("EqualWeightsByTheLastRequest",
           "Of equally heavy subtrees the one with the last request goes first.",
           ("schedule_policy", "first.setdefault(node, place)", "first[node] = -place"))
adder_bug("RoundsReservations",
          "The possible output of a running request is reserved rounded to the nearest token.",
          ("prefill_adder", "return int(_clipped_max_new(req) * self.new_token_ratio)",
           "return round(_clipped_max_new(req) * self.new_token_ratio)"))
