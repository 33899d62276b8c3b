"""Runs one ForwardBatch eagerly."""

from __future__ import annotations

import torch

from shared.interfaces import AttentionBackend, CausalLM, TokenToKVPool
from shared.interfaces import model_runner as interface
from shared.modeling.hidden_states import no_hidden_states, run_model
from shared.sampling.logprobs import input_logprobs_of
from shared.types import ForwardBatch, ForwardMode, LogitsOutput
from shared.types.attention import BatchAttention


class ModelRunner(interface.ModelRunner):
    def __init__(self, model: CausalLM, attention: AttentionBackend, kv_pool: TokenToKVPool) -> None:
        self.model = model
        self.attention = attention
        self.accepts_seq_len_upper_bounds = attention.accepts_seq_len_upper_bounds
        self.kv_pool = kv_pool

    # --8<-- [start:model-runner-forward]
    @torch.inference_mode()
    def forward(self, forward_batch: ForwardBatch) -> LogitsOutput:
        if forward_batch.forward_mode is ForwardMode.IDLE:
            vocab_size = self.model.config.vocab_size
            logits = torch.empty(0, vocab_size, device=forward_batch.input_ids.device)
            return LogitsOutput(logits, None, no_hidden_states(self.model, self.capture_hidden))
        attention = BatchAttention(
            backend=self.attention,
            plan=self.attention.plan(forward_batch),
            kv_pool=self.kv_pool,
            out_cache_loc=forward_batch.out_cache_loc,
        )
        hidden_states, captured = run_model(self.model, forward_batch, attention, self.capture_hidden)
        if forward_batch.forward_mode is ForwardMode.TARGET_VERIFY:
            logits = self.model.compute_logits(hidden_states)
        else:
            logits = self.model.compute_logits(hidden_states[forward_batch.last_token_rows])
        input_logprobs = input_logprobs_of(forward_batch, hidden_states, self.model.compute_logits)
        return LogitsOutput(logits, input_logprobs, captured)

    # --8<-- [end:model-runner-forward]
