"""Contract of the model runner."""

from __future__ import annotations

from abc import ABC, abstractmethod

from shared.config import EngineConfig
from shared.interfaces.attention import AttentionBackend
from shared.interfaces.memory_pool import TokenToKVPool
from shared.interfaces.model import CausalLM
from shared.interfaces.sampler import Sampler
from shared.types import ForwardBatch, LogitsOutput, SampleOutput, SamplingBatchInfo


class ModelRunner(ABC):
    """Runs one ForwardBatch: plan attention, run the model, take the logits that somebody wants.

    `is_watched`: somebody hangs on to the model's modules, or has put something around `forward` or
    `sampler.sample`. While it is True, every step calls them; nothing is replayed behind their back.

    `capture_hidden`: the layers whose inputs somebody wants; may be set between any two steps. While it is
    not None, `LogitsOutput.hidden_states` holds, for every token of the step, the residual streams that go
    into these layers, side by side in this order, [num_tokens, len(capture_hidden) * hidden_size]; for (),
    the hidden states after the final norm [num_tokens, hidden_size]. They are the caller's as long as the
    logits are.
    """

    model: CausalLM
    is_watched: bool = False
    accepts_seq_len_upper_bounds: bool = False  # what its attention says of itself
    capture_hidden: tuple[int, ...] | None = None

    @abstractmethod
    def __init__(self, model: CausalLM, attention: AttentionBackend, kv_pool: TokenToKVPool) -> None: ...

    @abstractmethod
    def forward(self, forward_batch: ForwardBatch) -> LogitsOutput:
        """Logits of each request's last token (TARGET_VERIFY: of every token), and prompt log-probabilities
        for `input_logprob_rows`: raw log softmax of the logits, no temperature. Writes the step's KV and
        nothing else, but that the dummy page may hold anything afterwards. Logits are float32 on the model's
        device; an IDLE batch gives zero rows. They are the caller's until the next call of `forward` or
        `forward_and_sample`: whoever needs them longer makes a copy."""

    def prepare(  # noqa: B027 - there may be nothing to prepare
        self, config: EngineConfig, sampler: Sampler, num_token_ids: int
    ) -> None:
        """Called at most once, with the pools in place and before the first batch: the time to warm up and
        to capture CUDA graphs. Results do not depend on it. May write the dummy page, and nothing else."""

    def forward_and_sample(
        self, forward_batch: ForwardBatch, sampler: Sampler, info: SamplingBatchInfo, num_token_ids: int
    ) -> tuple[LogitsOutput, SampleOutput]:
        """`forward`, and a token for each row of its logits (TARGET_VERIFY: for every node): the same results
        as below, whichever way they are computed. Rows of the model's head beyond `num_token_ids` are padding
        and must never be sampled. What was sampled is the caller's to keep."""
        # --8<-- [start:forward-and-sample]
        logits_output = self.forward(forward_batch)
        logits = logits_output.next_token_logits[:, :num_token_ids]
        return logits_output, sampler.sample(logits, info, forward_batch.sampled_positions)
        # --8<-- [end:forward-and-sample]
