"""Planted bugs in the overlapping scheduler: words of its sources, changed."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import diptych.optimized.scheduler
from tests.conformance.mutants.mutant import mutant_of

ROOT = Path(diptych.optimized.scheduler.__file__).parents[2]
MODULES = {
    "cached_prompt": "diptych.optimized.overlap.cached_prompt",
    "future_map": "diptych.optimized.overlap.future_map",
    "future_runs": "diptych.optimized.overlap.future_runs",
    "streams": "diptych.optimized.overlap.streams",
    "schedule_batch": "diptych.optimized.schedule_batch",
    "pipeline": "diptych.optimized.overlap.in_flight",
    "decoding": "diptych.optimized.decoding",
    "round": "diptych.optimized.speculative.round",
    "round_batch": "diptych.optimized.speculative.round_batch",
    "node_sampler": "diptych.optimized.speculative.node_sampler",
    "chain": "diptych.optimized.speculative.chain",
    "tree": "diptych.optimized.speculative.tree",
    "speculative": "diptych.optimized.speculative.speculative_decoding",
    "base": "diptych.shared.scheduling.base_scheduler",
    "scheduler": "diptych.optimized.scheduler",
}
"""In the order in which they import each other"""


@cache
def code_of(name: str, before: str = "", after: str = "") -> CodeType:
    """The code of a module of MODULES in which `before`, which is there once, became `after`."""
    source = (ROOT / f"{MODULES[name].replace('.', '/')}.py").read_text("utf-8")
    if before:
        assert source.count(before) == 1, f"{source.count(before)} times: {before!r}"
        source = source.replace(before, after)
    return compile(source, f"{name}.py", "exec")


def changed(file: str, before: str, after: str) -> Any:
    """The Scheduler of sources in one of which (`file`: a key of MODULES) `before`, which is there once,
    became `after`."""
    assert file in MODULES
    originals = {name: sys.modules[name] for name in MODULES.values()}
    try:
        for name, module_name in MODULES.items():
            code = code_of(name, before, after) if name == file else code_of(name)
            module = sys.modules[module_name] = ModuleType(module_name)
            exec(code, module.__dict__)
        return module.Scheduler
    finally:
        sys.modules.update(originals)


# The ring


@mutant_of("scheduler")
class NamesAreIds(changed("future_map", "return place - self.size", "return place")):
    """A place is taken for an id."""


@mutant_of("scheduler")
class StoresOnePlaceFurther(
    changed(
        "future_map",
        "places = self.token_ids[first : first +",
        "places = self.token_ids[first + 1 : 1 + first +",
    )
):
    """Tokens are written one place beside the one that was promised."""


@mutant_of("scheduler")
class StraddlesTheEnd(
    changed(
        "future_map",
        "torch.clamp(next_token_ids, min=0, out=places)",
        "self.token_ids[torch.arange(first, first + len(places)) % self.limit] = next_token_ids.clamp(min=0)",
    )
):
    """Places beyond the limit are written at the front, and read where they were promised."""


@mutant_of("scheduler")
class FeedsWhatIsNoToken(changed("future_map", "min=0, out=places", "min=-1, out=places")):
    """After NaN, the id -1 goes into the model."""


@mutant_of("scheduler")
class EveryBatchAtTheFront(
    changed("pipeline", "self.future_map.store(launched.first_place,", "self.future_map.store(1,")
):
    """All batches store their tokens in the first places."""


# Tokens in flight


@mutant_of("scheduler")
class OverlapsInNameOnly(changed("scheduler", "num_ahead if is_launched else 0", "0")):
    """The results of a batch are processed before the next batch is launched."""


@mutant_of("scheduler")
class SurplusStepCounts(changed("decoding", "        self.pipeline.drop(req)\n", "        pass\n")):
    """What was computed for a request after its end is taken for output."""


@mutant_of("scheduler")
class RetractedTokenCounts(
    changed(
        "decoding", "        self.pipeline.drop(req)\n", "        req.finished and self.pipeline.drop(req)\n"
    )
):
    """A request that was retracted and readmitted gets an earlier token again, twice."""


@mutant_of("scheduler")
class FreesTheSurplusSlotAgain(
    changed(
        "decoding",
        "        self.pipeline.drop(req)\n",
        """        for batch in self.pipeline.batches:
            row = batch.rows.pop(req, None)
            if row is not None and batch.batch.forward_mode.is_decode:
                self.parts.allocator.free(batch.batch.out_cache_loc[row : row + 1])
