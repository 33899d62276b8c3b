"""The protocol of a kind of step that is padded to a captured size."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from diptych.shared.interfaces import Sampler
from diptych.shared.types import ForwardBatch, LogitsOutput, SampleOutput, SamplingBatchInfo

Layers = tuple[int, ...] | None
"""As in `ModelRunner.capture_hidden`."""


class Steps(ABC):
    """Steps of one kind. The model runner tries its kinds in order: the first that takes a batch runs it.
    Where a step is not replayed, the same padded batch goes through the same kernels, so results are
    bit-identical."""

    num_replays = 0  # of the model

    @abstractmethod
    def takes(self, batch: ForwardBatch) -> bool:
        """Whether `run` accepts the batch."""

    @abstractmethod
    def run(self, batch: ForwardBatch, layers: Layers, replay: bool) -> LogitsOutput:
        """Run a batch, which it takes: outputs without padding rows, valid until the next step of any kind.
        `replay`: replay graphs if there are any for these layers."""

    def sampled_step(
        self, batch: ForwardBatch, info: SamplingBatchInfo, sampler: Sampler, num_token_ids: int
    ) -> Any:
        """Prepare `run_and_sample` of a batch that this kind takes. None: no graph contains its sampling."""
        return None

    def run_and_sample(
        self, batch: ForwardBatch, layers: Layers, info: SamplingBatchInfo, sampled_step: Any
    ) -> tuple[LogitsOutput, SampleOutput]:
        """Replay model and sampler."""
        raise NotImplementedError
