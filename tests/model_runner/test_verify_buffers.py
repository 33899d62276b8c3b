"""Buffers of a verify step, before a batch is loaded."""

from __future__ import annotations

import torch

from diptych.optimized.graphs.verify_graph import VerifyBuffers


def test_padding_trees_follow_one_another() -> None:
    buffers = VerifyBuffers((1, 4), num_nodes=3, has_mask=True, device=torch.device("cpu"))
    for size in (1, 4):
        batch = buffers.padding_batch(size)
        assert batch.extend_start_loc.tolist() == [3 * i for i in range(size)]
        assert batch.extend_start_loc.dtype == batch.extend_seq_lens.dtype == torch.int64
        assert batch.extend_seq_lens.tolist() == [3] * size
        assert batch.batch_size == size
