"""Deterministic mode's kernels: row 0's bits at every number of rows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from diptych.optimized.attention import fixed_split
from diptych.optimized.attention.fixed_split import DeterministicAttention
from diptych.optimized.kernels.attention.fixed_split_attention import fixed_split_attention
from diptych.optimized.kernels.attention.qk_norm_rope_store import _tiles
from diptych.optimized.kernels.linear import fixed_order_gemm
from diptych.optimized.kernels.linear.lora_linear import BLOCK_M, expand_add, shrink
from diptych.optimized.kernels.moe.moe_align import align
from diptych.optimized.kernels.portable import INTERPRETED, Gpu
from diptych.optimized.layers import RMSNorm, SiluAndMul
from diptych.optimized.quantized.quantized_layers import QuantizedLinear, QuantizedMergedLinear
from diptych.shared.loading.quantize import quantize_weight
from diptych.shared.tools.conformance.clauses.device import building
from diptych.shared.tools.conformance.clauses.inputs import Inputs
from diptych.shared.tools.conformance.oracles.attention_batches import AttentionBatch, AttentionCase
from diptych.shared.types import ForwardMode
from diptych.shared.types.quant_scheme import QuantScheme
from tests.planted import Bug, Bugs

NUM_TOKENS = (1, 2, 3, 16, 17, 64, 65, 129, 200, 256)
HALF = torch.bfloat16
LARGE = ((4096, 4096), (12288, 1024))
TENSOR_CORE_ERROR = 1e-6
"""Of a sum's magnitudes: tensor cores cut off the lower bits of what they add, and keep fewer than float32.
An H200 had 3.2e-7 for 12,288 columns."""


@pytest.mark.parametrize("dtype", [HALF, pytest.param(torch.float32, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("size", "out"),
    [
        (200, 70),
        pytest.param(4096, 4096, marks=pytest.mark.gpu),
        pytest.param(12288, 1024, marks=pytest.mark.gpu),
    ],
)
def test_a_row_of_a_gemm(size: int, out: int, dtype: torch.dtype) -> None:
    expect_row_of_gemm(fixed_order_gemm, size, out, dtype)


def expect_row_of_gemm(module: Any, size: int, out: int, dtype: torch.dtype) -> None:
    """In float32: rounding to 16 bits would hide most differences."""
    inputs = Inputs(0)
    x = inputs.normal(256 if INTERPRETED else 4096, size, dtype=dtype)
    weight, bias = inputs.normal(out, size, dtype=dtype), inputs.normal(out, dtype=dtype)
    residual = inputs.normal(len(x), out, dtype=dtype)

    def linear(rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = module.linear(rows, weight, bias, torch.float32)
        return found

    expected = linear(x[:1])
    exact = x[:1].double() @ weight.double().T + bias.double()
    magnitudes = x[:1].double().abs() @ weight.double().abs().T
    assert ((expected.double() - exact).abs() <= TENSOR_CORE_ERROR * magnitudes).all()
    for num_tokens in (*NUM_TOKENS, len(x)):
        found = linear(x[:num_tokens])
        assert torch.equal(found[:1], expected), num_tokens
        assert torch.equal(found[-1:], linear(x[num_tokens - 1 : num_tokens])), num_tokens
        summed = module.linear_add(x[:num_tokens], weight, residual[:num_tokens].clone())
        assert torch.equal(summed[:1], module.linear_add(x[:1], weight, residual[:1].clone()))


@pytest.mark.parametrize("tile", fixed_order_gemm.TILES, ids=str)
def test_every_tile_computes_the_edges(tile: fixed_order_gemm.Tile) -> None:
    """The edges are those of tokens, outputs and columns."""
    inputs = Inputs(0)
    x, weight = inputs.normal(tile.tokens + 3, 200, dtype=HALF), inputs.normal(tile.rows + 5, 200, dtype=HALF)
    y = x.new_empty(len(x), len(weight), dtype=torch.float32)
    fixed_order_gemm.fixed_order_gemm(x, weight, y, tile=tile)
    torch.testing.assert_close(y.double(), x.double() @ weight.double().T, rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [HALF, torch.float16, torch.float32])
def test_every_tile_adds_in_one_order(dtype: torch.dtype) -> None:
    inputs = Inputs(0)
    x, weight = inputs.normal(300, 4096, dtype=dtype), inputs.normal(1000, 4096, dtype=dtype)
    tiles = fixed_order_gemm.FLOAT32_TILES if dtype == torch.float32 else fixed_order_gemm.TILES
    results = []
    for tile in tiles:
        results.append(x.new_empty(300, 1000))
        fixed_order_gemm.fixed_order_gemm(x, weight, results[-1], tile=tile._replace(num_stages=2))
    for tile, result in zip(tiles, results):
        assert torch.equal(result, results[0]), tile


H200 = Gpu((9, 0), 132, 227 * 1024)
SMALL_GPU = Gpu((8, 9), 128, 99 * 1024)


@pytest.mark.parametrize(
    ("num_tokens", "out", "expected"),
    [
        (1, 4096, (16, 64)),
        (32, 4096, (32, 64)),
        (33, 24576, (64, 64)),
        (128, 4096, (64, 64)),
        (128, 24576, (128, 64)),
        (192, 6144, (64, 128)),  # whole tiles of tokens
        (256, 4096, (128, 64)),
        (256, 6144, (128, 128)),
        (8192, 4096, (256, 128)),
    ],
)
def test_the_tile_of_a_gemm(
    num_tokens: int, out: int, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As measured on an H200; on a GPU with less shared memory there is a tile too."""
    monkeypatch.setattr(fixed_order_gemm, "INTERPRETED", False)
    plan = fixed_order_gemm.plan.__wrapped__
    assert plan(num_tokens, out, True, H200)[:2] == expected
    for is_half in (True, False):
        assert plan(num_tokens, out, is_half, SMALL_GPU).num_stages >= 2


