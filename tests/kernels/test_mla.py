"""The kernels of latent attention beyond the contract: prefixes in chunks, states that are merged, groups."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import diptych.optimized.layers
import diptych.reference.layers
from diptych.optimized.kernels.attention.expanded_attention import AttentionState, expanded_attention
from diptych.optimized.kernels.attention.mla_decode import group_size
from diptych.optimized.kernels.attention.mla_rope_store import mla_rope_store
from diptych.optimized.mla import mla_triton
from diptych.optimized.mla.mla_memory_pool import MLATokenToKVPool
from diptych.optimized.mla.mla_triton import TritonMLA
from diptych.shared.config import RopeConfig
from diptych.shared.tools.conformance.clauses.compare import expect_close, expect_equal
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.inputs import Inputs
from diptych.shared.tools.conformance.clauses.tolerance import tolerance
from diptych.shared.tools.conformance.contracts.mla_attention.batches import EXTEND, MIXED, SMALL
from diptych.shared.tools.conformance.oracles.attention_batches import expect_attention
from diptych.shared.tools.conformance.oracles.mla_batches import MLACase
from diptych.shared.types.attention import FP8, KVScales

LONG = MLACase("long", ((70, 90), (0, 40), (33, 1)), **SMALL)
FAST = ("cached prefixes", 24, torch.float32), ("mixed", 24, torch.bfloat16)


@pytest.mark.parametrize(
    ("batch", "chunk_keys", "dtype"),
    [
        pytest.param(
            replace(batch, **SMALL), chunk_keys, dtype,
            id=f"{batch.name}-{chunk_keys}-{dtype}",
            marks=[] if (batch.name, chunk_keys, dtype) in FAST else pytest.mark.full,
        )
        for batch in (EXTEND, MIXED, LONG)
        for chunk_keys in (4096, 24, 3)
        for dtype in (torch.float32, torch.bfloat16)
    ],
)  # fmt: skip
def test_prompts_expanded_in_chunks(
    dtype: torch.dtype, batch: MLACase, chunk_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some requests have no key in a chunk, and some none in any."""
    monkeypatch.setattr(mla_triton, "EXPAND_FROM", 1)
    monkeypatch.setattr(mla_triton, "CHUNK_KEYS", chunk_keys)
    calls = []
    monkeypatch.setattr(
        mla_triton,
        "expanded_attention",
        lambda *args, **kw: calls.append(1) or expanded_attention(*args, **kw),
    )
    expect_attention(TritonMLA, replace(batch, dtype=dtype, page_size=4))
    assert len(calls) >= (2 if chunk_keys == 4096 else 3), "the prefix, then the tokens themselves"


@pytest.mark.full
def test_long_prompts_are_expanded_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla_triton, "mla_extend", None)
    expect_attention(TritonMLA, MLACase("long prompts", ((10, 270),), **SMALL))


def test_the_state_is_a_sum_in_log2() -> None:
    """lse: log2 of the sum of 2 ** (log2(e) * score), and -inf where a request has no key."""
    inputs, heads, nope, rope, v_dim = Inputs(0), 2, 20, 12, 28
    q, kv = inputs.normal(9, heads, nope + rope), inputs.normal(13, heads * (nope + v_dim))
    k_rope = inputs.normal(13, rope)
    device = check_device()
    qo_indptr, kv_indptr = torch.tensor([[0, 5, 9], [0, 13, 13]], device=device)
    state = AttentionState(9, heads, v_dim, device)
    options = {"scale": 0.3, "v_head_dim": v_dim, "state": state, "is_causal": False}
    expanded_attention(q, kv, k_rope, qo_indptr, kv_indptr, **options)
    k, v = kv.unflatten(1, (heads, -1)).split([nope, v_dim], dim=2)
    k = torch.cat((k, k_rope[:, None].expand(-1, heads, -1)), dim=2)
    scores = torch.einsum("qhd,khd->qhk", q[:5].double(), k.double()) * 0.3
    close = tolerance("attention", torch.float32)
    expect_close("lse", state.lse[:5], scores.logsumexp(-1) / torch.tensor(2.0).log(), close)
    expected = torch.einsum("qhk,khd->qhd", scores.softmax(-1), v.double())
    expect_close("output", state.output[:5], expected, close)
    expect_equal("lse without keys", state.lse[5:], torch.full_like(state.lse[5:], -torch.inf))
    expect_equal("output without keys", state.output[5:], torch.zeros_like(state.output[5:]))
    before = state.output.clone(), state.lse.clone()
    expanded_attention(q, kv, k_rope, qo_indptr, torch.zeros_like(kv_indptr), **options)
    for what, now, then in zip(("output", "lse"), (state.output, state.lse), before):
        expect_close(f"{what} after a chunk without keys", now, then, close)


