"""Runs one ForwardBatch; a decode batch by replaying a CUDA graph.

Differs from reference: decode batches are padded to one of a list of sizes; for each size the model is
captured in a graph, and the sampler in one more for each kind of sampling. A step is then one copy of the
batch into fixed buffers, a `replan` of attention and two launches, however many kernels the model has.
Without graphs (a flag, a CPU, somebody watching) the same padded batch goes through the same plan and
kernels, so the result is the same bit for bit. Assumes that attention can be captured; else it says so once
and launches kernel by kernel. Loses where padding is large against the batch, as in a list of few sizes.
Everything else - prompts, batches beyond the largest size, tree verification, sampling with penalties,
masks or log-probabilities, steps whose hidden states a draft model wants - runs eagerly.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tqdm.auto import tqdm

from optimized.cuda_graph import CapturedCall, CudaGraphs, DecodeBuffers, SamplingKind, captured_batch_sizes
from shared.config import EngineConfig
from shared.hidden_capture import no_hidden_states, run_model
from shared.interfaces import AttentionBackend, CausalLM, Sampler, TokenToKVPool
from shared.interfaces import model_runner as interface
from shared.logprobs import input_logprobs_of
from shared.types import ForwardBatch, ForwardMode, LogitsOutput, SampleOutput, SamplingBatchInfo
from shared.types.attention import BatchAttention


@dataclass
class DecodeStep:
    """A decode step of one size, over the runner's buffers."""

    batch: ForwardBatch
    plan: Any = None  # None: attention plans anew in each step
    replay_model: CapturedCall | None = None
    replay_sampler: dict[SamplingKind, CapturedCall] = field(default_factory=dict)


