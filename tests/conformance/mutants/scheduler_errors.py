"""Planted bugs in what both schedulers share: admission, ids, and the ends after errors."""

from __future__ import annotations

from tests.conformance.mutants.optimized_scheduler import bug

# fmt: off
bug("RatioStaysAfterARetraction", "Admission after a retraction takes as much as before it.",
    ("shared.scheduling.base_scheduler", "self.new_token_ratio.raise_after_retraction(self.running)", "pass"))
bug("FullForMoreImportantOnes", "A more important request waits until a running one leaves.",
    ("shared.scheduling.base_scheduler", "self.batch_is_full = False  # it may preempt", "pass"))
bug("RidIsFreeAtTheEnd", "A request may take the id of one whose end is not reported yet.",
    ("shared.scheduling.base_scheduler", " or any(req.rid == output.rid for output in self.outputs)", ""))
bug("ProcessingFailsAlone",
    "An error while results are processed leaves the requests of that batch without an output.",
    ("scheduler",
     "            try:\n                self.pipeline.batches.popleft()\n                with "
     'self.parts.timeline.span("process results"):\n                    self.process_batch_result(oldest, '
     "result)\n            except BaseException as error:\n                self._finish_with_error(reqs, "
     "error)\n",
     "            self.pipeline.batches.popleft()\n            self.process_batch_result(oldest, result)\n"))
bug("CachesWhatFailed", "KV of a request that ends with an error stays in the cache.",
    ("shared.scheduling.base_scheduler", "is_insert=not isinstance(reason, FinishError)", "is_insert=True"))
bug("FormingFailsAlone", "An error while a batch is formed leaves slots that no request owns.",
    ("shared.scheduling.base_scheduler", "                self._abandon(error)\n", "                pass\n"))
bug("KeepsThePoolsAfterAnError",
    "After an error while a batch is formed, the requests end but their slots are not freed.",
    ("shared.scheduling.base_scheduler",
     "        self.chunked_req, self.batch_is_full = None, False\n        self.flush_cache()\n",
     "        self.chunked_req, self.batch_is_full = None, False\n"))
