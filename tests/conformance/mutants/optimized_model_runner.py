"""Planted bugs in the optimized model runner, with graphs played on a CPU: most need a step before the one in
which they show."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import Any

import torch

from diptych.shared.types import ForwardBatch, LogitsOutput, SampleOutput, SamplingBatchInfo
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
class KeepsSeqLens(WithOwnLoad):
    """Lengths are those of the step before."""

    def load(self, right, batch, size, info=None):
        self.keep("seq_lens", right, batch, size, info)


@mutant_of("model_runner")
class KeepsRows(WithOwnLoad):
    """Requests are looked up in the rows of the step before."""

    def load(self, right, batch, size, info=None):
        self.keep("req_pool_indices", right, batch, size, info)


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
class KeepsTreeMask(WithOwnTrees):
    """Nodes see whom they saw when the graph was captured: themselves."""

    def kept(self, buffers):
        return buffers.tree_mask if buffers.tree_mask is not None else torch.empty(0)


@mutant_of("model_runner")
class KeepsNodePositions(WithOwnTrees):
    """Nodes are rotated to the position of padding."""

    def kept(self, buffers):
        return buffers.node_ints.head("positions", buffers.node_ints.values.shape[1])


@mutant_of("model_runner")
class KeepsSeeds(WithOwnLoad):
    """Seeds are never copied."""

    def load(self, right, batch, size, info=None):
        self.keep("seeds", right, batch, size, info)


@mutant_of("model_runner")
class KeepsParameters(WithOwnLoad):
    """Parameters of sampling are copied once for each size."""

    def load(self, right, batch, size, info=None):
        seen = self.__dict__.setdefault("seen", {})
        right(batch, size, info and seen.setdefault((batch.batch_size, size), info))


@mutant_of("model_runner")
class LeavesOldRows(WithOwnLoad):
    """Behind a batch stands the rest of a larger one before it."""

    def load(self, right, batch, size, info=None):
        right(batch, batch.batch_size, info)


@mutant_of("model_runner")
class PadsWithALiveSlot(WithOwnLoad):
    """Padding writes to the first request's slot."""

    def load(self, right, batch, size, info=None):
        right(batch, size, info)
        self.row("out_cache_loc")[batch.batch_size : size] = batch.out_cache_loc[0]


@mutant_of("model_runner")
class TemperaturesOneStepLate(FakeGraphsRunner):
    """Temperatures are copied after they were used."""

    def forward_and_sample(self, forward_batch, sampler, info, num_token_ids):
        decode, num = self.steps.decode, len(info.seeds)
        late = replace(info, temperatures=decode.buffers.floats.head("temperatures", num).clone())
        output = super().forward_and_sample(forward_batch, sampler, late, num_token_ids)
        if num <= decode.max_bs:
            decode.buffers.floats.head("temperatures", num).copy_(info.temperatures)
        return output


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


@mutant_of("model_runner")
class GivesTheRowsOfPadding(FakeGraphsRunner):
    """Logits have as many rows as the graph."""

    def forward(self, forward_batch):
        output = super().forward(forward_batch)
        logits, decode = output.next_token_logits, self.steps.decode
        if not decode.takes(forward_batch):
            return output
        sizes = decode.batch_sizes
        missing = sizes[bisect_left(sizes, len(logits))] - len(logits)
        return output._replace(
            next_token_logits=torch.cat([logits, logits.new_zeros(missing, logits.shape[1])])
        )


@mutant_of("model_runner")
class TakesTheSmallerSize(FakeGraphsRunner):
    """A batch between two sizes is cut to the smaller one."""

    def _steps_for(self, forward_batch):
        steps = super()._steps_for(forward_batch)
        if steps is not self.steps.decode:
            return steps
        sizes = steps.batch_sizes
        size = sizes[max(bisect_left(sizes, forward_batch.batch_size + 1) - 1, 0)]
        names = ("input_ids", "positions", "req_pool_indices", "seq_lens", "out_cache_loc")
        more = ("extend_seq_lens", "extend_start_loc", "seq_lens_cpu", "extend_seq_lens_cpu")
        cut = {name: getattr(forward_batch, name)[:size] for name in (*names, *more)}
        vars(forward_batch).update(cut)
        return steps


class WithOwnKind(FakeGraphsRunner):
    """Takes the graph of another kind of sampling."""

    def kind(self, info: SamplingBatchInfo) -> SamplingBatchInfo:
        raise AssertionError("a mutant says which")

    def forward_and_sample(self, forward_batch, sampler, info, num_token_ids):
        return super().forward_and_sample(forward_batch, sampler, self.kind(info), num_token_ids)