class ModelRunner(interface.ModelRunner):
    def __init__(self, model: CausalLM, attention: AttentionBackend, kv_pool: TokenToKVPool) -> None:
        self.model = model
        self.attention = attention
        self.takes_bounds = attention.takes_bounds
        self.kv_pool = kv_pool
        self.batch_sizes: tuple[int, ...] = ()  # to which decode batches are padded
        self.num_graph_replays = 0  # of the model
        self.num_sampler_replays = 0
        self._steps: dict[int, DecodeStep] = {}  # by batch size
        self._captured_for: tuple[Sampler, int] | None = None
        self._last: CapturedCall | None = None  # whose logits are lent out
        self._check_lent = False

    @torch.inference_mode()
    def forward(self, forward_batch: ForwardBatch) -> LogitsOutput:
        if forward_batch.forward_mode is ForwardMode.IDLE:
            vocab_size = self.model.config.vocab_size
            logits = torch.empty(0, vocab_size, device=forward_batch.input_ids.device)
            return LogitsOutput(logits, None, no_hidden_states(self.model, self.capture_hidden))
        step = self._step_for(forward_batch)
        if step is not None:
            return LogitsOutput(self._decode(step, forward_batch))
        attention = BatchAttention(
            self.attention, self.attention.plan(forward_batch), self.kv_pool, forward_batch.out_cache_loc
        )
        hidden_states, captured = run_model(self.model, forward_batch, attention, self.capture_hidden)
        if forward_batch.forward_mode is ForwardMode.TARGET_VERIFY:
            logits = self.model.compute_logits(hidden_states)
        else:
            logits = self.model.compute_logits(hidden_states[forward_batch.last_token_rows])
        input_logprobs = input_logprobs_of(forward_batch, hidden_states, self.model.compute_logits)
        return LogitsOutput(logits, input_logprobs, captured)

    def prepare(self, config: EngineConfig, sampler: Sampler, num_token_ids: int) -> None:
        device = self.kv_pool.device
        self.batch_sizes = captured_batch_sizes(config)
        self._max_seq_len = config.context_len or self.model.config.context_len
        self._check_lent = config.check_invariants
        self._buffers = DecodeBuffers(self.batch_sizes[-1], device)
        graphs = None if config.disable_cuda_graph else self._graphs(device)
        if graphs is None:
            return
        if self.capture_hidden is not None:
            _warn("a draft model wants hidden states, and a graph gives logits only")
            return
        if not self.attention.supports_cuda_graph:
            _warn(f"{type(self.attention).__name__} does not run in CUDA graphs")
            return
        self._capture_all(graphs, sampler, num_token_ids)

    @torch.inference_mode()
    def forward_and_sample(
        self, forward_batch: ForwardBatch, sampler: Sampler, info: SamplingBatchInfo, num_token_ids: int
    ) -> tuple[LogitsOutput, SampleOutput]:
        step, kind = self._step_for(forward_batch), SamplingKind.of(info)
        if (
            step is None
            or kind not in step.replay_sampler
            or self.is_watched
            or self._captured_for != (sampler, num_token_ids)
        ):
            return super().forward_and_sample(forward_batch, sampler, info, num_token_ids)
        logits = self._decode(step, forward_batch, None if kind is SamplingKind.GREEDY else info)
        next_token_ids = step.replay_sampler[kind]()
        self.num_sampler_replays += 1
        # A copy: the next step writes to the same place, perhaps while these are on their way to the host.
        return LogitsOutput(logits), SampleOutput(next_token_ids[: forward_batch.batch_size].clone())

    # ---- one decode step ----

    def _step_for(self, forward_batch: ForwardBatch) -> DecodeStep | None:
        """The step that the batch fits into; None when it is to run as it is."""
        fb = forward_batch
        if fb.forward_mode is not ForwardMode.DECODE or not self.batch_sizes:
            return None
        if self.capture_hidden is not None:
            return None  # a graph gives logits only
        if fb.batch_size > self.batch_sizes[-1] or fb.input_logprob_rows is not None:
            return None
        size = self.batch_sizes[bisect_left(self.batch_sizes, fb.batch_size)]
        if size not in self._steps:
            self._steps[size] = self._make_step(size)
        return self._steps[size]

    def _make_step(self, size: int) -> DecodeStep:
        batch = self._buffers.padding_batch(size)
        if not self.attention.supports_cuda_graph:
            return DecodeStep(batch)
        return DecodeStep(batch, self.attention.plan_for_graph(batch, self._max_seq_len))

    def _decode(
        self, step: DecodeStep, forward_batch: ForwardBatch, info: SamplingBatchInfo | None = None
    ) -> torch.Tensor:
        """Logits of a batch [bs, vocab_size]; those of the rows of padding are cut off."""
        assert not (self._check_lent and self._last is not None and self._last.is_lent), (
            "somebody holds the logits of an earlier step, which the next one overwrites: copy them"
        )
        bs, size = forward_batch.batch_size, step.batch.batch_size
        self._buffers.load(forward_batch, size, info)
        batch = replace(step.batch, seq_lens_cpu=forward_batch.seq_lens_cpu + (1,) * (size - bs))
        if step.plan is None:
            return self._logits(batch, self.attention.plan(batch))[:bs]
        self.attention.replan(step.plan, batch)
        if step.replay_model is None or self.is_watched:
            return self._logits(batch, step.plan)[:bs]
        logits = step.replay_model()
        self._last = step.replay_model
        self.num_graph_replays += 1
        return logits[:bs]

    def _logits(self, batch: ForwardBatch, plan: Any) -> torch.Tensor:
        attention = BatchAttention(self.attention, plan, self.kv_pool, batch.out_cache_loc)
        return self.model.compute_logits(self.model(batch.input_ids, batch.positions, attention))

    # ---- capture ----

    def _graphs(self, device: torch.device) -> CudaGraphs | None:
        return CudaGraphs(device) if device.type == "cuda" else None

    @torch.inference_mode()
    def _capture_all(self, graphs: CudaGraphs, sampler: Sampler, num_token_ids: int) -> None:
        kinds = list(SamplingKind)
        sizes: Iterable[int] = self.batch_sizes[::-1]
        for size in tqdm(sizes, desc="capture CUDA graphs", unit="size", leave=False, delay=1.0):
            step = self._make_step(size)
            replay = _try_to_capture(graphs, "the model", lambda s=step: self._logits(s.batch, s.plan))
            if replay is None:
                return
            logits = replay.output
            assert logits is not None
            for kind in list(kinds):
                info = self._buffers.sampling_info(kind, size)

                def sample(logits=logits, info=info, step=step) -> torch.Tensor:
                    cut = logits[:, :num_token_ids]
                    return sampler.sample(cut, info, step.batch.seq_lens - 1).next_token_ids

                sampled = _try_to_capture(graphs, f"{kind.name.lower()} sampling", sample)
                if sampled is None:
                    kinds.remove(kind)
                else:
                    step.replay_sampler[kind] = sampled
            # Now logits may overwrite each other: they are the widest tensors of all.
            replay.give_up_output(track=self._check_lent)
            step.replay_model = replay
            self._steps[size] = step
        self._captured_for = sampler, num_token_ids
        torch.cuda.empty_cache()


def _try_to_capture(
    graphs: CudaGraphs, what: str, function: Callable[[], torch.Tensor]
) -> CapturedCall | None:
    try:
        return graphs.capture(function)
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        _warn(f"{what} makes the host wait for the GPU")
        return None


def _warn(reason: str) -> None:
    warnings.warn(f"decoding launches kernel by kernel: {reason}", RuntimeWarning, stacklevel=4)
