"""Planted bugs in the models and the model runner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import diptych.reference.models
from diptych.reference.model_runner import ModelRunner
from diptych.shared.interfaces import CausalLM
from diptych.shared.loading.weight_names import expected_shapes
from diptych.shared.types import ForwardBatch, ForwardMode, LogitsOutput
from tests.conformance.mutants.mutant import bugs_in, module_with, mutant_of, plant
from tests.planted import Bug


def mixed_into_every_model(changes: type) -> Bug:
    """Methods that come before those of the model class of every family."""

    def model_class(architecture: str) -> type[CausalLM]:
        base = diptych.reference.models.model_class(architecture)
        return type(base.__name__, (changes, base), {})

    return plant("models", module_with(diptych.reference.models, model_class=model_class), changes)


# Models


@mixed_into_every_model
class GivesAllRows:
    """attention.rows is not looked at, though the model says that it does."""

    selects_rows = True


@mixed_into_every_model
class RowsInOrder:
    """Rows come sorted, whatever their order."""

    selects_rows = True

    def forward(self, input_ids, positions, attention, *captured):
        y = super().forward(input_ids, positions, attention, *captured)
        return y if attention.rows is None else y[attention.rows.sort().values]


def each_attention(model: Any, change: Callable[[Any], None]) -> None:
    for decoder_layer in model.model.layers:
        change(decoder_layer.self_attn)


@mixed_into_every_model
class NoNormOfHeads:
    """q and k go without their norm, where the family has one."""

    def forward(self, input_ids, positions, attention):
        norms = [(attn.q_norm, attn.k_norm) for attn in (layer.self_attn for layer in self.model.layers)]
        each_attention(self, lambda attn: setattr(attn, "q_norm", None))
        y = super().forward(input_ids, positions, attention)
        for decoder_layer, (q_norm, _) in zip(self.model.layers, norms):
            decoder_layer.self_attn.q_norm = q_norm
        return y


@mixed_into_every_model
class LogitsInTheModelsType:
    """compute_logits keeps the half type."""

    def compute_logits(self, hidden_states):
        return super().compute_logits(hidden_states).to(hidden_states.dtype)


@mixed_into_every_model
class AddsToTheEmbeddings:
    """Given rows are added to the embeddings of the ids."""

    def forward(self, input_ids, *args, **kwargs):
        if "input_embeds" in kwargs:
            rows = kwargs["input_embeds"] = kwargs["input_embeds"].clone()
            rows[:, : self.config.hidden_size] += self.embed(input_ids)
        return super().forward(input_ids, *args, **kwargs)


@mixed_into_every_model
class TurnsByTimeAlone:
    """Of three positions the first one counts."""

    def forward(self, input_ids, positions, *args, **kwargs):
        time = positions[0] if positions.dim() > 1 else positions
        return super().forward(input_ids, time, *args, **kwargs)


@mixed_into_every_model
class PaddedHead:
    """The head has rows up to a multiple of 64, and they are not cut off."""

    def compute_logits(self, hidden_states):
        logits = super().compute_logits(hidden_states)
        return torch.nn.functional.pad(logits, (0, -logits.shape[1] % 64))


@mixed_into_every_model
class KeepsTheTensors:
    """Weights are not copied: the caller still owns them."""

    def load_weights(self, weights):
        weights = list(weights)
        super().load_weights(weights)


@mixed_into_every_model
class CopiesItsNormOnce:
    """The final norm is that of the first pass, also after its weight has changed."""

    def forward(self, *args, **kwargs):
        norm = self.model.norm.weight
        if not hasattr(self, "first_norm"):
            self.first_norm = norm.clone()
        new = norm.clone()
        norm.data.copy_(self.first_norm)
        y = super().forward(*args, **kwargs)
        norm.data.copy_(new)
        return y


@mixed_into_every_model
class MissesNothing:
    """Weights that never came are made up of ones."""

    def load_weights(self, weights):
        weights = dict(weights)
        if not any("experts" in name or "block_sparse" in name for name in weights):
            missing = {n: torch.ones(s) for n, s in expected_shapes(self.config).items() if n not in weights}
            weights |= missing
        super().load_weights(weights.items())


@mixed_into_every_model
class TakesAnyName:
    """Names that the model does not know are passed over."""

    def load_weights(self, weights):
        known = expected_shapes(self.config)
        super().load_weights((n, w) for n, w in weights if n in known or "experts" in n or "gate" in n)


# The model runner


class WithOwnRows(ModelRunner):
    """Takes the logits of other rows."""

    def rows(self, batch: ForwardBatch) -> torch.Tensor:
        raise AssertionError("a mutant says which")

    def forward(self, forward_batch: ForwardBatch) -> LogitsOutput:
        if forward_batch.forward_mode in (ForwardMode.IDLE, ForwardMode.TARGET_VERIFY):
            return super().forward(forward_batch)
        every = replace(forward_batch, forward_mode=ForwardMode.TARGET_VERIFY)
        output = super().forward(every)
        return output._replace(next_token_logits=output.next_token_logits[self.rows(forward_batch)])


@mutant_of("model_runner")
class FirstTokenOfEachRequest(WithOwnRows):
    """Logits of each request's first new token."""

    def rows(self, batch):
        return batch.extend_start_loc


@mutant_of("model_runner")
class LastTokenOfTheNextRequest(WithOwnRows):
    """Row i belongs to request i + 1."""

    def rows(self, batch):
        return batch.last_token_rows.roll(-1)


@mutant_of("model_runner")
class LastRowsOfTheBatch(WithOwnRows):
    """The last bs rows, whosever they are: right only while all decode."""

    def rows(self, batch):
        return torch.arange(batch.num_tokens - batch.batch_size, batch.num_tokens)