@mutant_of("model_runner")
class GreedyWhereTheFirstIs(WithOwnKind):
    """A batch whose first request is greedy is greedy."""

    def kind(self, info):
        return replace(info, is_all_greedy=True) if bool(info.is_greedy[0]) else info


@mutant_of("model_runner")
class ReplaysWithoutFilters(WithOwnKind):
    """Filters are left out."""

    def kind(self, info):
        return replace(info, needs_filter=False)


@mutant_of("model_runner")
class ReplaysWithoutPenalties(WithOwnKind):
    """Penalties are no reason to leave the graph."""

    def kind(self, info):
        return replace(info, output_counts=None, frequency_penalties=None)


@mutant_of("model_runner")
class ReplaysWithoutLogprobs(WithOwnKind):
    """Log-probabilities are no reason to leave the graph."""

    def kind(self, info):
        return replace(info, return_logprob=False)


@mutant_of("model_runner")
class SamplesPaddingOfTheHead(FakeGraphsRunner):
    """The graphs sample from all rows of the head."""

    def prepare(self, config, sampler, num_token_ids):
        super().prepare(config, sampler, self.model.config.vocab_size)
        self.steps.decode.results.sampled_by = sampler, num_token_ids


@mutant_of("model_runner")
class ReusesTheIds(FakeGraphsRunner):
    """Sampled ids lie where the next step writes its own."""

    def forward_and_sample(self, forward_batch, sampler, info, num_token_ids):
        before = self.num_sampler_replays
        logits, sampled = super().forward_and_sample(forward_batch, sampler, info, num_token_ids)
        if self.num_sampler_replays == before:
            return logits, sampled
        self.__dict__.setdefault("ids", torch.zeros_like(self.steps.decode.buffers.ones))
        borrowed = self.ids[: len(sampled.next_token_ids)].copy_(sampled.next_token_ids)
        return logits, SampleOutput(borrowed)


@mutant_of("model_runner")
class ReplaysUnseen(FakeGraphsRunner):
    """Steps are replayed although hooks record them."""

    def forward_and_sample(self, forward_batch, sampler, info, num_token_ids):
        watched, self.is_watched = self.is_watched, False
        try:
            return super().forward_and_sample(forward_batch, sampler, info, num_token_ids)
        finally:
            self.is_watched = watched


@mutant_of("model_runner")
class LogitsOfTheLargestGraph(FakeGraphsRunner):
    """Every size gives the logits that the first captured size has in memory."""

    def forward(self, forward_batch) -> LogitsOutput:
        before = self.num_graph_replays
        output = super().forward(forward_batch)
        if self.num_graph_replays > before:
            memory = self.steps.decode.by_size[self.steps.decode.max_bs].replay_model.memory
            return LogitsOutput(memory[: forward_batch.batch_size])
        return output


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
class GivesTheLastRows(WithOwnExtend):
    """Hidden states are counted from the end of the padding."""

    def run_prompts(self, batch, layers, replay):
        given, captured = super().run_prompts(batch, layers, replay)
        sizes = self.tokens.sizes
        num_padding = sizes[bisect_left(sizes, batch.num_tokens)] - batch.num_tokens
        start = given.storage_offset() + num_padding * given.stride(0)
        return given.as_strided(given.shape, given.stride(), start), captured


@mutant_of("model_runner")
class CutsToTheSmallerSize(WithOwnExtend):
    """What a step has beyond a size is not computed."""

    def run_prompts(self, batch, layers, replay):
        given, captured = super().run_prompts(batch, layers, replay)
        given = given.clone()
        smaller = [size for size in self.tokens.sizes if size < batch.num_tokens]
        given[max(smaller, default=batch.num_tokens) :] = 0.0
        return given, captured


@mutant_of("model_runner")
class ForgetsAttentionOfReplays(FakeGraphsRunner):
    """Behind the first piece, attention is what an earlier step left."""

    def prepare(self, config, sampler, num_token_ids):
        super().prepare(config, sampler, num_token_ids)
        for pieces in self.steps.prefill[0].captured.values():
            for piece in pieces.up_to_attention[1:]:
                piece.layer = pieces.up_to_attention[0].layer


@mutant_of("model_runner")
class GivesHiddenStatesOfTheCapture(WithOwnExtend):
    """Replays although other layers are wanted than those that were captured."""

    def run_prompts(self, batch, layers, replay):
        if layers is None:
            return super().run_prompts(batch, layers, replay)
        return super().run_prompts(batch, self.extend.captured_layers, replay)
