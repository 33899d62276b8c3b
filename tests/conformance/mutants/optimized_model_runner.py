"""Planted bugs in the optimized model runner, with graphs played on a CPU: most need a step before the one in
which they show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from diptych.shared.types import ForwardBatch, ForwardMode, SampleOutput, SamplingBatchInfo
from tests.conformance.mutants.mutant import mutant_of
from tests.model_runner.fake_graphs import FakeGraphsRunner


class WithOwnLoad(FakeGraphsRunner):
    """Fills the buffers otherwise."""

    def prepare(self, config, sampler, num_token_ids):
        super().prepare(config, sampler, num_token_ids)
        self.buffers = self.steps.decode.buffers
        right = self.buffers.load
        self.buffers.load = lambda *args: self.load(right, *args)

    def load(self, right: Any, batch: ForwardBatch, size: int, info: SamplingBatchInfo | None = None) -> None:
        raise AssertionError("a mutant says how")

    def row(self, name: str) -> torch.Tensor:
        return self.buffers.ints.values[self.buffers.ints.rows[name]]

    def keep(self, name: str, right: Any, *args: Any) -> None:
        """Everything but one row."""
        before = self.row(name).clone()
        right(*args)
        self.row(name).copy_(before)


@mutant_of("model_runner")
class KeepsPositions(WithOwnLoad):
    """Tokens are rotated to the positions of the step before."""

    def load(self, right, batch, size, info=None):
        self.keep("positions", right, batch, size, info)


class WithOwnTrees(FakeGraphsRunner):
    """Of verify steps only a part is copied."""

    def prepare(self, config, sampler, num_token_ids):
        super().prepare(config, sampler, num_token_ids)
        if not self.steps.verify:
            return
        buffers = self.steps.verify[0].buffers
        right, kept = buffers.load, self.kept(buffers)

        def load(*args: Any) -> None:
            before = kept.clone()
            right(*args)
            kept.copy_(before)

        buffers.load = load

    def kept(self, buffers: Any) -> torch.Tensor:
        raise AssertionError("a mutant says what")


@mutant_of("model_runner")
class VerifiesPrompts(FakeGraphsRunner):
    """A chunk of a prompt that is as long as drafts takes their graph."""

    def prepare(self, config, sampler, num_token_ids):
        super().prepare(config, sampler, num_token_ids)
        for steps in self.steps.verify:
            fits = steps.buffers.fits
            steps.buffers.fits = lambda batch, fits=fits: fits(
                replace(batch, forward_mode=ForwardMode.TARGET_VERIFY)
            )


@mutant_of("model_runner")
class KeepsTreeMask(WithOwnTrees):
    """Nodes see whom they saw when the graph was captured: themselves."""

    def kept(self, buffers):
        return buffers.tree_mask if buffers.tree_mask is not None else torch.empty(0)


@mutant_of("model_runner")
class KeepsMaskOfBlocks(FakeGraphsRunner):
    """Tokens of a block see themselves alone, as when the graph was captured."""

    def prepare(self, config, sampler, num_token_ids):
        super().prepare(config, sampler, num_token_ids)
        for steps in self.steps.blocks:
            right, mask = steps.buffers.load, steps.buffers.tree_mask.clone()
            steps.buffers.load = lambda *args, to=steps.buffers, right=right, mask=mask: (
                right(*args),
                to.tree_mask.copy_(mask),
            )


@mutant_of("model_runner")
class KeepsSeeds(WithOwnLoad):
    """Seeds are never copied."""

    def load(self, right, batch, size, info=None):
        self.keep("seeds", right, batch, size, info)


@mutant_of("model_runner")
class LeavesOldRows(WithOwnLoad):
    """Behind a batch stands the rest of a larger one before it."""

    def load(self, right, batch, size, info=None):
        right(batch, batch.batch_size, info)


@mutant_of("model_runner")
class ForgetsToReplan(FakeGraphsRunner):
    """Attention keeps the plan of the padding that was captured."""

    def prepare(self, config, sampler, num_token_ids):
        super().prepare(config, sampler, num_token_ids)
        self.attention.replan = lambda plan, batch: None


@mutant_of("model_runner")
class PlansForShortRequests(FakeGraphsRunner):
    """Graphs are planned for requests of at most 64 tokens."""

    def prepare(self, config, sampler, num_token_ids):
        super().prepare(config.updated(context_len=64), sampler, num_token_ids)


class WithOwnKind(FakeGraphsRunner):
    """Takes the graph of another kind of sampling."""

    def kind(self, info: SamplingBatchInfo) -> SamplingBatchInfo:
        raise AssertionError("a mutant says which")

    def forward_and_sample(self, forward_batch, sampler, info, num_token_ids):
        return super().forward_and_sample(forward_batch, sampler, self.kind(info), num_token_ids)


@mutant_of("model_runner")
class ReplaysWithoutLogprobs(WithOwnKind):
    """Log-probabilities are no reason to leave the graph."""

    def kind(self, info):
        return replace(info, return_logprob=False)


@mutant_of("model_runner")
class ReusesTheIds(FakeGraphsRunner):
    """Sampled ids lie where the next step writes its own."""

    def forward_and_sample(self, forward_batch, sampler, info, num_token_ids):
        before = self.replays.samplers
        logits, sampled = super().forward_and_sample(forward_batch, sampler, info, num_token_ids)
        if self.replays.samplers == before:
            return logits, sampled
        self.__dict__.setdefault("ids", torch.zeros_like(self.steps.decode.buffers.ones))
        borrowed = self.ids[: len(sampled.next_token_ids)].copy_(sampled.next_token_ids)
        return logits, SampleOutput(borrowed)


@mutant_of("model_runner")
class WarmsUpInALiveSlot(FakeGraphsRunner):
    """Capturing writes to the first slot that a request may own."""

    def prepare(self, config, sampler, num_token_ids):
        super().prepare(config, sampler, num_token_ids)
        for layer_id in range(self.model.config.num_hidden_layers):
            self.kv_pool.k_buffer(layer_id)[self.kv_pool.page_size] = 0.0


class WithOwnExtend(FakeGraphsRunner):
    """Runs prefill steps otherwise."""

    def prepare(self, config, sampler, num_token_ids):
        super().prepare(config, sampler, num_token_ids)
        self.extend = self.steps.prefill[0]
        self.tokens = self.extend.tokens
        self._right = self.tokens.load, self.extend.run_layers
        self.tokens.load = self.load_tokens
        self.extend.run_layers = self.run_prompts

    def load_tokens(self, batch: ForwardBatch, size: int) -> None:
        self._right[0](batch, size)

    def run_prompts(
        self, batch: ForwardBatch, layers: tuple[int, ...] | None, replay: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._right[1](batch, layers, replay)


@mutant_of("model_runner")
class LeavesOldTokens(WithOwnExtend):
    """Behind a step's tokens stands the rest of a larger one, which writes to its slots again."""

    def load_tokens(self, batch, size):
        super().load_tokens(batch, batch.num_tokens)


