"""Runs one ForwardBatch; where a kind of step takes it, it is padded and replayed from CUDA graphs.

Differs from reference: the kinds of steps in optimized/graphs/ are tried in order. Decode and verify steps
have model, logits and sampler in graphs; mixed steps are one graph, and prefill steps go in pieces. Without
graphs (a flag, a CPU, recording hooks) the same padded batch is launched, so results are bit-identical. Other
batches, and sampling with penalties, masks or log-probabilities, run eagerly. Loses where padding is large
against the batch. Eager prompts compute the last layer behind attention for their last tokens only.
"""

from __future__ import annotations

import torch

from diptych.optimized.attention.default import DefaultAttention
from diptych.optimized.graphs.all_steps import AllSteps, ReplayCounts
from diptych.optimized.graphs.cuda_graph import graphs_of_runner, warn_of_launches
from diptych.optimized.graphs.steps import Steps
from diptych.optimized.tiers.host_pool import HostPool
from diptych.shared.config import EngineConfig
from diptych.shared.interfaces import Sampler
from diptych.shared.interfaces import model_runner as interface
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.modeling.forward import no_hidden_states, run_model
from diptych.shared.sampling.logprobs import LOGPROB_ROWS, input_logprobs_of
from diptych.shared.types import ForwardBatch, ForwardMode, LogitsOutput, SampleOutput, SamplingBatchInfo


class ModelRunner(interface.ModelRunner):
    num_logprob_rows = LOGPROB_ROWS
    run_model = staticmethod(run_model)
    make_graphs = staticmethod(graphs_of_runner)
    kinds: tuple[Steps, ...] = ()  # of steps, in the order in which they are tried
    replays = ReplayCounts()

    @torch.inference_mode()
    def forward(self, forward_batch: ForwardBatch) -> LogitsOutput:
        if forward_batch.forward_mode is ForwardMode.IDLE:
            vocab_size = self.model.config.vocab_size
            logits = torch.empty(0, vocab_size, device=forward_batch.input_ids.device)
            return LogitsOutput(logits, None, no_hidden_states(self.model, self.capture_hidden))
        self._before_pass(forward_batch)
        return self._forward(forward_batch)

    def _forward(self, forward_batch: ForwardBatch) -> LogitsOutput:
        # --8<-- [start:model-runner-forward]
        steps = self._steps_for(forward_batch)
        if steps is not None:
            return steps.run(forward_batch, self.capture_hidden, replay=not self.is_watched)
        rows = forward_batch.last_token_rows if self._reads_last_rows(forward_batch) else None
        linear = self.linear_attention
        attention = BatchAttention(
            backend=self.attention,
            plan=self.attention.plan(forward_batch),
            kv_pool=self.kv_pool,
            out_cache_loc=forward_batch.out_cache_loc,
            rows=rows,
            linear=None if linear is None else linear.for_batch(forward_batch),
        )
        hidden_states, captured = self.run_model(self.model, forward_batch, attention, self.capture_hidden)
        if forward_batch.forward_mode is ForwardMode.TARGET_VERIFY or rows is not None:
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

    # --8<-- [start:forward-and-sample]
    @torch.inference_mode()
    def forward_and_sample(
        self, forward_batch: ForwardBatch, sampler: Sampler, info: SamplingBatchInfo, num_token_ids: int
    ) -> tuple[LogitsOutput, SampleOutput]:
        steps = self._steps_for(forward_batch)
        if steps is not None and not self.is_watched:
            sampled_step = steps.sampled_step(forward_batch, info, sampler, num_token_ids)
            if sampled_step is not None:
                self._before_pass(forward_batch)
                return steps.run_and_sample(forward_batch, self.capture_hidden, info, sampled_step)
        logits_output = self.forward(forward_batch)
        logits = logits_output.next_token_logits[:, :num_token_ids]
        return logits_output, sampler.sample(logits, info, forward_batch.sampled_positions)

    # --8<-- [end:forward-and-sample]

    def prepare(self, config: EngineConfig, sampler: Sampler, num_token_ids: int) -> None:
        if isinstance(self.attention, DefaultAttention):
            self.attention.prepare()
        linear = self.linear_attention
        if linear is not None and not linear.supports_cuda_graph:
            if self.kv_pool.device.type == "cuda":
                warn_of_launches("each step", f"{type(linear).__name__} does not run in CUDA graphs")
            return
        self.steps = AllSteps(config, self, self.num_logprob_rows)
        self.kinds = self.steps.kinds
        self.replays = ReplayCounts(self.kinds)
        for module in self.model.modules():
            if callable(make_counters := getattr(module, "make_counters", None)):  # of quantized layers
                make_counters()
        graphs = None if config.disable_cuda_graph else self.make_graphs(self.model, self.kv_pool.device)
        self.compile_seconds = self.steps.prepare(self, graphs, sampler, num_token_ids)
        self.max_replayed_bs = self.steps.decode.max_replayed_bs

    def _steps_for(self, forward_batch: ForwardBatch) -> Steps | None:
        return next((steps for steps in self.kinds if steps.takes(forward_batch)), None)

    def _reads_last_rows(self, forward_batch: ForwardBatch) -> bool:
        """Whether only the hidden states of last tokens are read. Blocks of LoRA are of all rows."""
        reads_all = self.capture_hidden is not None or forward_batch.input_logprob_rows is not None
        reads_all |= self.is_watched or self.lora is not None
        return forward_batch.forward_mode.is_prefill and not reads_all

    def _before_pass(self, forward_batch: ForwardBatch) -> None:
        if self.lora is not None:
            self.lora.prepare(forward_batch)
        if self.expert_manager is not None:
            self.expert_manager.before_pass()
        if self.host_states is not None:
            self.host_states.before_pass()
        if self.host_pool is not None:
            self.host_pool.before_pass()
            if forward_batch.forward_mode is not ForwardMode.EXTEND and isinstance(self.host_pool, HostPool):
                self.host_pool.wait_for_all()  # a graph does not wait for each layer
