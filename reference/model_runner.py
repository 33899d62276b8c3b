"""Runs one ForwardBatch eagerly."""

from __future__ import annotations

import torch

from shared.interfaces import AttentionBackend, CausalLM, TokenToKVPool
from shared.interfaces import model_runner as interface
from shared.logprobs import logprobs_of
from shared.types import ForwardBatch, ForwardMode, LogitsOutput, LogprobsOutput
from shared.types.attention import BatchAttention

LOGPROB_ROWS = 512
"""Prompt positions whose logits exist at once: a long prompt times a large vocabulary would not fit."""


class ModelRunner(interface.ModelRunner):
    def __init__(self, model: CausalLM, attention: AttentionBackend, kv_pool: TokenToKVPool) -> None:
        self.model = model
        self.attention = attention
        self.kv_pool = kv_pool

    # --8<-- [start:model-runner-forward]
    @torch.inference_mode()
    def forward(self, forward_batch: ForwardBatch) -> LogitsOutput:
        if forward_batch.forward_mode is ForwardMode.IDLE:
            vocab_size = self.model.config.vocab_size
            return LogitsOutput(torch.empty(0, vocab_size, device=forward_batch.input_ids.device))
        attention = BatchAttention(
            backend=self.attention,
            plan=self.attention.plan(forward_batch),
            kv_pool=self.kv_pool,
            out_cache_loc=forward_batch.out_cache_loc,
        )
        hidden_states = self.model(forward_batch.input_ids, forward_batch.positions, attention)
        if forward_batch.forward_mode is ForwardMode.TARGET_VERIFY:
            logits = self.model.compute_logits(hidden_states)
        else:
            logits = self.model.compute_logits(hidden_states[forward_batch.last_token_rows])
        return LogitsOutput(logits, self._input_logprobs(forward_batch, hidden_states))

    # --8<-- [end:model-runner-forward]

    def _input_logprobs(
        self, forward_batch: ForwardBatch, hidden_states: torch.Tensor
    ) -> LogprobsOutput | None:
        rows, ids = forward_batch.input_logprob_rows, forward_batch.input_logprob_ids
        if rows is None or ids is None:
            return None
        pieces = [
            logprobs_of(
                self.model.compute_logits(hidden_states[rows[i : i + LOGPROB_ROWS]]),
                ids[i : i + LOGPROB_ROWS],
                forward_batch.num_top_input_logprobs,
            )
            for i in range(0, rows.shape[0], LOGPROB_ROWS)
        ]
        return LogprobsOutput(*(torch.cat(parts) for parts in zip(*pieces)))