@pytest.mark.parametrize(("num_heads", "group"), [(16, 16), (128, 16), (20, 10), (3, 3), (17, 1), (40, 10)])
def test_groups_of_heads_are_equal(num_heads: int, group: int) -> None:
    assert group_size(num_heads) == group


@pytest.mark.parametrize("is_interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_and_rotation(dtype: torch.dtype, is_interleaved: bool) -> None:
    """Against the reference's layers; other slots of the pool and the first part of q stay as they are."""
    n, heads, nope, rope, rank = 5, 20, 7, 12, 24
    inputs = Inputs(0)
    whole = inputs.normal(n, heads * (nope + rope) + rank + rope, dtype=dtype)
    q, kv = whole.split([heads * (nope + rope), rank + rope], dim=1)
    q = q.unflatten(1, (heads, -1))
    weight, rows = inputs.normal(rank, dtype=dtype), inputs.normal(9, 1, rank + rope, dtype=dtype)
    positions = torch.tensor([3, 0, 60, 63, 70], device=q.device)  # the last beyond the context's end
    slots = torch.tensor([8, 2, 5, 1, 3], device=q.device)
    config = RopeConfig("default", 100.0, rope, is_interleaved=is_interleaved)
    theirs = diptych.reference.layers.RotaryEmbedding(config, rope, 64)
    norm = diptych.reference.layers.RMSNorm(rank, 1e-6).to(q.device)
    norm.weight.data = weight
    q_rope, k_rope = theirs(positions.clamp(max=63), q[..., nope:], kv[:, None, rank:])
    expected_q = torch.cat((q[..., :nope], q_rope), dim=-1).clone()
    expected = rows.clone()
    expected[slots] = torch.cat((norm(kv[:, None, :rank]), k_rope), dim=-1)
    cos_sin = diptych.optimized.layers.RotaryEmbedding(config, rope, 64).cos_sin(q.device)
    mla_rope_store(q, kv, positions, cos_sin, weight, 1e-6, rows, slots, is_interleaved)
    close = tolerance("rotary", dtype)
    expect_close("q", q, expected_q, close)
    expect_close("rows", rows, expected, close)


def test_fp8_rows_are_the_other_rows_rounded() -> None:
    n, heads, nope, rope, rank, scale = 5, 3, 7, 12, 24, 0.3
    inputs = Inputs(0)
    q, kv = inputs.normal(n, heads, nope + rope), inputs.normal(n, rank + rope)
    positions, slots = (torch.arange(i, i + n, device=q.device) for i in (0, 2))
    cos_sin = diptych.optimized.layers.RotaryEmbedding(RopeConfig("default", 100.0, rope), rope, 64).cos_sin(
        q.device
    )
    pools = [
        MLATokenToKVPool(8, 1, 1, rank, rope, dtype, q.device, [KVScales(scale, scale)])
        for dtype in (torch.float32, FP8)
    ]
    weight = inputs.normal(rank)
    for pool in pools:
        where = pool.k_buffer(0), slots, False, scale
        mla_rope_store(q.clone(), kv, positions, cos_sin, weight, 1e-6, *where)
    exact, rounded = (pool.k_buffer(0).clone() for pool in pools)
    pools[1].store(0, slots, exact[slots], exact[slots])
    assert torch.equal(rounded.view(torch.uint8)[slots], pools[1].k_buffer(0).view(torch.uint8)[slots])
