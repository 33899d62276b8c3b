"""Decode and verify steps as CUDA graphs: one for the model, and one more for each kind of sampling.

A step is one copy of the batch into the buffers (decode_graph.py, verify_graph.py), a `replan` of attention
and two launches, however many kernels the model has.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tqdm.auto import tqdm

from diptych.optimized.graphs.cuda_graph import CapturedCall, CudaGraphs, try_to_capture
from diptych.optimized.graphs.decode_graph import DecodeBuffers, SamplingKind
from diptych.optimized.graphs.steps import Layers, Steps
from diptych.optimized.graphs.verify_graph import VerifyBuffers
from diptych.shared.interfaces import AttentionBackend, CausalLM, Sampler, TokenToKVPool
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.interfaces.linear_attention import BatchLinearAttention, LinearAttention
from diptych.shared.modeling.forward import no_hidden_states, run_model
from diptych.shared.types import ForwardBatch, LogitsOutput, SampleOutput, SamplingBatchInfo


@dataclass
class BatchStep:
    """The step of one batch size, over the buffers."""

    batch: ForwardBatch
    plan: Any = None  # None: attention plans in each step
    linear: BatchLinearAttention | None = None  # of models with layers of linear attention
    replay_model: CapturedCall | None = None
    replay_sampler: dict[SamplingKind, CapturedCall] = field(default_factory=dict)


SampledStep = tuple[BatchStep, SamplingKind]
"""A step with graphs of model and sampler, and the kind of sampling."""


@dataclass
class Results:
    """What decode and verify steps of all sizes have in common: the place of their results."""

    layers: Layers = None  # whose inputs replays leave in `hidden`
    hidden: torch.Tensor | None = None
    sampled_by: tuple[Sampler, int] | None = None  # with its number of token ids
    last: CapturedCall | None = None  # owner of the borrowed logits
    check_borrowed: bool = False


class BatchSteps(Steps):
    captures_sampler = True

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        kv_pool: TokenToKVPool,
        buffers: DecodeBuffers | VerifyBuffers,
        max_seq_len: int,
        results: Results,
        linear: LinearAttention | None = None,
    ) -> None:
        self.model = model
        self.attention = attention
        self.kv_pool = kv_pool
        self.buffers = buffers
        self.batch_sizes = buffers.batch_sizes
        self.max_bs = max(self.batch_sizes, default=0)
        self.max_seq_len = max_seq_len
        self.results = results
        self.linear = linear
        self.num_sampler_replays = 0
        self.min_rows = 0  # requests, of ranks that step together
        self.by_size: dict[int, BatchStep] = {}

    @property
    def max_replayed_bs(self) -> int:
        """Most requests of a step whose model and sampler are replayed."""
        sizes = (size for size, step in self.by_size.items() if step.replay_model and step.replay_sampler)
        return max(sizes, default=0)

    def takes(self, batch: ForwardBatch) -> bool:
        fits = self.buffers.fits(batch)
        return fits and batch.batch_size <= self.max_bs and batch.input_logprob_rows is None

    def run(self, batch: ForwardBatch, layers: Layers, replay: bool) -> LogitsOutput:
        return self._run(self._step_for(batch), batch, layers, replay)

    def _run(
        self,
        step: BatchStep,
        batch: ForwardBatch,
        layers: Layers,
        replay: bool,
        info: SamplingBatchInfo | None = None,
    ) -> LogitsOutput:
        """`info`: for the sampler's graph, if it reads it."""
        results, num_tokens, size = self.results, batch.num_tokens, step.batch.batch_size
        assert not (results.check_borrowed and results.last is not None and results.last.is_borrowed), (
            "the logits of an earlier step are still referenced, and the next step overwrites them: copy them"
        )
        self.buffers.load(batch, size, info)
        padding = self.buffers.padding_lens(size - batch.batch_size)
        padded = replace(step.batch, seq_lens_cpu=batch.seq_lens_cpu + padding)
        plan = step.plan
        if plan is None:
            plan = self.attention.plan(padded)
        else:
            self.attention.replan(plan, padded)
        if step.linear is not None:
            step.linear.backend.replan(step.linear.plan, batch)
        if step.replay_model is None or results.layers != layers or not replay:
            logits, hidden_states = self._launch(padded, plan, step.linear, layers)
        else:
            logits, hidden_states = step.replay_model(), results.hidden
            results.last = step.replay_model
            self.num_replays += 1
        return LogitsOutput(
            logits[:num_tokens], None, None if hidden_states is None else hidden_states[:num_tokens]
        )

    def sampled_step(
        self, batch: ForwardBatch, info: SamplingBatchInfo, sampler: Sampler, num_token_ids: int
    ) -> SampledStep | None:
        step, kind = self._step_for(batch), SamplingKind.of(info)
        if kind is None or kind not in step.replay_sampler:
            return None
        return (step, kind) if self.results.sampled_by == (sampler, num_token_ids) else None

    def run_and_sample(
        self, batch: ForwardBatch, layers: Layers, info: SamplingBatchInfo, sampled_step: SampledStep
    ) -> tuple[LogitsOutput, SampleOutput]:
        # --8<-- [start:replay-sampler]
        step, kind = sampled_step
        read = None if kind is SamplingKind.GREEDY else info
        logits_output = self._run(step, batch, layers, True, read)
        next_token_ids = step.replay_sampler[kind]()
        self.num_sampler_replays += 1
        # A copy: the next step overwrites these, perhaps during their copy to the CPU.
        return logits_output, SampleOutput(next_token_ids[: batch.num_tokens].clone())
        # --8<-- [end:replay-sampler]

    def _step_for(self, batch: ForwardBatch) -> BatchStep:
        """The step of the smallest size that is large enough."""
        size = self.batch_sizes[bisect_left(self.batch_sizes, max(batch.batch_size, self.min_rows))]
        if size not in self.by_size:
            self.by_size[size] = self._make_step(size)
        return self.by_size[size]

    def _make_step(self, size: int) -> BatchStep:
        step = BatchStep(self.buffers.padding_batch(size))
        if self.linear is not None:
            step.linear = BatchLinearAttention(self.linear, self.linear.plan_for_graph(step.batch))
        if self.attention.supports_cuda_graph:
            step.plan = self.attention.plan_for_graph(step.batch, self.max_seq_len)
        return step

    def _launch(
        self, batch: ForwardBatch, plan: Any, linear: BatchLinearAttention | None, layers: Layers
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits of every token, and hidden states if requested."""
        attention = BatchAttention(self.attention, plan, self.kv_pool, batch.out_cache_loc, linear=linear)
        hidden_states, captured = run_model(self.model, batch, attention, layers)
        return self.model.compute_logits(hidden_states), captured

    def capture(
        self,
        graphs: CudaGraphs,
        size: int,
        kinds: list[SamplingKind],
        sampler: Sampler,
        num_token_ids: int,
    ) -> bool:
        """Capture the step of a size. False if the model could not be captured. Kinds of sampling that could
        not are removed from `kinds`."""
        step, results = self._make_step(size), self.results

        def run() -> torch.Tensor:
            logits, hidden_states = self._launch(step.batch, step.plan, step.linear, results.layers)
            if hidden_states is not None:
                assert results.hidden is not None
                results.hidden[: len(hidden_states)].copy_(hidden_states)
            return logits

        is_known = bool(self.by_size) and not self.attention.runs_before_capture
        replay = try_to_capture(graphs, "decoding", "the model", run, is_known)
        if replay is None:
            return False
        logits = replay.output
        assert logits is not None
        for kind in list(kinds):
            info = self.buffers.sampling_info(kind, size)

            def sample(info: SamplingBatchInfo = info) -> torch.Tensor:
                output = sampler.sample(logits[:, :num_token_ids], info, step.batch.sampled_positions)
                return output.next_token_ids

            what = f"{kind.name.lower()} sampling"
            sampled = try_to_capture(graphs, "decoding", what, sample, bool(self.by_size))
            if sampled is None:
                kinds.remove(kind)
            else:
                step.replay_sampler[kind] = sampled
        # From here on logits may share memory, because they are the widest tensors.
        replay.give_up_output(track=results.check_borrowed)
        step.replay_model = replay
        self.by_size[size] = step
        return True


@torch.inference_mode()
def capture_batch_steps(
    all_steps: Sequence[BatchSteps],
    graphs: CudaGraphs,
    layers: Layers,
    sampler: Sampler,
    num_token_ids: int,
) -> None:
    """Capture all sizes of all kinds, the kind with the most tokens first, and the largest size of each."""
    model, results = all_steps[0].model, all_steps[0].results
    results.layers, results.hidden = layers, no_hidden_states(model, layers)
    wanted = [(steps, size) for steps in all_steps for size in steps.batch_sizes[::-1]]
    if results.hidden is not None:
        num_tokens = max(size * steps.buffers.num_nodes for steps, size in wanted)
        results.hidden = results.hidden.new_zeros(num_tokens, results.hidden.shape[1])
    kinds = list(SamplingKind)
    for steps, size in tqdm(wanted, desc="capture CUDA graphs", unit="size", leave=False, delay=1.0):
        its_kinds = kinds if steps.captures_sampler else []
        if not steps.capture(graphs, size, its_kinds, sampler, num_token_ids):
            return
    results.sampled_by = sampler, num_token_ids