SCHEMES = {
    "fp8": QuantScheme("fp8", inputs="token"),
    "fp8 blocks": QuantScheme("fp8", 128, 128, "group"),
    "int8": QuantScheme("int8", inputs="token"),
    "int4": QuantScheme("int4", group_size=128),
}


@pytest.mark.parametrize(
    ("out", "size"), [(80, 256), pytest.param(6144, 4096, marks=pytest.mark.gpu)], ids=["small", "8B"]
)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name != "fp8 blocks")) for name in SCHEMES]
)
def test_a_row_of_a_quantized_layer(name: str, out: int, size: int) -> None:
    """A norm and SwiGLU, which may quantize the input, included."""
    inputs, scheme = Inputs(0), SCHEMES[name]
    device = inputs.normal(1).device
    with building(HALF, device):
        up = QuantizedMergedLinear(size, {"gate_proj": out, "up_proj": out}, scheme)
        down = QuantizedLinear(out // 16 * 16, 48, QuantScheme("fp8", inputs="token"))
        norm = RMSNorm(size, 1e-6)
    norm.weight.data.copy_(inputs.normal(size))
    for layer in (up, down):
        layer.is_deterministic = True
        weight = inputs.normal(layer.out_features, layer.in_features)
        for key, tensor in quantize_weight(weight, layer.scheme).items():
            getattr(layer, key).data.copy_(tensor)
    x = inputs.normal(256 if INTERPRETED else 4096, size, dtype=HALF)
    residual = inputs.normal(len(x), 48, dtype=HALF)

    def run(rows: slice) -> torch.Tensor:
        activated = down.activated(SiluAndMul(), up(x[rows], norm))
        return down.add_to(residual[rows].clone(), activated)

    for num_tokens in (*NUM_TOKENS, len(x)):
        found = run(slice(0, num_tokens))
        assert torch.equal(found[:1], run(slice(0, 1))), num_tokens
        assert torch.equal(found[-1:], run(slice(num_tokens - 1, num_tokens))), num_tokens


def test_a_row_of_an_adapter() -> None:
    """Alone, and among rows of the same and of other adapters."""
    inputs, num_slots, rank, size, sizes = Inputs(0), 3, 16, 200, (96, 32)
    x, y = inputs.normal(150, size, dtype=HALF), inputs.normal(150, sum(sizes), dtype=HALF)
    a = inputs.normal(num_slots, len(sizes), rank, size, dtype=HALF)
    b, scales = inputs.normal(num_slots, sum(sizes), rank, dtype=HALF), inputs.normal(num_slots, len(sizes))
    slots = (torch.arange(150, device=x.device, dtype=torch.int32) % (num_slots + 1) - 1)[:, None]

    def run(rows: slice) -> torch.Tensor:
        blocks = align(slots[rows].contiguous(), num_slots, BLOCK_M)
        result = y[rows].clone()
        expand_add(result, shrink(x[rows], a, blocks), b, scales.float(), sizes, blocks)
        return result

    whole = run(slice(0, 150))
    for row in (0, 1, 2, 77, 149):
        assert torch.equal(run(slice(row, row + 1))[0], whole[row]), row
        assert torch.equal(whole[row], y[row]) == (int(slots[row]) < 0)


REQUESTS = ((1100, 3), (0, 40), (511, 1), (0, 1), (300, 70))
CASES = [
    AttentionCase("plain", REQUESTS, num_qo_heads=8),
    AttentionCase("extras", REQUESTS, dtype=HALF, sliding_window=130, logit_cap=5.0, sinks=(0.5, -1.0)),
]


@pytest.mark.parametrize(
    "case",
    [
        *CASES,
        pytest.param(replace(CASES[0], dtype=HALF), marks=pytest.mark.gpu),
        pytest.param(replace(CASES[1], dtype=torch.float32), marks=pytest.mark.gpu),
    ],
    ids=lambda case: f"{case.name}-{case.dtype}",
)
@pytest.mark.parametrize("in_parts", [True, False])
def test_a_row_of_attention(case: AttentionCase, in_parts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    expect_row_of_attention(fixed_split_attention, case, in_parts, monkeypatch)


def expect_row_of_attention(
    kernel: Any, case: AttentionCase, in_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All new tokens in one prefill, against some of them as decode steps, alone and together, with a CTA for
    each split and with one for all; and against chunks."""
    monkeypatch.setattr(fixed_split, "fixed_split_attention", kernel)
    batch = AttentionBatch(case)
    whole = batch.run(DeterministicAttention)
    batch.expect(whole)
    monkeypatch.setattr(fixed_split, "fixed_split_attention", partial(kernel, in_parts=in_parts))
    backend = batch.backend(DeterministicAttention)
    ends = [cached + new for cached, new in case.requests]
    last_tokens = [(i, end - 1, end) for i, end in enumerate(ends)]
    steps = [([(0, 1102, 1103)], ForwardMode.DECODE), (last_tokens, ForwardMode.DECODE)]
    if not in_parts:
        steps += [([(4, 300, 300 + edge)], ForwardMode.EXTEND) for edge in (1, 17, 64)]
    for spans, mode in steps:
        rows = batch.rows_of(spans)
        plan = backend.plan(batch.forward_batch_of(spans, mode))
        assert torch.equal(backend.run(batch.q[rows], batch.layer, plan), whole[rows]), spans


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 16, 17, 64, 65, 256])
def test_decoding_in_a_batch(head_dim: int, batch_size: int) -> None:
    """The first request's bits do not depend on the others', however many there are."""
    requests = ((2000, 1), *(((37 * i) % 900, 1) for i in range(1, batch_size)))
    case = AttentionCase("many", requests, dtype=HALF, num_qo_heads=32, num_kv_heads=8, head_dim=head_dim)
    batch = AttentionBatch(case)
    whole = batch.run(DeterministicAttention)
    backend = batch.backend(DeterministicAttention)
    alone = backend.plan(batch.forward_batch_of([(0, 2000, 2001)], ForwardMode.DECODE))
    assert torch.equal(backend.run(batch.q[:1], batch.layer, alone), whole[:1])


def test_norms_of_heads_take_one_token_at_a_time() -> None:
    """On a GPU, where a CTA takes several tokens of a long prefill step in the other mode."""
    assert INTERPRETED or _tiles(4096, (8, 2, 2), 64, 64, is_deterministic=True)[0]["TOKENS"] == 1


_LINEAR, _ATTENTION = (
    f"optimized.kernels.{name}" for name in ("linear.fixed_order_gemm", "attention.fixed_split_attention")
)
MUTANTS = Bugs("fixed order", finder="the bits of a row")
for _name, (_entry, *_words) in {
    "tiles_by_the_number_of_tokens": (
        _LINEAR, " STEP=tile.step,", " STEP=tile.step if num_tokens < 17 else 16,"
    ),
    "columns_in_another_order": (
        _LINEAR,
        "tile_of(x, token, k,",
        "tile_of(x, token, k if num_tokens < 17 else (size - 1) // STEP * STEP - k,",
    ),
    "splits_by_the_batch": (
        _ATTENTION, '"SPLIT": SPLIT', '"SPLIT": SPLIT if batch_size > 1 else 128'
    ),
    "splits_at_the_edge_of_a_chunk": (
        _ATTENTION,
        "if start % SPLIT == 0:",
        "if start == (seq_len - num_queries) // BLOCK_N * BLOCK_N:",
    ),
    "parts_in_another_order": (
        _ATTENTION,
        "rows = split * rows_of_split + request",
        "rows = (tl.cdiv(seq_len, SPLIT) - 1 - split + first) * rows_of_split + request",
    ),
}.items():  # fmt: skip
    _changes = [(_entry, *_words)]
    if _name == "columns_in_another_order":  # of the weights too
        _changes.append((_entry, "tile_of(weight, row, k,", _words[1].replace("x, token", "weight, row")))
    MUTANTS.words(_name, _entry, *_changes, where=_entry)


@MUTANTS.found_by(AssertionError, is_fast=lambda number, _: number < 3)
def test_a_planted_bug_is_caught(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    if bug.where == _LINEAR:
        expect_row_of_gemm(bug.planted, 200, 70, HALF)
    else:
        kernel = bug.planted.fixed_split_attention
        expect_row_of_attention(kernel, CASES[0], bug.name == "parts_in_another_order", monkeypatch)
