"""Planted bugs in what both schedulers share: admission, ids, and the ends after errors."""

from __future__ import annotations

import threading

from diptych.reference.scheduler import Scheduler
from tests.conformance.mutants.mutant import bugs_in, mutant_of
from tests.conformance.mutants.optimized_scheduler import bug

# fmt: off
bug("RatioStaysAfterARetraction", "Admission after a retraction takes as much as before it.",
    ("scheduler", "self.new_token_ratio.raise_after_retraction(requests.running)", "pass"))
bug("RatioOutlivesTheRequests", "An idle scheduler admits as much as its last requests allowed.",
    ("scheduler", "self.new_token_ratio.current = self.new_token_ratio.initial", "pass"))
bug("FullForMoreImportantOnes", "A more important request waits until a running one leaves.",
    ("shared.scheduling.lifecycle", "self.batch_is_full = False  # it may preempt", "pass"))
bug("RidIsFreeAtTheEnd", "A request may take the id of one whose end is not reported yet.",
    ("shared.scheduling.lifecycle", " or any(req.rid == output.rid for output in self.outputs)", ""))
bug("ProcessingFailsAlone",
    "An error while results are processed leaves the requests of that batch without an output.",
    ("scheduler",
     "            try:\n                batches.popleft()\n                with "
     'timeline.span("process results"):\n                    self.process_batch_result(oldest, '
     "self.decoding.finish(oldest, outputs))\n            except BaseException as error:\n                "
     "self.requests.finish_with_error(reqs, error)\n",
     "            batches.popleft()\n            "
     "self.process_batch_result(oldest, self.decoding.finish(oldest, outputs))\n"))
bug("ChunksKeepTheirKV", "What was computed of a long prompt is used with other weights.",
    ("shared.scheduling.lifecycle", "*([self.chunked_req] if self.chunked_req is not None else [])", "*[]"))
bug("TakesTheFirstTokenForThePrompts",
    "The first token of a prompt from another engine is written over the prompt's last one.",
    ("shared.scheduling.lifecycle", "req.kv_committed_len = req.kv_allocated_len = len(req.fill_ids)",
     "req.kv_committed_len = req.kv_allocated_len = len(req.fill_ids) - 1"))
bug("PromptsOfOthersAreNotCached", "A prompt from another engine enters the cache when its request ends.",
    ("shared.scheduling.lifecycle", "        self.parts.tree_cache.cache_unfinished_req(req)\n", ""))
bug("FullForEver", "Memory that no request had comes back, and nothing tries again.",
    ("scheduler", "has_no_room and bool(requests.running)", "has_no_room"))
bug("CachesWhatFailed", "KV of a request that ends with an error stays in the cache.",
    ("shared.scheduling.lifecycle", "is_insert=not isinstance(reason, FinishError)", "is_insert=True"))
bug("FormingFailsAlone", "An error while a batch is formed leaves slots that no request owns.",
    ("scheduler", "            self.requests.abandon(error)\n", "            pass\n"))
bug("KeepsThePoolsAfterAnError",
    "After an error while a batch is formed, the requests end but their slots are not freed.",
    ("shared.scheduling.lifecycle",
     "        self.chunked_req, self.batch_is_full = None, False\n        self.flush_cache()\n",
     "        self.chunked_req, self.batch_is_full = None, False\n"))


reference_bug = bugs_in("scheduler", "reference.scheduler:Scheduler", folder="reference.")
reference_bug("OneNamespaceForAll", "The namespace of a request is forgotten.",
              ("shared.scheduling.lifecycle", "        self.live[req.rid] = req\n",
               "        self.live[req.rid] = req\n        req.extra_key = None\n"))
reference_bug("TakesARidTwice", "A request id in use is taken again.",
              ("shared.scheduling.lifecycle", "if req.rid in self.live or any(", "if any("))
reference_bug("TheOldestOfEqualsIsTurnedAway",
              "A full queue turns an earlier request away for an equally important one.",
              ("shared.scheduling.admission", "min(reversed(waiting_queue), key", "min(waiting_queue, key"))
reference_bug("RunsWithoutATimeout", "Only a waiting request can be too late.",
              ("shared.scheduling.admission", "elif config.running_timeout is not None:",
               "elif config.running_timeout is not None and config.waiting_timeout is not None:"))
reference_bug("ErrorsOfABatchLeaveTheStep",
              "An error while a batch runs ends the step, not the requests of the batch.",
              ("scheduler",
               "            if batch is None:\n                self.requests.abandon",
               "            if True:\n                self.requests.abandon"))
reference_bug("ForgetsWhatItFound",
              "A prompt with NaN logits takes the prefix with it that it found in the cache.",
              ("scheduler", "discard(key, req.kv_matched_len)", "discard(key, 0)"))
reference_bug("TokensInReverse", "The last request of a batch gets the token of the first.",
              ("scheduler", "zip(batch.reqs, result.tokens)", "zip(batch.reqs, [*result.tokens][::-1])"))
reference_bug("PromptFillsMoreThanThePool", "A prompt may have some tokens more than the pool.",
              ("shared.scheduling.admission", "if num_prompt > pool_size:", "if num_prompt > pool_size + 2:"))
reference_bug("VictimsStay", "What preemption chose is not retracted.",
              ("shared.scheduling.admission", "            self.retract(victim)\n", "            pass\n"))
reference_bug("EveryEndIsAnAbort", "The reason of an end is lost.",
              ("shared.scheduling.lifecycle", "self.finish(req, req.finished_reason)",
               'self.finish(req, FinishAbort("ended"))'))
# fmt: on


@mutant_of("scheduler")
class OneStepAtATime(Scheduler):
    """The step of an engine waits for those of all others in the process."""

    step_lock = threading.Lock()

    def step(self):
        with self.step_lock:
            return super().step()


@mutant_of("scheduler")
class DraftsWithoutThePrompt(Scheduler):
    """The drafter does not learn a prompt that another engine has computed."""

    def add_computed(self, req, first, *state):
        self.requests.features = [each for each in self.requests.features if each is not self.decoding]
        super().add_computed(req, first, *state)
