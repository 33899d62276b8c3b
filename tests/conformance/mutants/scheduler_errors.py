"""Planted bugs in what both schedulers share: admission, ids, and the ends after errors."""

from __future__ import annotations

from tests.conformance.mutants.mutant import mutant_of
from tests.conformance.mutants.optimized_scheduler import changed


@mutant_of("scheduler")
class RatioStaysAfterARetraction(
    changed("base", "self.new_token_ratio.raise_after_retraction(self.running)", "pass")
):
    """Admission after a retraction takes as much as before it."""


@mutant_of("scheduler")
class FullForMoreImportantOnes(changed("base", "self.batch_is_full = False  # it may preempt", "pass")):
    """A more important request waits until a running one leaves."""


@mutant_of("scheduler")
class RidIsFreeAtTheEnd(changed("base", " or any(req.rid == output.rid for output in self.outputs)", "")):
    """A request may take the id of one whose end is not reported yet."""


@mutant_of("scheduler")
class ProcessingFailsAlone(
    changed(
        "scheduler",
        """            try:
                self.pipeline.batches.popleft()
                with self.parts.timeline.span("process results"):
                    self.process_batch_result(oldest, result)
            except BaseException as error:
                self._finish_with_error(reqs, error)
""",
        """            self.pipeline.batches.popleft()
            self.process_batch_result(oldest, result)
""",
    )
):
    """An error while results are processed leaves the requests of that batch without an output."""


@mutant_of("scheduler")
class CachesWhatFailed(changed("base", "is_insert=not isinstance(reason, FinishError)", "is_insert=True")):
    """KV of a request that ends with an error stays in the cache."""


@mutant_of("scheduler")
class FormingFailsAlone(changed("base", "                self._abandon(error)\n", "                pass\n")):
    """An error while a batch is formed leaves slots that no request owns."""


@mutant_of("scheduler")
class KeepsThePoolsAfterAnError(
    changed(
        "base",
        "        self.chunked_req, self.batch_is_full = None, False\n        self.flush_cache()\n",
        "        self.chunked_req, self.batch_is_full = None, False\n",
    )
):
    """After an error while a batch is formed, the requests end but their slots are not freed."""
