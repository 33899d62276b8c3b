"""Stage 08, CUDA graphs: complete the functions that raise NotImplementedError.

diptych course grade 08     # in the folder of `diptych course start`
diptych check --stage 08 my_runner.py

The contract is in shared/interfaces/model_runner.py, the fields of a batch in shared/types/batch.py. The
runner has `model`, `attention` and `kv_pool` from the constructor of its base. On a GPU `prepare` would
capture a graph of `_launch` for each size; here the padded batch is launched, which a graph must equal.
"""

from __future__ import annotations

import torch

from diptych.shared.config import EngineConfig
from diptych.shared.interfaces import Sampler
from diptych.shared.interfaces import model_runner as interface
from diptych.shared.interfaces.attention import BatchAttention
from diptych.shared.modeling.forward import no_hidden_states, run_model
from diptych.shared.sampling.logprobs import input_logprobs_of
from diptych.shared.types import ForwardBatch, ForwardMode, LogitsOutput, SampleOutput, SamplingBatchInfo

NAMES = ("input_ids", "positions", "req_pool_indices", "seq_lens", "out_cache_loc")


class FixedBuffers:
    """The input tensors of decode steps, at addresses that never change."""

    def __init__(self, sizes: tuple[int, ...], device: torch.device) -> None:
        self.sizes = tuple(sorted(sizes))
        self.tensors = {name: torch.zeros(self.sizes[-1], dtype=torch.int64, device=device) for name in NAMES}

    def size_for(self, batch: ForwardBatch) -> int | None:
        """The captured size for a batch. None: it is no decode step, or it fits no size."""
        raise NotImplementedError("TODO padding: which graph takes this batch")

    def load(self, batch: ForwardBatch, size: int) -> ForwardBatch:
        """A DECODE batch of `size` requests whose first rows are `batch`. Its tensors are the heads of
        `self.tensors`; `extend_seq_lens` and `extend_start_loc` may be new ones."""
        raise NotImplementedError("TODO padding: copy the batch, and fill the rows behind it")


class ModelRunner(interface.ModelRunner):
    buffers: FixedBuffers | None = None  # until `prepare`

    def prepare(self, config: EngineConfig, sampler: Sampler, num_token_ids: int) -> None:
        self.buffers = FixedBuffers(config.cuda_graph_bs or (1, 2, 4, 8), self.kv_pool.device)

    @torch.inference_mode()
    def forward(self, forward_batch: ForwardBatch) -> LogitsOutput:
        if self.buffers is None:
            return self._launch(forward_batch)
        return self._padded(self.buffers, forward_batch)

    def _launch(self, forward_batch: ForwardBatch) -> LogitsOutput:
        """One step, eagerly: `run_model`, whose attention reads one plan of the step (`BatchAttention`). An
        IDLE batch gives no rows and runs nothing (`no_hidden_states`). Prompts may ask for
        log-probabilities (`input_logprob_rows`, `input_logprobs_of`)."""
        raise NotImplementedError("TODO forward: one step, and the logits that are read")

    def _padded(self, buffers: FixedBuffers, forward_batch: ForwardBatch) -> LogitsOutput:
        """`_launch` of the batch, padded if there is a size for it. The result has the rows of the batch
        alone, in `next_token_logits` and in `hidden_states`, which may be None."""
        raise NotImplementedError("TODO padding: launch the padded batch, and give back its own rows")

    @torch.inference_mode()
    def forward_and_sample(
        self, forward_batch: ForwardBatch, sampler: Sampler, info: SamplingBatchInfo, num_token_ids: int
    ) -> tuple[LogitsOutput, SampleOutput]:
        """`forward`, and what the sampler makes of it. The head may have rows that are no token."""
        raise NotImplementedError("TODO sampling: the tokens after this step")