""",
    )
):
    """The slot of the step in flight is freed with the request's others, and once more."""


@mutant_of("scheduler")
class EndByLengthComesUnexpected(
    changed("pipeline", "len(req.output_ids) + (place is not None)", "len(req.output_ids)")
):
    """A request whose last token is in flight takes part in one step more."""


@mutant_of("scheduler")
class CountsMissTheTokenInFlight(
    changed("pipeline", "count_in_flight(launched.keep(info), named, resolved)", "launched.keep(info)")
):
    """Penalties lag one token behind."""


@mutant_of("scheduler")
class MinimumMissesTheTokenInFlight(
    changed(
        "pipeline",
        "reqs, self.parts.num_token_ids, self.device, num_in_flight, reads_texts",
        "reqs, self.parts.num_token_ids, self.device, None, reads_texts",
    )
):
    """Stop tokens are banned for one token more than min_new_tokens."""


@mutant_of("scheduler")
class SamplesAsOthersDid(
    changed("pipeline", "self._last_info[0] == reqs", "len(self._last_info[0]) == len(reqs)")
):
    """A batch is sampled with the parameters of another one of its size."""


@mutant_of("scheduler")
class SamplesAsBefore(changed("pipeline", "None if may_change else (reqs, info)", "(reqs, info)")):
    """Counts and bans stay as they were while the requests are the same."""


@mutant_of("scheduler")
class GrammarMissesTheTokenInFlight(changed("pipeline", "req.needs_output and n for", "False for")):
    """The mask of a batch is made before the token before it is known."""


@mutant_of("scheduler")
class DecodesFromTheTokenBefore(changed("schedule_batch", "if name is None else name", "if True else name")):
    """The input of a decode step is the newest token on the CPU."""


@mutant_of("scheduler")
class ChunksGiveTokens(
    changed("pipeline", "return None if req is self.chunked_req else super()", "return super()")
):
    """The token sampled in the middle of a prompt counts as being in flight."""


@mutant_of("scheduler")
class AsksWhoIsChunkedNow(
    changed(
        "decoding",
        "if req is not launched.chunked_req:",
        "if not self.pipeline.batches or req is not self.pipeline.batches[-1].chunked_req:",
    )
):
    """Whether a prompt was complete is decided when results come: the next chunk may be launched by then."""


@mutant_of("scheduler")
class ChunksAreCachedWhenResultsCome(
    changed(
        "scheduler",
        """            self.parts.tree_cache.cache_unfinished_req(req)
            if req is not self.chunked_req:
""",
        """            if req is not self.chunked_req:
                self.parts.tree_cache.cache_unfinished_req(req)
""",
    )
):
    """A chunk begins where the one before it began."""


@mutant_of("scheduler")
class SharesTheListOfRequests(
    changed(
        "scheduler",
        "in self.decoding.finish(batch, result):\n",
        """in zip(
            [req for req in self.running if req in batch.rows],
            *zip(*[tokens[1:] for tokens in self.decoding.finish(batch, result)]),
        ):
""",
    )
):
    """A batch's rows are read from the list of running requests when its results arrive."""


@mutant_of("scheduler")
class ProcessesTheNewestFirst(
    changed("scheduler", "oldest = self.pipeline.batches[0]", "oldest = self.pipeline.batches[-1]")
):
    """Results are taken in the wrong order."""