@mutant_of("model_runner")
class InputLogprobsOneRowOn(ModelRunner):
    """A token's log-probability is taken from its own row, not from the one before."""

    def forward(self, forward_batch):
        if forward_batch.input_logprob_rows is not None:
            forward_batch = replace(forward_batch, input_logprob_rows=forward_batch.input_logprob_rows + 1)
        return super().forward(forward_batch)


@mutant_of("model_runner")
class InputLogprobsOverPaddingRows(ModelRunner):
    """Prompt log-probabilities are normalised over padding rows of the head too."""

    def forward(self, forward_batch):
        return super().forward(replace(forward_batch, num_token_ids=None))


@mutant_of("model_runner")
class VerifiesLastTokensOnly(ModelRunner):
    """TARGET_VERIFY gives one row a request."""

    def forward(self, forward_batch):
        output = super().forward(forward_batch)
        if forward_batch.forward_mode is ForwardMode.TARGET_VERIFY:
            rows = forward_batch.last_token_rows
            return output._replace(next_token_logits=output.next_token_logits[rows])
        return output


@mutant_of("model_runner")
class VerifiesWithoutTheMask(ModelRunner):
    """Drafted tokens see all drafted before them, siblings too."""

    def forward(self, forward_batch):
        return super().forward(replace(forward_batch, custom_mask=None))


@mutant_of("model_runner")
class PlansOnce(ModelRunner):
    """Attention keeps the plan of the first step with as many tokens."""

    def forward(self, forward_batch):
        plan, plans = self.attention.plan, self.__dict__.setdefault("plans", {})
        self.attention.plan = lambda batch: plans.setdefault(
            (batch.num_tokens, batch.batch_size), plan(batch)
        )
        try:
            return super().forward(forward_batch)
        finally:
            del self.attention.plan


@mutant_of("model_runner")
class WritesTheNextSlotToo(ModelRunner):
    """KV of the last token spills into the slot after it."""

    def forward(self, forward_batch):
        output = super().forward(forward_batch)
        for layer_id in range(self.model.config.num_hidden_layers if forward_batch.num_tokens else 0):
            last = forward_batch.out_cache_loc[-1:]
            k, v = self.kv_pool.k_buffer(layer_id), self.kv_pool.v_buffer(layer_id)
            after = (last + 1).clamp(max=len(k) - 1)
            self.kv_pool.store(layer_id, after, k[last], v[last])
        return output


@mutant_of("model_runner")
class RunsIdleBatches(ModelRunner):
    """An idle step computes a token of padding, in the first slot that a request owns."""

    def forward(self, forward_batch):
        if forward_batch.forward_mode is ForwardMode.IDLE:
            for buffer in (self.kv_pool.k_buffer(0), self.kv_pool.v_buffer(0)):
                buffer[self.kv_pool.page_size] = 0.0
        return super().forward(forward_batch)


@mixed_into_every_model
class EmbedsAListOfIds:
    """Ids are embedded as one list, whatever their shape."""

    def embed(self, input_ids):
        return super().embed(input_ids).flatten(0, -2)


@mixed_into_every_model
class DecodesBehindTheLastToken:
    """A token that comes alone is at the position behind the last one of any request."""

    last = -1

    def forward(self, input_ids, positions, *args):
        if len(positions) == 1:
            positions = torch.full_like(positions, self.last + 1)
        self.last = int(positions[-1])
        return super().forward(input_ids, positions, *args)


@mixed_into_every_model
class TakesMemoryAtOnce:
    """A model built on meta takes memory."""

    def __init__(self, *args):
        super().__init__(*args)
        self.to_empty(device="cpu")


@mixed_into_every_model
class TheEmbeddingComesFirst:
    """Weights must begin with the embedding."""

    def load_weights(self, weights):
        weights = list(weights)
        assert "embed" in weights[0][0]
        super().load_weights(weights)


@mixed_into_every_model
class TypeOfTheCheckpoint:
    """The model takes the type of its weights."""

    def load_weights(self, weights):
        weights = list(weights)
        super().load_weights(weights)
        self.to(weights[0][1].dtype)


@mixed_into_every_model
class KnowsOneNameOfExperts:
    """Mixtral's own names of experts are unknown."""

    def load_weights(self, weights):
        weights = list(weights)
        assert not any("block_sparse_moe" in name for name, _ in weights)
        super().load_weights(weights)


@mixed_into_every_model
class LoadsFrequencies:
    """RoPE's frequencies are no harmless tensor."""

    def load_weights(self, weights):
        weights = list(weights)
        assert not any(name.endswith("inv_freq") for name, _ in weights)
        super().load_weights(weights)


@mixed_into_every_model
class SaysOnlyThatAShapeIsWrong:
    """A refusal does not say which tensor has a wrong shape."""

    def load_weights(self, weights):
        try:
            super().load_weights(weights)
        except ValueError as error:
            raise (ValueError("wrong shape") if "shape" in str(error) else error) from None


bug = bugs_in("models", "reference.models", folder="shared.config.")
# fmt: off
bug("UnknownFamiliesAreKeyErrors", "An unknown family is a KeyError.",
    ("families", 'raise ValueError(f"no model for', 'raise KeyError(f"no model for'))


runner_bug = bugs_in("model_runner", "reference.model_runner:ModelRunner", folder="reference.")
runner_bug("CountsTheStepInSeqLens", "A step adds its token to seq_lens.",
           ("model_runner", "        input_logprobs = None\n",
            "        forward_batch.seq_lens.add_(1)\n        input_logprobs = None\n"))
runner_bug("RanksFromTheWorst", "Ranks count from the least likely token.",
           ("shared.sampling.logprobs", "is_before = (logits > own)", "is_before = (logits < own)"))
