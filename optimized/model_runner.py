"""Runs one ForwardBatch; decode and verify batches replay a CUDA graph.

Differs from reference: such batches are padded to one of a list of sizes; for each size the model is
captured in a graph, and the sampler in one more for each kind of sampling. A step is then one copy of the
batch into fixed buffers, a `replan` of attention and two launches, however many kernels the model has.
Trees (verify_graph.py) are those of the shapes that may be drafted; hidden states for a draft model are left
in a buffer of the runner's.
Without graphs (a flag, a CPU, recording hooks) the same padded batch goes through the same plan and
kernels, so the result is the same bit for bit. Assumes that attention can be captured; else it says so once
and launches kernel by kernel. Loses where padding is large against the batch, as in a list of few sizes.
Prefill steps are replayed in pieces, mixed steps whole (extend_graph.py). Everything else -
batches beyond the largest size, sampling with penalties, masks or log-probabilities - runs eagerly; prompts
then compute the last layer after attention for their last tokens only, unless hooks record it.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tqdm.auto import tqdm

from diptych.optimized.graphs.cuda_graph import CapturedCall, CudaGraphs, try_to_capture, warn_of_launches
from diptych.optimized.graphs.decode_graph import DecodeBuffers, SamplingKind, captured_batch_sizes
from diptych.optimized.graphs.extend_graph import ExtendSteps, captured_token_counts
from diptych.optimized.graphs.verify_graph import VerifyBuffers, verify_batch_sizes
from diptych.optimized.tiers.host_pool import HostPool
from diptych.shared.config import EngineConfig
from diptych.shared.config.speculation_flags import possible_shapes
from diptych.shared.interfaces import AttentionBackend, CausalLM, Sampler, TokenToKVPool
from diptych.shared.interfaces import model_runner as interface
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.modeling.forward import no_hidden_states, run_model
from diptych.shared.parallel.alone import ALONE
from diptych.shared.sampling.logprobs import LOGPROB_ROWS, input_logprobs_of
from diptych.shared.types import ForwardBatch, ForwardMode, LogitsOutput, SampleOutput, SamplingBatchInfo


@dataclass
class DecodeStep:
    """A decode or verify step of one size, over the runner's buffers."""

    batch: ForwardBatch
    buffers: DecodeBuffers | VerifyBuffers
    plan: Any = None  # None: attention plans in each step
    replay_model: CapturedCall | None = None
    replay_sampler: dict[SamplingKind, CapturedCall] = field(default_factory=dict)


