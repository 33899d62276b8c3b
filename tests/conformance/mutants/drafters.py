"""Planted bugs in drafters."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import diptych.reference.speculative.standalone
from diptych.reference.speculative import drafter_class
from diptych.reference.speculative.draft_beams import BeamSteps
from diptych.reference.speculative.ngram import NgramDrafter
from diptych.reference.speculative.standalone import StandaloneDrafter
from diptych.shared.interfaces import Drafter
from diptych.shared.types import DraftBatch, DraftShape, DraftTree
from tests.conformance.mutants.mutant import plant
from tests.planted import Bug


def drafter(algorithm: str):
    """Turns a drafter into one that stands behind the algorithm; the others stay."""

    def make(impl: type[Drafter]) -> Bug:
        module = SimpleNamespace(
            drafter_class=lambda wanted: impl if wanted == algorithm else drafter_class(wanted)
        )
        return plant("drafter", module, impl)

    return make


@drafter("standalone")
class ReadsNothing(StandaloneDrafter):
    """The draft model never reads what the target keeps."""

    def extend(self, reqs, forward_batch, hidden_states, next_token_ids) -> None:
        pass


@drafter("standalone")
class ReadsPromptsOnly(StandaloneDrafter):
    """What was drafted and accepted is not read again, though it may have moved."""

    def extend(self, reqs, forward_batch, hidden_states, next_token_ids) -> None:
        if any(not req.output_ids for req in reqs):
            super().extend(reqs, forward_batch, hidden_states, next_token_ids)


@drafter("standalone")
class BeamsBesideTheirPlace(StandaloneDrafter):
    """Beams are computed one position too early, over the newest token's slot."""

    def draft(self, batch: DraftBatch, shape: DraftShape) -> DraftTree:
        diptych.reference.speculative.standalone.BeamSteps = lambda batch, num_before, *rest: BeamSteps(
            batch, 0, *rest
        )
        try:
            return super().draft(batch, shape)
        finally:
            diptych.reference.speculative.standalone.BeamSteps = BeamSteps


class SeesSiblings(BeamSteps):
    def next(self, beams):
        step = super().next(beams)
        self.visible = self.visible | True
        return step if step.tree_mask is None else replace(step, tree_mask=self.visible)


@drafter("standalone")
class BeamsSeeEachOther(StandaloneDrafter):
    """A beam sees all drafts of the steps before, not just its ancestors, and its siblings."""

    def draft(self, batch: DraftBatch, shape: DraftShape) -> DraftTree:
        diptych.reference.speculative.standalone.BeamSteps = SeesSiblings
        try:
            return super().draft(batch, shape)
        finally:
            diptych.reference.speculative.standalone.BeamSteps = BeamSteps


@drafter("ngram")
class DraftsTooDeep(NgramDrafter):
    """Trees are as deep as there are nodes."""

    def draft(self, batch: DraftBatch, shape: DraftShape) -> DraftTree:
        return super().draft(batch, shape._replace(num_steps=shape.num_draft_tokens))


@drafter("ngram")
class WritesIntoTheRow(NgramDrafter):
    """A row of req_to_token is used as scratch space."""

    def draft(self, batch: DraftBatch, shape: DraftShape) -> DraftTree:
        self.rows.req_to_token[batch.req_pool_indices, batch.seq_lens] += 1
        return super().draft(batch, shape)


@drafter("ngram")
class DraftsFewerNodes(NgramDrafter):
    """Trees have as many nodes as were found, without padding to the shape's."""

    def draft(self, batch: DraftBatch, shape: DraftShape) -> DraftTree:
        return super().draft(batch, shape._replace(num_draft_tokens=2))


@drafter("ngram")
class RequestsDoNotShare(NgramDrafter):
    """Each request has a trie of its own, though requests share."""

    def __init__(self, config, parts) -> None:
        super().__init__(config, parts)
        self.is_private = True


@drafter("ngram")
class SharesAcrossNamespaces(NgramDrafter):
    """One trie for all cache salts and adapters."""

    def _trie_of(self, req):
        return super()._trie_of(replace(req, extra_key=None))
