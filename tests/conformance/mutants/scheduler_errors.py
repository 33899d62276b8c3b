"""Planted bugs in what both schedulers share: admission, ids, and the ends after errors."""

from __future__ import annotations

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
bug("CachesWhatFailed", "KV of a request that ends with an error stays in the cache.",
    ("shared.scheduling.lifecycle", "is_insert=not isinstance(reason, FinishError)", "is_insert=True"))
bug("FormingFailsAlone", "An error while a batch is formed leaves slots that no request owns.",
    ("scheduler", "            requests.abandon(error)\n", "            pass\n"))
bug("KeepsThePoolsAfterAnError",
    "After an error while a batch is formed, the requests end but their slots are not freed.",
    ("shared.scheduling.lifecycle",
     "        self.chunked_req, self.batch_is_full = None, False\n        self.flush_cache()\n",
     "        self.chunked_req, self.batch_is_full = None, False\n"))