@mutant_of("scheduler")
class AbortWaitsForTheToken(
    changed(
        "base",
        """        self._finish(req, FinishAbort("aborted"))
        return True
""",
        """        if self.pipeline.place_of(req):
            req.to_finish = FinishAbort("aborted")
        else:
            self._finish(req, FinishAbort("aborted"))
        return True
""",
    )
):
    """An abort is a wish that is looked at when the token in flight has come: two steps late."""


# What is left behind


@mutant_of("scheduler")
class CachesWhatTheModelDidNotCompute(changed("scheduler", "req.kv_committed_len -= 1", "pass")):
    """A request that ended before the model failed leaves a slot in the cache that was never written."""


@mutant_of("scheduler")
class NaNPromptsStayCached(changed("scheduler", "if token_ids[0] < 0 and req", "if False and req")):
    """A prompt whose logits are NaN goes on being found."""


@mutant_of("scheduler")
class WhoFoundItGoesOn(
    changed("scheduler", "if (req in new or req not in self.running) and", "if False and")
):
    """Requests that found a prompt before it came out as NaN go on with it."""


@mutant_of("scheduler")
class WhoCameWithItGoesOn(
    changed("scheduler", "batches = (launched, *self.pipeline.batches)", "batches = self.pipeline.batches")
):
    """So do those whose slots were exchanged for its own in the same batch."""


@mutant_of("scheduler")
class EverybodyBeginsAnew(changed("scheduler", "and prompt.may_be_held_by(req)", "")):
    """Every new request starts again, whether it can have found the prompt or not."""


@mutant_of("scheduler")
class ForgetsWhatWasFound(changed("cached_prompt", "req.kv_matched_len, page_size", "0, page_size")):
    """Not only the computed part of a prompt is discarded, but the matched part too."""


@mutant_of("scheduler")
class LeaversLeaveTheirPrompt(
    changed(
        "scheduler",
        "            if batch.rows.pop(req, None) is not None:\n",
        """            if batch.rows.pop(req, None) is None:
                continue
            if True:
""",
    )
):
    """The prompt of a request that was aborted before it came out as NaN stays in the cache."""


@mutant_of("scheduler")
class CachesUnreadKV(changed("pipeline", "req.kv_committed_len -= 1", "pass")):
    """KV of the step too many goes into the cache."""


@mutant_of("scheduler")
class FailureHidesTheBatchBefore(
    changed(
        "scheduler",
        """        self._catch_up(num_left=0)
        if not isinstance(error, Exception)""",
        """        if not isinstance(error, Exception)""",
    )
):
    """Tokens that were under way when the model failed are lost."""


@mutant_of("scheduler")
class LateSamplingFailsAlone(
    changed(
        "scheduler",
        """            self.pipeline.batches.remove(batch)
            self._fail(batch.batch, error)
""",
        """            self.pipeline.batches.remove(batch)
""",
    )
):
    """A grammar that fails loses its batch without an output."""


@mutant_of("scheduler")
class LosesALeaversLogprobs(
    changed(
        "pipeline",
        "extending = [req if req in self.rows else None for req in ids]",
        "extending = [req for req in ids if req in self.rows]",
    )
):
    """A request that left takes no log-probabilities along: the next one gets them."""


@mutant_of("scheduler")
class CountsLogprobsWhenResultsCome(
    changed(
        "pipeline",
        "counts = [len(wanted) for wanted in ids.values()]",
        "counts = [len(input_logprob_positions(req)) for req in ids]",
    )
):
    """How much a chunk tells of its prompt is counted when the next chunk is under way."""


@mutant_of("scheduler")
class RetractsBeforeItLooks(
    changed(
        "scheduler",
        "        elif not self.pipeline:  #",
        "        else:  #",
    )
):
    """Retraction is decided while the batch in flight may be about to end a request."""
