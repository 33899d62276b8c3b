"""Stage 08, CUDA graphs: complete the functions that raise NotImplementedError.

cp docs/exercises/my_runner.py my_runner.py
diptych check --stage 08 my_runner.py

The contract is in shared/interfaces/model_runner.py.
"""

from __future__ import annotations

import torch

from diptych.shared.interfaces import Sampler
from diptych.shared.interfaces import model_runner as interface
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.modeling.forward import no_hidden_states, run_model
from diptych.shared.sampling.logprobs import input_logprobs_of
from diptych.shared.types import ForwardBatch, ForwardMode, LogitsOutput, SampleOutput, SamplingBatchInfo


class ModelRunner(interface.ModelRunner):
    @torch.inference_mode()
    def forward(self, forward_batch: ForwardBatch) -> LogitsOutput:
        """One step. An IDLE batch gives no rows and runs nothing; TARGET_VERIFY gives logits of every token,
        any other mode those of the last token of each request (`forward_batch.last_token_rows`)."""
        raise NotImplementedError("TODO forward: plan once, run the model, logits of the rows that need them")

    @torch.inference_mode()
    def forward_and_sample(
        self, forward_batch: ForwardBatch, sampler: Sampler, info: SamplingBatchInfo, num_token_ids: int
    ) -> tuple[LogitsOutput, SampleOutput]:
        raise NotImplementedError("TODO sampling: forward, then the sampler on logits[:, :num_token_ids]")
