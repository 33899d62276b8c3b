"""Planted bugs in drafting from the target's hidden states. Answers stay right, but guesses get worse."""

from __future__ import annotations

from dataclasses import replace

import torch

import diptych.reference.speculative
from diptych.reference.speculative.dflash import DFlashDrafter
from diptych.reference.speculative.eagle import EagleDrafter
from diptych.shared.interfaces import Drafter
from tests.conformance.mutants.mutant import module_with, plant
from tests.planted import Bug


def drafts_with(drafter: type[Drafter]) -> Bug:
    def drafter_class(algorithm: str) -> type[Drafter]:
        is_eagle = algorithm in ("eagle", "eagle3", "nextn")
        return drafter if is_eagle else diptych.reference.speculative.drafter_class(algorithm)

    return plant("drafter", module_with(diptych.reference.speculative, drafter_class=drafter_class), drafter)


@drafts_with
class ReadsTokensUnshifted(EagleDrafter):
    """A token goes with its own hidden state, not with the one before it."""

    def extend(self, reqs, forward_batch, hidden_states, next_token_ids):
        ids = forward_batch.input_ids.roll(1)
        super().extend(reqs, replace(forward_batch, input_ids=ids), hidden_states, next_token_ids)


@drafts_with
class RestoresTheStateBefore(EagleDrafter):
    """A request gets the state that came for the request before it."""

    def restore(self, req, state):
        super().restore(req, getattr(self, "state_before", state))
        self.state_before = state


@drafts_with
class SeesItsSiblings(EagleDrafter):
    """Drafts look at everything that was drafted before them."""

    def _forward(self, forward_batch, input_ids, hidden_states):
        if forward_batch.tree_mask is not None:
            everything = torch.ones_like(forward_batch.tree_mask)
            forward_batch = replace(forward_batch, tree_mask=everything)
        return super()._forward(forward_batch, input_ids, hidden_states)


def blocks_with(drafter: type[Drafter]) -> Bug:
    def drafter_class(algorithm: str) -> type[Drafter]:
        return drafter if algorithm == "dflash" else diptych.reference.speculative.drafter_class(algorithm)

    return plant("drafter", module_with(diptych.reference.speculative, drafter_class=drafter_class), drafter)


@blocks_with
class CausalBlocks(DFlashDrafter):
    """A mask attends to what is before it alone."""

    def block_batch(self, batch, shape):
        return replace(super().block_batch(batch, shape), tree_mask=None)


@blocks_with
class BlocksOnePlaceLater(DFlashDrafter):
    """A block begins one position behind its newest token's."""

    def block_batch(self, batch, shape):
        block = super().block_batch(batch, shape)
        return replace(block, positions=block.positions + 1)


@blocks_with
class FeaturesOfRejectedTokens(DFlashDrafter):
    """An accepted path's KV is that of the hidden states one row on, the last of which was rejected."""

    def extend(self, reqs, forward_batch, hidden_states, next_token_ids):
        if any(req.output_ids for req in reqs):
            hidden_states = hidden_states.roll(-1, dims=0)
        super().extend(reqs, forward_batch, hidden_states, next_token_ids)
