"""Buffers of a verify step: padding, and what a batch loads."""

from __future__ import annotations

import torch

from diptych.optimized.graphs.verify_graph import VerifyBuffers
from diptych.shared.sampling.sampling_batch import make_sampling_batch_info
from diptych.shared.types import Req, SamplingParams


def test_padding_trees_follow_one_another() -> None:
    buffers = VerifyBuffers((1, 4), num_nodes=3, has_mask=True, device=torch.device("cpu"))
    for size in (1, 4):
        batch = buffers.padding_batch(size)
        assert batch.extend_start_loc.tolist() == [3 * i for i in range(size)]
        assert batch.extend_start_loc.dtype == batch.extend_seq_lens.dtype == torch.int64
        assert batch.extend_seq_lens.tolist() == [3] * size
        assert batch.batch_size == size


def test_a_batch_brings_the_parameters_of_its_nodes() -> None:
    buffers = VerifyBuffers((2,), num_nodes=3, has_mask=False, device=torch.device("cpu"))
    batch = VerifyBuffers((1,), num_nodes=3, has_mask=False, device=torch.device("cpu")).padding_batch(1)
    params = SamplingParams(temperature=2.0, top_p=0.75, min_p=0.25, top_k=9)
    buffers.load(batch, 2, make_sampling_batch_info([Req("r", [1], params, seed=11)] * 3, 300, "cpu"))
    ints = {name: buffers.node_ints.head(name, 6).tolist() for name in ("top_ks", "seeds")}
    assert ints == {"top_ks": [9] * 3 + [1] * 3, "seeds": [11] * 3 + [0] * 3}
    floats = {name: values.tolist() for name, values in buffers.floats.heads(6).items()}
    assert floats == {
        "temperatures": [2.0] * 3 + [1.0] * 3,
        "top_ps": [0.75] * 3 + [1.0] * 3,
        "min_ps": [0.25] * 3 + [0.0] * 3,
    }
    assert buffers.bools.head("is_greedy", 6).tolist() == [False] * 3 + [True] * 3
