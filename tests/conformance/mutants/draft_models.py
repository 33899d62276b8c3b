"""Planted bugs in the draft models."""

from __future__ import annotations

from dataclasses import replace

from torch.nn import functional

import diptych.reference.speculative.draft_models
from diptych.shared.config.draft import DraftFormat
from diptych.shared.interfaces import DraftModel, DraftOutput
from tests.conformance.mutants.mutant import Mutant, module_with


def mixed_into(*formats: DraftFormat):
    """Methods that come before those of the draft models of these formats."""

    def make(changes: type) -> Mutant:
        assert changes.__doc__, f"{changes.__name__}: say what goes wrong"

        def draft_model_class(draft_format: DraftFormat) -> type[DraftModel]:
            base = diptych.reference.speculative.draft_models.draft_model_class(draft_format)
            return type(base.__name__, (changes, base), {}) if draft_format in formats else base

        impl = module_with(diptych.reference.speculative.draft_models, draft_model_class=draft_model_class)
        return Mutant("draft_models", changes.__name__, impl)

    return make


@mixed_into("eagle3")
class FeedsBackWhatIsNormed:
    """Drafting goes on from the hidden states behind the final norm."""

    def forward(self, input_ids, positions, hidden_states, attention):
        output = super().forward(input_ids, positions, hidden_states, attention)
        return DraftOutput(output.hidden_states, output.hidden_states)


@mixed_into("eagle3")
class FusesItsOwnHiddenStatesToo:
    """fc is applied on every step, to the hidden state repeated where it is too narrow."""

    def forward(self, input_ids, positions, hidden_states, attention):
        width = self.config.target_hidden_size
        if hidden_states.shape[-1] != width:
            hidden_states = hidden_states.repeat(1, width // hidden_states.shape[-1])
        return super().forward(input_ids, positions, hidden_states, attention)


@mixed_into("eagle3")
class NeverNormsTheStream:
    """norm_before_residual is ignored."""

    def __init__(self, config, layers, moe):
        super().__init__(replace(config, norm_before_residual=False), layers, moe)


@mixed_into("eagle")
class NormsTheFirstInput:
    """The first layer of EAGLE has an input norm, as any other."""

    def __init__(self, config, layers, moe):
        super().__init__(config, layers, moe)
        self.layers[0].input_layernorm.forward = lambda x: functional.rms_norm(x, x.shape[-1:])


@mixed_into("eagle", "nextn")
class HiddenStateFirst:
    """The hidden state comes before the token's embedding."""

    def load_weights(self, weights):
        def swapped():
            for name, tensor in weights:
                if name.endswith(("fc.weight", "eh_proj.weight")):
                    tensor = tensor.roll(tensor.shape[1] // 2, dims=1)
                yield name, tensor

        super().load_weights(swapped())


@mixed_into("nextn")
class FeedsBackTheStream:
    """Drafting goes on from the hidden state before the shared norm, here: divided by the norm's weight."""

    def forward(self, input_ids, positions, hidden_states, attention):
        output = super().forward(input_ids, positions, hidden_states, attention)
        return DraftOutput(output.hidden_states, output.hidden_states / self.norm.weight)


@mixed_into("eagle", "eagle3", "nextn")
class OnePositionAhead:
    """Positions are incremented before the first draft forward."""

    def forward(self, input_ids, positions, hidden_states, attention):
        ahead = positions + 1 if len(positions) == 1 else positions
        return super().forward(input_ids, ahead, hidden_states, attention)


@mixed_into("eagle3")
class TakesDistancesForIds:
    """d2t is taken for the target's ids themselves."""

    def to_target_ids(self, draft_ids):
        return draft_ids if self.d2t is None else self.d2t[draft_ids]


@mixed_into("eagle", "eagle3", "nextn")
class AlwaysTheTargetsEmbedding:
    """share replaces the checkpoint's own embedding."""

    def share(self, target):
        self.embedding = None
        super().share(target)


@mixed_into("eagle", "eagle3", "nextn")
class KeepsTheFilesTensors:
    """Own embeddings and heads are views into what was read."""

    def _take(self, name, checkpoint_name, tensor):
        super()._take(name, checkpoint_name, tensor)
        if name in ("embedding", "head"):
            setattr(self, name, tensor)


@mixed_into("eagle3")
class TrustsTheTable:
    """d2t is not checked."""

    def _checked_d2t(self, d2t):
        return d2t
