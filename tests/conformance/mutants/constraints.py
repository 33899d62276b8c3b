"""Planted bugs in how schedulers use grammars and logit processors."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from diptych.reference.scheduler import Scheduler
from tests.conformance.mutants.mutant import mutant_of
from tests.conformance.mutants.optimized_scheduler import bug

constrained = mutant_of("scheduler")


class WithInfo(Scheduler):
    """Samples with other parameters than it should."""

    def __init__(self, config, model_config, parts):
        def sample(logits, info, positions):
            return parts.sampler.sample(logits, self.wrong(info), positions)

        super().__init__(config, model_config, replace(parts, sampler=SimpleNamespace(sample=sample)))

    def wrong(self, info):
        raise NotImplementedError


@constrained
class MaskOfANeighbour(WithInfo):
    """Each row has the mask of the row before it."""

    def wrong(self, info):
        return info if info.vocab_mask is None else replace(info, vocab_mask=info.vocab_mask.roll(1, 0))


# fmt: off
bug("ReadsNoParents", "All drafts hang from the root.",
    ("speculative.node_sampler", "parents=parents, num", "parents=parents * 0, num"))
bug("MasksAreUsedAgain", "A batch of the same requests has the masks and the outputs of the step before.",
    ("overlap.in_flight", "        changes |= any(req.needs_output for req in reqs)\n", ""))
bug("BadWordsOfTheRoot", "Bad words are looked for behind the request's output, not behind each draft.",
    ("shared.speculation.node_sampling", "ends_of_bad_words(params, text)",
     "ends_of_bad_words(params, req.output_ids)"))
bug("BadWordsMissTheTokenInFlight", "A bad word is not seen when its begin is in flight.",
    ("shared.types.req", "            or self.sampling_params.bans_sequences\n", ""))
bug("RunsAheadOfProcessors", "A processor reads a text without the round in flight.",
    ("speculative.speculative_decoding", "not any(req.needs_output for req",
     "not any(req.grammar is not None for req"))
