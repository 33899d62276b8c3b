"""Decode steps as CUDA graphs: the captured batch sizes, and the input buffers.

A graph launches kernels with the arguments of the capture. So a batch is copied into buffers at fixed
addresses (`DecodeBuffers`), padded to a captured size (cuda_graph.py). A padding row is a request that reads
and writes the dummy page.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

import torch

from diptych.shared.config import EngineConfig
from diptych.shared.types import ForwardBatch, ForwardMode, SamplingBatchInfo

DEFAULT_MAX_BS = 512
"""Beyond this size a step takes longer than launching its kernels, so a graph saves no time."""


def captured_batch_sizes(config: EngineConfig) -> tuple[int, ...]:
    """The captured batch sizes, ascending; at most one exceeds the number of running requests."""
    limit = config.max_running_requests
    if config.cuda_graph_bs is not None:
        sizes = sorted(config.cuda_graph_bs)
    else:
        largest = min(config.cuda_graph_max_bs or DEFAULT_MAX_BS, limit)
        # Small batches have finer sizes, because padding costs relatively most there.
        steps = [1, 2, 4, 8, 12, *range(16, 256, 8), *range(256, 512, 16), *range(512, largest, 32)]
        sizes = [size for size in steps if size < largest] + [largest]
    return tuple(sizes[: bisect_left(sizes, limit) + 1])


class SamplingKind(Enum):
    """The kind of sampling, if a graph can contain it: fixed ops on tensors of fixed shapes."""

    GREEDY = auto()
    PLAIN = auto()  # temperature, no filter
    FILTERED = auto()

    @staticmethod
    def of(info: SamplingBatchInfo) -> SamplingKind | None:
        """The kind of a batch; None if it has tensors as wide as the vocabulary, rows that are sorted, or
        outputs beyond ids."""
        if (
            info.return_logprob
            or info.processors
            or info.is_sequential is not None
            or info.logit_bias is not None
            or info.banned is not None
            or info.vocab_mask is not None
            or info.output_counts is not None
            or info.prompt_mask is not None
            or info.frequency_penalties is not None
            or info.presence_penalties is not None
            or info.repetition_penalties is not None
        ):
            return None
        if info.is_all_greedy:
            return SamplingKind.GREEDY
        return SamplingKind.FILTERED if info.needs_filter else SamplingKind.PLAIN


class PaddedVectors:
    """Vectors of one type, [max_bs] each, at fixed addresses: the batch, then padding."""

    def __init__(
        self, padding: Mapping[str, float], max_bs: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        width = -(-max_bs // 16) * 16  # every vector starts as aligned as the first
        self.padding = torch.tensor(list(padding.values()), dtype=dtype)[:, None].repeat(1, width).to(device)
        self.values = self.padding.clone()
        self.rows = {name: i for i, name in enumerate(padding)}
        self._views: dict[tuple[int, int, int], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def head(self, name: str, size: int) -> torch.Tensor:
        return self.values[self.rows[name], :size]

    def heads(self, size: int, num: int | None = None) -> dict[str, Any]:
        """The first `num` vectors, or all, by name."""
        return {name: self.head(name, size) for name in list(self.rows)[:num]}

    # --8<-- [start:load-padded]
    def load(self, vectors: list[torch.Tensor], size: int) -> None:
        """Copy the vectors of a batch, and padding up to `size`, in one launch."""
        key = len(vectors), vectors[0].shape[0], size
        if key not in self._views:
            self._views[key] = self._views_of(*key)
        targets, padding = self._views[key]
        torch._foreach_copy_(targets, vectors[: len(targets) - len(padding)] + padding)

    # --8<-- [end:load-padded]

    def _views_of(self, n: int, bs: int, size: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The places of n vectors of bs elements and of their padding, and that padding."""
        targets = list(self.values[:n, :bs].unbind()) if bs else []  # of an IDLE rank
        if bs == size:
            return targets, []
        return targets + list(self.values[:n, bs:size].unbind()), list(self.padding[:n, bs:size].unbind())


class DecodeBuffers:
    """The tensors of decode steps of `batch_sizes` and of their sampling. has_axes: the model takes images
    with positions of their own.

    A padding row is a request of one token on the dummy page.
    """

    num_nodes = 1  # tokens of each request

    def __init__(self, batch_sizes: tuple[int, ...], device: torch.device, has_axes: bool = False) -> None:
        self.batch_sizes = batch_sizes
        max_bs = batch_sizes[-1]
        inputs = {"input_ids": 0, "positions": 0, "req_pool_indices": 0, "seq_lens": 1, "out_cache_loc": 0}
        inputs |= {"rope_positions": 0} if has_axes else {}
        self.num_inputs = len(inputs)
        self.ints = PaddedVectors({**inputs, "top_ks": 1, "seeds": 0}, max_bs, torch.int64, device)
        floats = {"temperatures": 1.0, "top_ps": 1.0, "min_ps": 0.0}
        self.floats = PaddedVectors(floats, max_bs, torch.float32, device)
        self.bools = PaddedVectors({"is_greedy": True}, max_bs, torch.bool, device)
        self.ones = torch.ones(max_bs, dtype=torch.int64, device=device)
        self.numbers = torch.arange(max_bs, device=device)
        self._loaded: tuple[SamplingBatchInfo, int] | None = None  # loaded parameters, and their size

    def fits(self, forward_batch: ForwardBatch) -> bool:
        return forward_batch.forward_mode is ForwardMode.DECODE

    def load(self, forward_batch: ForwardBatch, size: int, info: SamplingBatchInfo | None = None) -> None:
        """Load a batch. `info`: None if sampling does not read it; that of the previous step is not copied
        again."""
        fb = forward_batch
        ints = [fb.input_ids, fb.positions, fb.req_pool_indices, fb.seq_lens, fb.out_cache_loc]
        ints += [fb.model_positions][: self.num_inputs - len(ints)]
        is_there = self._loaded is not None and self._loaded[0] is info and self._loaded[1] == size
        if info is not None and not is_there:
            self._loaded = info, size
            ints += [info.top_ks, info.seeds]
            self.floats.load([info.temperatures, info.top_ps, info.min_ps], size)
            self.bools.load([info.is_greedy], size)
        self.ints.load(ints, size)

    def padding_batch(self, size: int) -> ForwardBatch:
        """The batch of the first `size` rows, which are padding until a batch is loaded."""
        self.ints.values.copy_(self.ints.padding)
        self._loaded = None
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            **self.ints.heads(size, self.num_inputs),
            extend_seq_lens=self.ones[:size],
            extend_start_loc=self.numbers[:size],
            seq_lens_cpu=(1,) * size,
            extend_seq_lens_cpu=(1,) * size,
        )

    def padding_lens(self, num: int) -> tuple[int, ...]:
        """The lengths of padding requests on the CPU."""
        return (1,) * num

    def sampling_info(self, kind: SamplingKind, size: int) -> SamplingBatchInfo:
        return SamplingBatchInfo(
            top_ks=self.ints.head("top_ks", size),
            seeds=self.ints.head("seeds", size),
            **self.floats.heads(size),
            is_greedy=self.bools.head("is_greedy", size),
            is_all_greedy=kind is SamplingKind.GREEDY,
            needs_filter=kind is SamplingKind.FILTERED,
        )
