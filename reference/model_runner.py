"""Runs one ForwardBatch eagerly."""

from __future__ import annotations

import torch

from diptych.shared.interfaces import Sampler
from diptych.shared.interfaces import model_runner as interface
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.modeling.forward import no_hidden_states, run_model
from diptych.shared.sampling.logprobs import input_logprobs_of
from diptych.shared.types import ForwardBatch, ForwardMode, LogitsOutput, SampleOutput, SamplingBatchInfo


class ModelRunner(interface.ModelRunner):
    run_model = staticmethod(run_model)

    @torch.inference_mode()
    def forward(self, forward_batch: ForwardBatch) -> LogitsOutput:
        if forward_batch.forward_mode is ForwardMode.IDLE:
            vocab_size = self.model.config.vocab_size
            logits = torch.empty(0, vocab_size, device=forward_batch.input_ids.device)
            return LogitsOutput(logits, None, no_hidden_states(self.model, self.capture_hidden))
        if self.host_pool is not None:
            self.host_pool.before_pass()
        if self.host_states is not None:
            self.host_states.before_pass()
        if self.expert_manager is not None:
            self.expert_manager.before_pass()
        if self.lora is not None:
            self.lora.prepare(forward_batch)
        linear = None
        if self.linear_attention is not None:
            linear = self.linear_attention.for_batch(forward_batch)
        # --8<-- [start:model-runner-forward]
        attention = BatchAttention(
            backend=self.attention,
            plan=self.attention.plan(forward_batch),
            kv_pool=self.kv_pool,
            out_cache_loc=forward_batch.out_cache_loc,
            linear=linear,
        )
        hidden_states, captured = self.run_model(self.model, forward_batch, attention, self.capture_hidden)
        if forward_batch.forward_mode is ForwardMode.TARGET_VERIFY:
            logits = self.model.compute_logits(hidden_states)
        else:
            logits = self.model.compute_logits(hidden_states[forward_batch.last_token_rows])
        # --8<-- [end:model-runner-forward]
        input_logprobs = None
        if forward_batch.input_logprob_rows is not None:
            input_logprobs = input_logprobs_of(forward_batch, hidden_states, self.model.compute_logits)
        return LogitsOutput(logits, input_logprobs, captured)

    # --8<-- [start:forward-and-sample]
    @torch.inference_mode()
    def forward_and_sample(
        self, forward_batch: ForwardBatch, sampler: Sampler, info: SamplingBatchInfo, num_token_ids: int
    ) -> tuple[LogitsOutput, SampleOutput]:
        logits_output = self.forward(forward_batch)
        logits = logits_output.next_token_logits[:, :num_token_ids]
        return logits_output, sampler.sample(logits, info, forward_batch.sampled_positions)

    # --8<-- [end:forward-and-sample]