class ModelRunner(interface.ModelRunner):
    num_logprob_rows = LOGPROB_ROWS

    def __init__(self, model: CausalLM, attention: AttentionBackend, kv_pool: TokenToKVPool) -> None:
        self.model = model
        self.attention = attention
        self.accepts_seq_len_upper_bounds = attention.accepts_seq_len_upper_bounds
        self.kv_pool = kv_pool
        self.batch_sizes: tuple[int, ...] = ()  # padded sizes of decode batches
        self.num_graph_replays = 0  # of the model
        self.num_sampler_replays = 0
        self._steps: dict[int, DecodeStep] = {}  # by batch size
        self._verify_buffers: list[VerifyBuffers] = []  # for each number of nodes, the most first
        self._verify_steps: dict[tuple[int, int], DecodeStep] = {}  # by nodes of a tree and batch size
        self._extend: ExtendSteps | None = None
        self._hidden: torch.Tensor | None = None  # where replays leave hidden states
        self._captured_hidden: tuple[int, ...] | None = None
        self._captured_for: tuple[Sampler, int] | None = None
        self._last: CapturedCall | None = None  # owner of the borrowed logits
        self._check_borrowed = False

    @torch.inference_mode()
    def forward(self, forward_batch: ForwardBatch) -> LogitsOutput:
        if forward_batch.forward_mode is ForwardMode.IDLE:
            vocab_size = self.model.config.vocab_size
            logits = torch.empty(0, vocab_size, device=forward_batch.input_ids.device)
            return LogitsOutput(logits, None, no_hidden_states(self.model, self.capture_hidden))
        self._before_pass(forward_batch)
        # --8<-- [start:model-runner-forward]
        step = self._step_for(forward_batch)
        if step is not None:
            return self._decode(step, forward_batch)
        if self._extend is not None and self._extend.takes(forward_batch):
            replay = not self.is_watched
            hidden_states, captured = self._extend.run(forward_batch, self.capture_hidden, replay)
        elif (
            forward_batch.forward_mode.is_prefill
            and forward_batch.input_logprob_rows is None
            and self.capture_hidden is None
            and not self.is_watched
            and self.lora is None  # its blocks are of all rows
        ):
            hidden_states, _ = self._launch(forward_batch, forward_batch.last_token_rows)
            return LogitsOutput(self.model.compute_logits(hidden_states), None, None)
        else:
            hidden_states, captured = self._launch(forward_batch)
        if forward_batch.forward_mode is ForwardMode.TARGET_VERIFY:
            logits = self.model.compute_logits(hidden_states)
        else:
            logits = self.model.compute_logits(hidden_states[forward_batch.last_token_rows])
        # --8<-- [end:model-runner-forward]
        input_logprobs = None
        if forward_batch.input_logprob_rows is not None:
            input_logprobs = input_logprobs_of(
                forward_batch, hidden_states, self.model.compute_logits, self.num_logprob_rows
            )
        return LogitsOutput(logits, input_logprobs, captured)

    def _before_pass(self, forward_batch: ForwardBatch) -> None:
        if self.lora is not None:
            self.lora.prepare(forward_batch)
        if self.expert_manager is not None:
            self.expert_manager.before_pass()
        if self.host_pool is not None:
            self.host_pool.before_pass()
            if forward_batch.forward_mode is not ForwardMode.EXTEND and isinstance(self.host_pool, HostPool):
                self.host_pool.wait_for_all()  # a graph does not wait for each layer

    @property
    def num_extend_replays(self) -> int:
        return 0 if self._extend is None else self._extend.num_replays

    def _launch(
        self, forward_batch: ForwardBatch, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the model without graphs: hidden states of `rows` or of all tokens, and the captured ones if
        requested."""
        plan = self.attention.plan(forward_batch)
        attention = BatchAttention(self.attention, plan, self.kv_pool, forward_batch.out_cache_loc, rows)
        return run_model(self.model, forward_batch, attention, self.capture_hidden)

    def prepare(self, config: EngineConfig, sampler: Sampler, num_token_ids: int) -> None:
        device = self.kv_pool.device
        sizes = captured_token_counts(config, self.model.config)
        self._extend = ExtendSteps(
            self.model, self.attention, self.kv_pool, sizes, is_mixed=config.enable_mixed_chunk
        )
        self.batch_sizes = captured_batch_sizes(config)
        self._max_seq_len = config.context_len or self.model.config.context_len
        self._check_borrowed = config.check_invariants
        self._buffers = DecodeBuffers(self.batch_sizes[-1], device)
        if config.speculative is not None and self.attention.accepts_seq_len_upper_bounds:
            shapes = possible_shapes(config)
            for num_nodes in dict.fromkeys(shape.num_draft_tokens for shape in shapes):
                sizes = verify_batch_sizes(config, num_nodes)
                self._verify_buffers.append(VerifyBuffers(sizes, num_nodes, shapes[0].top_k > 1, device))
            self._max_seq_len += shapes[0].num_draft_tokens
        graphs = None if config.disable_cuda_graph else self._graphs(device)
        if graphs is None:
            return
        if self.attention.supports_cuda_graph:
            self._capture_all(graphs, sampler, num_token_ids)
        else:
            warn_of_launches("decoding", f"{type(self.attention).__name__} does not run in CUDA graphs")
        self._extend.capture_all(graphs, self.capture_hidden)
        if device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def forward_and_sample(
        self, forward_batch: ForwardBatch, sampler: Sampler, info: SamplingBatchInfo, num_token_ids: int
    ) -> tuple[LogitsOutput, SampleOutput]:
        # --8<-- [start:forward-and-sample]
        step, kind = self._step_for(forward_batch), SamplingKind.of(info)
        if (
            step is None
            or kind not in step.replay_sampler
            or self.is_watched
            or self._captured_for != (sampler, num_token_ids)
        ):
            logits_output = self.forward(forward_batch)
            logits = logits_output.next_token_logits[:, :num_token_ids]
            return logits_output, sampler.sample(logits, info, forward_batch.sampled_positions)
        self._before_pass(forward_batch)
        logits_output = self._decode(step, forward_batch, None if kind is SamplingKind.GREEDY else info)
        next_token_ids = step.replay_sampler[kind]()
        self.num_sampler_replays += 1
        # A copy: the next step overwrites these, perhaps during their copy to the CPU.
        return logits_output, SampleOutput(next_token_ids[: forward_batch.num_tokens].clone())
        # --8<-- [end:forward-and-sample]

    # ---- one decode step ----

    def _step_for(self, forward_batch: ForwardBatch) -> DecodeStep | None:
        """The captured step for the batch; None if it runs without padding."""
        fb = forward_batch
        if fb.input_logprob_rows is not None:
            return None
        if fb.forward_mode is ForwardMode.DECODE and self.batch_sizes:
            size = _size_for(fb.batch_size, self.batch_sizes)
            if size is not None and size not in self._steps:
                self._steps[size] = self._make_step(self._buffers, size)
            return None if size is None else self._steps[size]
        if fb.forward_mode is ForwardMode.TARGET_VERIFY:
            for buffers in self._verify_buffers:
                size = _size_for(fb.batch_size, buffers.batch_sizes)
                if size is not None and buffers.fits(fb):
                    key = buffers.num_nodes, size
                    if key not in self._verify_steps:
                        self._verify_steps[key] = self._make_step(buffers, size)
                    return self._verify_steps[key]
        return None

    def _make_step(self, buffers: DecodeBuffers | VerifyBuffers, size: int) -> DecodeStep:
        batch = buffers.padding_batch(size)
        if not self.attention.supports_cuda_graph:
            return DecodeStep(batch, buffers)
        return DecodeStep(batch, buffers, self.attention.plan_for_graph(batch, self._max_seq_len))

    def _decode(
        self, step: DecodeStep, forward_batch: ForwardBatch, info: SamplingBatchInfo | None = None
    ) -> LogitsOutput:
        """The output of a batch, without padding rows."""
        assert not (self._check_borrowed and self._last is not None and self._last.is_borrowed), (
            "the logits of an earlier step are still referenced, and the next step overwrites them: copy them"
        )
        num_tokens, size = forward_batch.num_tokens, step.batch.batch_size
        step.buffers.load(forward_batch, size, info)
        padding = step.buffers.padding_lens(size - forward_batch.batch_size)
        batch = replace(step.batch, seq_lens_cpu=forward_batch.seq_lens_cpu + padding)
        plan = step.plan
        if plan is None:
            plan = self.attention.plan(batch)
        else:
            self.attention.replan(plan, batch)
        is_replayable = step.replay_model is not None and self._captured_hidden == self.capture_hidden
        if step.replay_model is None or not is_replayable or self.is_watched:
            logits, hidden_states = self._run(batch, plan)
        else:
            logits, hidden_states = step.replay_model(), self._hidden
            self._last = step.replay_model
            self.num_graph_replays += 1
        return LogitsOutput(
            logits[:num_tokens], None, None if hidden_states is None else hidden_states[:num_tokens]
        )

    def _run(self, batch: ForwardBatch, plan: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits of every token, and hidden states if requested."""
        attention = BatchAttention(self.attention, plan, self.kv_pool, batch.out_cache_loc)
        hidden_states, captured = run_model(self.model, batch, attention, self.capture_hidden)
        return self.model.compute_logits(hidden_states), captured

    # ---- capture ----

    def _graphs(self, device: torch.device) -> CudaGraphs | None:
        return CudaGraphs(device, getattr(self.model, "tp", ALONE)) if device.type == "cuda" else None

    @torch.inference_mode()
    def _capture_all(self, graphs: CudaGraphs, sampler: Sampler, num_token_ids: int) -> None:
        """Capture all steps, largest first: verify steps have more tokens."""
        self._captured_hidden = self.capture_hidden
        self._hidden = no_hidden_states(self.model, self.capture_hidden)
        wanted = [(buffers, size) for buffers in self._verify_buffers for size in buffers.batch_sizes[::-1]]
        kinds = list(SamplingKind)
        if self._hidden is not None:
            num_tokens = max([self.batch_sizes[-1], *(b.num_nodes * size for b, size in wanted)])
            self._hidden = self._hidden.new_zeros(num_tokens, self._hidden.shape[1])
        wanted += [(self._buffers, size) for size in self.batch_sizes[::-1]]
        for buffers, size in tqdm(wanted, desc="capture CUDA graphs", unit="size", leave=False, delay=1.0):
            step = self._make_step(buffers, size)
            if not self._capture(graphs, step, kinds, sampler, num_token_ids):
                return
            if isinstance(buffers, VerifyBuffers):
                self._verify_steps[buffers.num_nodes, size] = step
            else:
                self._steps[size] = step
        self._captured_for = sampler, num_token_ids

    def _capture(
        self,
        graphs: CudaGraphs,
        step: DecodeStep,
        kinds: list[SamplingKind],
        sampler: Sampler,
        num_token_ids: int,
    ) -> bool:
        """Capture a step. False if the model could not be captured. Kinds of sampling that could not are
        removed from `kinds`."""

        def run() -> torch.Tensor:
            logits, hidden_states = self._run(step.batch, step.plan)
            if hidden_states is not None:
                assert self._hidden is not None
                self._hidden[: len(hidden_states)].copy_(hidden_states)
            return logits

        replay = try_to_capture(graphs, "decoding", "the model", run)
        if replay is None:
            return False
        logits = replay.output
        assert logits is not None
        for kind in list(kinds):
            info = step.buffers.sampling_info(kind, step.batch.batch_size)

            def sample(info: SamplingBatchInfo = info) -> torch.Tensor:
                return sampler.sample(
                    logits[:, :num_token_ids], info, step.batch.sampled_positions
                ).next_token_ids

            sampled = try_to_capture(graphs, "decoding", f"{kind.name.lower()} sampling", sample)
            if sampled is None:
                kinds.remove(kind)
            else:
                step.replay_sampler[kind] = sampled
        # From here on logits may share memory, because they are the widest tensors.
        replay.give_up_output(track=self._check_borrowed)
        step.replay_model = replay
        return True


def _size_for(batch_size: int, sizes: tuple[int, ...]) -> int | None:
    """The smallest captured size that is large enough."""
    place = bisect_left(sizes, batch_size)
    return sizes[place] if place < len(sizes) else None