@mutant_of("model_runner")
class KeepsPositionsOfPrompts(WithOwnExtend):
    """Tokens of prompts are rotated to the positions of the step before."""

    def load_tokens(self, batch, size):
        before = self.tokens.inputs[1].clone()
        super().load_tokens(batch, size)
        self.tokens.inputs[1].copy_(before)


@mutant_of("model_runner")
class GivesHiddenStatesOfTheCapture(WithOwnExtend):
    """Replays although other layers are wanted than those that were captured."""

    def run_prompts(self, batch, layers, replay):
        if layers is None:
            return super().run_prompts(batch, layers, replay)
        return super().run_prompts(batch, self.extend.captured_layers, replay)


@mutant_of("model_runner")
class RoundsReplayedTrees(FakeGraphsRunner):
    """Logits of trees are rounded to bfloat16 where their step is replayed."""

    def forward(self, forward_batch):
        before = self.replays.steps
        output = super().forward(forward_batch)
        if forward_batch.forward_mode is not ForwardMode.TARGET_VERIFY or self.replays.steps == before:
            return output
        return output._replace(next_token_logits=output.next_token_logits.bfloat16().float())


@mutant_of("model_runner")
class PadsStepsWithGivenRows(FakeGraphsRunner):
    """A prefill step is padded by its token ids, also where it gives rows in place of them."""

    def forward(self, forward_batch):
        return super().forward(replace(forward_batch, embeds=None, embed_rows=None))


@mutant_of("model_runner")
class StepsInOneSlot(FakeGraphsRunner):
    """Steps that are launched together write their KV to the slots of the first."""

    def decode_steps(self, forward_batch, slots, *args):
        return super().decode_steps(forward_batch, slots[:1].expand_as(slots), *args)
