"""FlashInfer's kernels in CUDA graphs, and what its plans share."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from diptych.shared import registry
from diptych.shared.interfaces import AttentionBackend
from diptych.shared.tools.conformance.clauses.poison import poison_
from diptych.shared.tools.conformance.oracles.attention_batches import LAYER_ID, AttentionBatch, AttentionCase
from diptych.shared.types import ForwardBatch

pytestmark = pytest.mark.gpu

MAX_SEQ_LEN = 700


def with_lengths(batch: AttentionBatch, seq_lens: list[int]) -> ForwardBatch:
    """The batch cut to shorter lengths, in the same buffers."""
    batch.forward_batch.seq_lens.copy_(torch.tensor(seq_lens))
    return replace(batch.forward_batch, seq_lens_cpu=tuple(seq_lens))


def decode_batch(batch_size: int, **options: Any) -> AttentionBatch:
    requests = ((MAX_SEQ_LEN - 1, 1),) * batch_size
    return AttentionBatch(AttentionCase("", requests, dtype=torch.bfloat16, num_qo_heads=8, **options))


def lengths(batch_size: int) -> Iterator[list[int]]:
    for longest in (1, 40, MAX_SEQ_LEN):
        yield [random.randint(1, longest) for _ in range(batch_size)]


def backend_for(batch: AttentionBatch, name: str) -> AttentionBackend:
    backend: AttentionBackend = registry.load("attention", name)(batch.req_to_token_pool, batch.kv_pool)
    return backend


class Replay:
    """A batch whose attention is captured once."""

    def __init__(self, batch: AttentionBatch, backend: AttentionBackend) -> None:
        self.batch, self.backend = batch, backend
        forward_batch = with_lengths(batch, [1] * batch.forward_batch.batch_size)
        self.plan = backend.plan_for_graph(forward_batch, MAX_SEQ_LEN)
        backend.run(batch.q, batch.layer, self.plan)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.output = backend.run(batch.q, batch.layer, self.plan)

    def __call__(self, seq_lens: list[int]) -> torch.Tensor:
        self.backend.replan(self.plan, with_lengths(self.batch, seq_lens))
        self.graph.replay()
        return self.output.clone()


@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
@pytest.mark.parametrize("options", [{}, {"page_size": 16}, {"sliding_window": 33, "page_size": 4}], ids=str)
def test_a_replay_gives_what_launching_gives(options: dict[str, Any], num_kv_heads: int) -> None:
    """Bit by bit: also when the plan is not one for graphs."""
    batch = decode_batch(5, num_kv_heads=num_kv_heads, **options)
    backend = backend_for(batch, "flashinfer")
    replay = Replay(batch, backend)
    for seq_lens in lengths(5):
        replayed = replay(seq_lens)
        forward_batch = with_lengths(batch, seq_lens)
        assert torch.equal(replayed, backend.run(batch.q, batch.layer, replay.plan))
        assert torch.equal(replayed, backend.run(batch.q, batch.layer, backend.plan(forward_batch)))
        reference = backend_for(batch, "reference")
        expected = reference.run(batch.q, batch.layer, reference.plan(forward_batch))
        torch.testing.assert_close(replayed, expected, rtol=0.02, atol=0.02)


def test_graphs_of_several_sizes_take_turns() -> None:
    """Far ahead of the device: nothing that a plan wrote may change before its replay has read it."""
    batches = {size: decode_batch(size, num_kv_heads=2) for size in (1, 6, 64)}
    pools = batches[64].req_to_token_pool, batches[64].kv_pool
    for batch in batches.values():
        batch.req_to_token_pool, batch.kv_pool = pools
        batch.rows = batches[64].rows[: len(batch.rows)]
        batch.forward_batch.req_pool_indices.copy_(torch.tensor(batch.rows))
    backend = backend_for(batches[64], "flashinfer")
    replays = {size: Replay(batch, backend) for size, batch in batches.items()}
    steps = [(size, seq_lens) for _ in range(6) for size in replays for seq_lens in lengths(size)]
    random.shuffle(steps)
    torch.cuda._sleep(200_000_000)  # the device is busy while the CPU plans all steps
    outputs = [replays[size](seq_lens) for size, seq_lens in steps]
    for (size, seq_lens), output in zip(steps, outputs):
        forward_batch = with_lengths(batches[size], seq_lens)
        expected = backend.run(batches[size].q, batches[size].layer, backend.plan(forward_batch))
        assert torch.equal(output, expected), (size, seq_lens)


def test_padding_may_read_nan() -> None:
    """Rows of padding read the dummy page. The others stay what they are, however many there are."""
    batch = decode_batch(6, num_kv_heads=2)
    replay = Replay(batch, backend_for(batch, "flashinfer"))
    seq_lens = [500, 30, 1, 1, 1, 1]
    alone = replay(seq_lens)
    batch.forward_batch.req_pool_indices[2:] = 0
    poison_(batch.kv_pool.k_buffer(LAYER_ID)[:1])
    poison_(batch.kv_pool.v_buffer(LAYER_ID)[:1])
    assert torch.equal(replay(seq_lens)[:2], alone[:2])


@pytest.mark.parametrize("name", ["flashinfer", "fa3"])
@pytest.mark.parametrize("mask", ["causal", "tree"])
def test_several_tokens_a_request_in_a_graph(name: str, mask: Any) -> None:
    case = AttentionCase("", ((90, 7), (33, 7), (600, 7)), dtype=torch.bfloat16, mask=mask, is_prefill=True)
    batch = AttentionBatch(case)
    backend = backend_for(batch, name)
    plan = backend.plan_for_graph(batch.forward_batch, MAX_SEQ_LEN)
    backend.run(batch.q, batch.layer, plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = backend.run(batch.q, batch.layer, plan)
    backend.replan(plan, batch.forward_batch)
    output.zero_()
    graph.replay()
    batch.expect(output)


def test_a_capture_without_a_run_before_it_says_what_is_missing() -> None:
    batch = decode_batch(2, num_kv_heads=2)
    backend = backend_for(batch, "flashinfer")
    plan = backend.plan_for_graph(with_lengths(batch, [1, 1]), MAX_SEQ_LEN)
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match="run the plan once"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        backend.run(batch.q, batch.layer, plan)


@pytest.mark.parametrize("name", ["flashinfer", "fa3"])
def test_a_window_under_a_tree_mask_is_refused(name: str) -> None:
    options: dict[str, Any] = {"dtype": torch.bfloat16, "mask": "tree", "tail": 7, "sliding_window": 9}
    batch = AttentionBatch(AttentionCase("", ((11, 7), (26, 7)), **options))
    with pytest.raises(ValueError, match="a sliding_window under a tree_mask: not supported"):
        batch.run(registry.load("attention", name))


@pytest.mark.parametrize("name", ["flashinfer", "fa3"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.float32}, "dtype torch.float32: not supported"),
        ({"dtype": torch.bfloat16, "head_dim": 80}, "head_dim 80: not supported"),
        ({"dtype": torch.bfloat16, "sinks": (0.5,)}, "sinks: not supported"),
    ],
)
def test_refusals(name: str, options: dict[str, Any], message: str) -> None:
    batch = AttentionBatch(AttentionCase("", ((3, 1),), **options))
    with pytest.raises(ValueError, match=message):
        batch.run(registry.load("attention", name))
