"""Planted bugs in handing out hidden states, by the models and the model runners."""

from __future__ import annotations

import torch

from diptych.reference.model_runner import ModelRunner
from diptych.shared.types import ForwardMode
from tests.conformance.mutants.mutant import mutant_of
from tests.conformance.mutants.whole_models import mixed_into_every_model
from tests.model_runner.fake_graphs import FakeGraphsRunner


@mixed_into_every_model
class CapturesWhatComesOut:
    """Under l stands what layer l gave, not what went into it."""

    def forward(self, input_ids, positions, attention, captured=None):
        if captured is None:
            return super().forward(input_ids, positions, attention)
        last = self.config.num_hidden_layers
        later = {min(layer_id + 1, last): stream for layer_id, stream in captured.items()}
        y = super().forward(input_ids, positions, attention, later)
        captured.update({layer_id: later[min(layer_id + 1, last)] for layer_id in captured})
        return y


@mixed_into_every_model
class CapturesHalfOfTheStream:
    """What waits for the next norm to add it is left out: the embedding, here."""

    def forward(self, input_ids, positions, attention, captured=None):
        y = super().forward(input_ids, positions, attention, captured)
        for layer_id in captured or ():
            if layer_id > 0:
                captured[layer_id] -= self.embed(input_ids)
        return y


@mutant_of("model_runner")
class HiddenStatesInLayerOrder(ModelRunner):
    """Side by side from the lowest layer to the highest, whatever was asked for."""

    def forward(self, forward_batch):
        wanted = self.capture_hidden
        self.capture_hidden = wanted and tuple(sorted(wanted))
        output = super().forward(forward_batch)
        self.capture_hidden = wanted
        return output


@mutant_of("model_runner")
class ReplaysWithoutHiddenStates(FakeGraphsRunner):
    """A decode step is replayed although hidden states are wanted; those of an earlier step come along."""

    last_hidden_states = torch.empty(0)

    def forward(self, forward_batch):
        wanted = self.capture_hidden
        if forward_batch.forward_mode is ForwardMode.DECODE:
            self.capture_hidden = None
        output = super().forward(forward_batch)
        self.capture_hidden = wanted
        if output.hidden_states is not None:
            self.last_hidden_states = output.hidden_states
        elif wanted is not None:
            output = output._replace(hidden_states=self.last_hidden_states)
        return output
