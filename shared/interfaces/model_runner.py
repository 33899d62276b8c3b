"""Contract of the model runner."""

from __future__ import annotations

from abc import ABC, abstractmethod

from shared.interfaces.attention import AttentionBackend
from shared.interfaces.memory_pool import TokenToKVPool
from shared.interfaces.model import CausalLM
from shared.types import ForwardBatch, LogitsOutput


class ModelRunner(ABC):
    """Runs one ForwardBatch: plan attention, run the model, take the logits that somebody wants."""

    model: CausalLM

    @abstractmethod
    def __init__(self, model: CausalLM, attention: AttentionBackend, kv_pool: TokenToKVPool) -> None: ...

    @abstractmethod
    def forward(self, forward_batch: ForwardBatch) -> LogitsOutput:
        """Logits of each request's last token (TARGET_VERIFY: of every token), and prompt log-probabilities
        for `input_logprob_rows`: raw log softmax of the logits, no temperature. Writes the step's KV and
        nothing else. Logits are float32 on the model's device; an IDLE batch gives zero rows."""
