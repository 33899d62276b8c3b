"""CUDA graphs of tree verification: the captured batch sizes, and the input buffers.

A verify step is as regular as a decode step: every request computes the nodes of one tree. So it is captured
in the same way. Vectors of nodes are longer by the number of nodes, and the mask is in a buffer whose shape
does not depend on lengths.
"""

from __future__ import annotations

from bisect import bisect_right

import torch

from diptych.optimized.graphs.decode_graph import PaddedVectors, SamplingKind, captured_batch_sizes
from diptych.shared.config import EngineConfig, ModelConfig
from diptych.shared.types import ForwardBatch, ForwardMode, SamplingBatchInfo

MAX_TOKENS = 512
"""The number of nodes of all requests beyond which a step takes longer than launching its kernels."""


def has_windows(model: ModelConfig) -> bool:
    """Whether a layer counts positions. Under a `tree_mask` it counts along a branch, which a block of block
    diffusion does not have."""
    return max(model.sliding_windows, default=-1) >= 0 or any(model.attention_chunks)


def verify_batch_sizes(config: EngineConfig, num_nodes: int) -> tuple[int, ...]:
    """The batch sizes of decoding whose total number of nodes is within the limit."""
    sizes = captured_batch_sizes(config)
    return sizes[: bisect_right(sizes, MAX_TOKENS // num_nodes)]


class VerifyBuffers:
    """The tensors of a verify step and of its sampling, for trees with a fixed number of nodes.

    A padding row is a request without a prefix, with a tree on the dummy page.
    """

    def __init__(
        self, batch_sizes: tuple[int, ...], num_nodes: int, has_mask: bool, device: torch.device
    ) -> None:
        self.batch_sizes = batch_sizes
        self.num_nodes = num_nodes
        max_bs = max(batch_sizes, default=0)
        max_nodes = max_bs * num_nodes
        inputs = {"input_ids": 0, "positions": 0, "out_cache_loc": 0}
        self.node_ints = PaddedVectors({**inputs, "top_ks": 1, "seeds": 0}, max_nodes, torch.int64, device)
        requests = {"req_pool_indices": 0, "seq_lens": num_nodes}
        self.ints = PaddedVectors(requests, max_bs, torch.int64, device)
        floats = {"temperatures": 1.0, "top_ps": 1.0, "min_ps": 0.0}
        self.floats = PaddedVectors(floats, max_nodes, torch.float32, device)
        self.bools = PaddedVectors({"is_greedy": True}, max_nodes, torch.bool, device)
        own = torch.eye(num_nodes, dtype=torch.bool, device=device)
        self.tree_mask = own.repeat(max_bs, 1, 1) if has_mask else None
        self.num_each = torch.full((max_bs,), num_nodes, dtype=torch.int64, device=device)
        self.starts = torch.arange(max_bs, device=device) * num_nodes

    def fits(self, forward_batch: ForwardBatch) -> bool:
        fb = forward_batch
        if fb.forward_mode is not ForwardMode.TARGET_VERIFY:
            return False
        has_mask = fb.tree_mask is not None
        is_even = set(fb.extend_seq_lens_cpu) == {self.num_nodes}
        return is_even and fb.custom_mask is None and has_mask == (self.tree_mask is not None)

    def load(self, forward_batch: ForwardBatch, size: int, info: SamplingBatchInfo | None = None) -> None:
        """Load a batch. `info`: of all nodes, only if sampling reads it."""
        fb, num_nodes = forward_batch, size * self.num_nodes
        node_ints = [fb.input_ids, fb.positions, fb.out_cache_loc]
        if info is not None:
            node_ints += [info.top_ks, info.seeds]
            self.floats.load([info.temperatures, info.top_ps, info.min_ps], num_nodes)
            self.bools.load([info.is_greedy], num_nodes)
        self.node_ints.load(node_ints, num_nodes)
        self.ints.load([fb.req_pool_indices, fb.seq_lens], size)
        if self.tree_mask is not None and fb.tree_mask is not None:  # an IDLE rank has none
            self.tree_mask[: fb.batch_size].copy_(fb.tree_mask)  # that of padding rows is not read

    def padding_batch(self, size: int) -> ForwardBatch:
        """The batch of the first `size` rows, which are padding until a batch is loaded."""
        num_nodes = size * self.num_nodes
        for vectors in (self.node_ints, self.ints):
            vectors.values.copy_(vectors.padding)
        return ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            **self.node_ints.heads(num_nodes, 3),
            **self.ints.heads(size),
            extend_seq_lens=self.num_each[:size],
            extend_start_loc=self.starts[:size],
            seq_lens_cpu=self.padding_lens(size),
            extend_seq_lens_cpu=self.padding_lens(size),
            tree_mask=None if self.tree_mask is None else self.tree_mask[:size],
        )

    def padding_lens(self, num: int) -> tuple[int, ...]:
        """The lengths of padding requests on the CPU."""
        return (self.num_nodes,) * num

    def sampling_info(self, kind: SamplingKind, size: int) -> SamplingBatchInfo:
        num_nodes = size * self.num_nodes
        return SamplingBatchInfo(
            top_ks=self.node_ints.head("top_ks", num_nodes),
            seeds=self.node_ints.head("seeds", num_nodes),
            **self.floats.heads(num_nodes),
            is_greedy=self.bools.head("is_greedy", num_nodes),
            is_all_greedy=kind is SamplingKind.GREEDY,
            needs_filter=kind is SamplingKind.FILTERED,
        )
