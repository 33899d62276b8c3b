"""Planted bugs in drafting from the target's hidden states. Answers stay right, but guesses get worse."""

from __future__ import annotations

from dataclasses import replace

import torch

import diptych.reference.speculative
from diptych.reference.speculative.eagle import EagleDrafter
from diptych.shared.interfaces import Drafter
from diptych.shared.types import ForwardMode
from tests.conformance.mutants.mutant import Mutant, module_with


def drafts_with(drafter: type[Drafter]) -> Mutant:
    assert drafter.__doc__, f"{drafter.__name__}: say what goes wrong"

    def drafter_class(algorithm: str) -> type[Drafter]:
        is_eagle = algorithm in ("eagle", "eagle3", "nextn")
        return drafter if is_eagle else diptych.reference.speculative.drafter_class(algorithm)

    return Mutant(
        "drafter", drafter.__name__, module_with(diptych.reference.speculative, drafter_class=drafter_class)
    )


@drafts_with
class ReadsTokensUnshifted(EagleDrafter):
    """A token goes with its own hidden state, not with the one before it."""

    def extend(self, reqs, forward_batch, hidden_states, next_token_ids):
        ids = forward_batch.input_ids.roll(1)
        super().extend(reqs, replace(forward_batch, input_ids=ids), hidden_states, next_token_ids)


@drafts_with
class OnePositionAhead(EagleDrafter):
    """Drafting starts at seq_len + 1."""

    def _forward(self, forward_batch, input_ids, hidden_states):
        if forward_batch.forward_mode is ForwardMode.TARGET_VERIFY:
            forward_batch = replace(forward_batch, positions=forward_batch.positions + 1)
        return super()._forward(forward_batch, input_ids, hidden_states)


@drafts_with
class KeepsWhatItDrafted(EagleDrafter):
    """What was accepted keeps the KV made from the drafter's own hidden states, all but the last token."""

    def extend(self, reqs, forward_batch, hidden_states, next_token_ids):
        kv = [
            (buffer, buffer[forward_batch.out_cache_loc])
            for buffer in (self.kv_pool.k_buffer(0), self.kv_pool.v_buffer(0))
        ]
        super().extend(reqs, forward_batch, hidden_states, next_token_ids)
        if self.num_calls_of_draft > 0 and forward_batch.forward_mode is ForwardMode.EXTEND:
            others = torch.ones(forward_batch.num_tokens, dtype=torch.bool)
            others[forward_batch.last_token_rows] = False
            for buffer, before in kv:
                buffer[forward_batch.out_cache_loc[others]] = before[others]
        self.num_calls_of_draft = 0

    def draft(self, batch, shape):
        self.num_calls_of_draft = 1
        return super().draft(batch, shape)

    num_calls_of_draft = 0


@drafts_with
class BeamsForgetTheirParents(EagleDrafter):
    """A beam goes on from the hidden state of the beam that stood in its place."""

    def draft(self, batch, shape):
        next_beams = self.draft_tree.next_beams
        self.draft_tree.next_beams = lambda beams, top: self._unparented(next_beams(beams, top))
        tree = super().draft(batch, shape)
        del self.draft_tree.next_beams
        return tree

    def _unparented(self, beams):
        return beams._replace(parents=torch.arange(beams.parents.shape[1]).expand_as(beams.parents))


@drafts_with
class SeesItsSiblings(EagleDrafter):
    """Drafts look at everything that was drafted before them."""

    def _forward(self, forward_batch, input_ids, hidden_states):
        if forward_batch.custom_mask is not None:
            everything = torch.ones_like(forward_batch.custom_mask)
            forward_batch = replace(forward_batch, custom_mask=everything)
        return super()._forward(forward_batch, input_ids, hidden_states)


@drafts_with
class StartsFromTheFirstRow(EagleDrafter):
    """After a verification drafting goes on from the root's row, not from the last accepted one's."""

    def extend(self, reqs, forward_batch, hidden_states, next_token_ids):
        super().extend(reqs, forward_batch, hidden_states, next_token_ids)
        if forward_batch.forward_mode is ForwardMode.EXTEND:
            first = forward_batch.extend_start_loc
            ids = forward_batch.input_ids.roll(-1)
            output = self._forward(forward_batch, ids, hidden_states)
            for req, row in zip(reqs, output.hidden_states[first]):
                self.last_rows[req.rid] = self.last_rows[req.rid]._replace(hidden_states=row)
