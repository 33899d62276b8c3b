"""Planted bugs in the draft models."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

from torch.nn import ModuleList, functional

import diptych.reference.speculative.draft_models
from diptych.shared.config.draft import DraftFormat
from diptych.shared.interfaces import DraftModel, DraftOutput
from tests.conformance.mutants.mutant import bugs_in, module_with, plant
from tests.planted import Bug


def mixed_into(*formats: DraftFormat):
    """Methods that come before those of the draft models of these formats."""

    def make(changes: type) -> Bug:
        def draft_model_class(draft_format: DraftFormat) -> type[DraftModel]:
            base = diptych.reference.speculative.draft_models.draft_model_class(draft_format)
            return type(base.__name__, (changes, base), {}) if draft_format in formats else base

        impl = module_with(diptych.reference.speculative.draft_models, draft_model_class=draft_model_class)
        return plant("draft_models", impl, changes)

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
        super().__init__(replace(config, norms=replace(config.norms, before_residual=False)), layers, moe)


@mixed_into("eagle3")
class NormsAllLayersAlike:
    """The states of every layer of the target get the first one's norm."""

    def fuse(self, hidden_states):
        if self.fc_norm is not None:
            self.fc_norm = ModuleList([self.fc_norm[0]] * len(self.fc_norm))
        return super().fuse(hidden_states)


@mixed_into("eagle3")
class FusesWithoutTheNorm:
    """norm_before_fc is ignored."""

    def fuse(self, hidden_states):
        self.input_norm = None
        return super().fuse(hidden_states)


@mixed_into("eagle3")
class NeverFeedsBackWhatIsNormed:
    """norm_output is ignored."""

    def forward(self, input_ids, positions, hidden_states, attention):
        config = self.config
        self.config = replace(config, norms=replace(config.norms, output=False))
        output = super().forward(input_ids, positions, hidden_states, attention)
        self.config = config
        return output


@mixed_into("dflash")
class MasksOfZero:
    """A mask has no embedding."""

    def embed(self, input_ids):
        return super().embed(input_ids) * (input_ids != self.config.block.mask_id)[:, None]


@mixed_into("eagle", "eagle3", "nextn")
class SharesAnotherWidth:
    """An embedding and a head are shared with a target of another width."""

    def share(self, target):
        self.target_embed, self.target_logits = target.embed, target.compute_logits


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


@mixed_into("eagle", "eagle3", "nextn")
class LogitsInDouble:
    """Logits are float64."""

    def compute_logits(self, hidden_states):
        return super().compute_logits(hidden_states).double()


@mixed_into("eagle", "eagle3", "nextn")
class TakesMemoryWhenBuilt:
    """Built on 'meta' it takes memory at once."""

    def __init__(self, config, layers, moe):
        super().__init__(config, layers, moe)
        self.to_empty(device="cpu")


@mixed_into("eagle", "eagle3", "nextn")
class NamesBeginWithTheLayer:
    """A leading part of names is not known."""

    def load_weights(self, weights):
        for name, tensor in weights:
            assert not name.startswith("model.")
            self._taken = [*getattr(self, "_taken", []), (name, tensor)]
        super().load_weights(self._taken)


@mixed_into("eagle", "eagle3", "nextn")
class LoadsWhatIsHarmless:
    """Tensors that nothing uses are looked for in the model."""

    def canonical_name(self, name):
        known = super().canonical_name(name)
        return name if known is None else known


@mixed_into("eagle", "eagle3", "nextn")
class LosesTheBias:
    """A bias on fc is skipped."""

    def load_weights(self, weights):
        super().load_weights((name, x) for name, x in weights if name != "fc.bias")


@mixed_into("eagle", "eagle3", "nextn")
class SharesACopy:
    """The embedding and the head of the target are copied."""

    def share(self, target):
        super().share(deepcopy(target))


@mixed_into("eagle", "eagle3", "nextn")
class SaysOnlyThatItIsWrong:
    """A refusal does not say of which tensor."""

    def load_weights(self, weights):
        try:
            super().load_weights(weights)
        except ValueError as error:
            raise (ValueError("wrong shape") if "shape" in str(error) else error) from None


@mixed_into("eagle", "eagle3", "nextn")
class TheLastOfTwoCounts:
    """A name that comes twice is loaded twice."""

    def load_weights(self, weights):
        super().load_weights(dict(weights).items())


bug = bugs_in("draft_models", "reference.speculative.draft_models")
# fmt: off
bug("UnknownFormatsAreKeyErrors", "An unknown format is a KeyError.",
    ("reference.speculative.draft_models", "if draft_format not in DRAFT_MODELS:", "if not draft_format:"))
