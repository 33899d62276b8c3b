"""Norm, rotation and store in one launch, against float64 and a poisoned pool."""

from dataclasses import dataclass, replace

import pytest
import torch

from diptych.optimized.kernels.attention.qk_norm_rope_store import (
    NO_SCALES,
    mean_squares,
    qk_norm_rope_store,
    rotate,
)
from diptych.shared.tools.conformance.clauses.compare import expect_close, expect_equal
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.clauses.inputs import FLOAT_TYPES, Inputs
from diptych.shared.tools.conformance.clauses.poison import amid_poison, poisoned, run_poisoned
from diptych.shared.tools.conformance.clauses.tolerance import Tolerance, tolerance

EPS = 1e-6


@dataclass(frozen=True)
class Case:
    num_tokens: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    has_norm: bool
    dtype: torch.dtype = torch.float32
    pool_dtype: torch.dtype | None = None
    context_len: int = 100
    q_spacing: int = 1
    wide: bool = False  # one norm over all heads


CASES = [
    Case(1, 4, 2, 64, 64, True),
    Case(3, 16, 8, 128, 128, True),
    Case(9, 7, 1, 80, 80, False),
    Case(65, 5, 5, 96, 96, True),
    Case(2, 6, 3, 256, 256, True),
    Case(5, 3, 1, 80, 20, False),
    Case(5, 9, 3, 96, 4, True),
    Case(4, 2, 1, 128, 64, True),
    Case(4, 2, 2, 12, 12, True),
    Case(3, 1, 1, 2, 2, False),
    Case(130, 2, 1, 24, 22, True),
    Case(0, 4, 2, 64, 64, True),
    Case(3, 5, 2, 24, 8, True, q_spacing=2),
    Case(3, 16, 8, 128, 128, True, wide=True),
    Case(70, 7, 1, 20, 12, True, wide=True),
    Case(0, 4, 2, 64, 64, True, wide=True),
]


def name_of(case: Case) -> str:
    norm = "-wide" * case.wide + "-norm" * case.has_norm + "-gates" * (case.q_spacing == 2)
    return (
        f"{case.num_tokens}-{case.num_qo_heads}:{case.num_kv_heads}-{case.rotary_dim}of{case.head_dim}{norm}"
    )


def expect_turned(what: str, actual: torch.Tensor, expected: torch.Tensor, case: Case) -> None:
    """Close in units of the length of each pair (i, i + rotary_dim / 2): where the two nearly cancel, the
    result has the rounding that the norm gave to either."""
    half = case.rotary_dim // 2
    lengths = expected.abs()
    lengths[..., : 2 * half] = torch.hypot(expected[..., :half], expected[..., half : 2 * half]).repeat(
        1, 1, 2
    )
    lengths = lengths.clamp(min=1e-3)
    dtypes = {case.dtype, case.pool_dtype or case.dtype}
    rows = [tolerance(kind, dtype) for dtype in dtypes for kind in ("norm", "rotary")]
    close = Tolerance(
        sum(row.atol + row.rtol for row in rows), 0.0, sum(row.rms for row in rows), "a norm, then a rotation"
    )
    expect_close(what, actual.double() / lengths, expected / lengths, close)


class Run:
    """One launch on random inputs, all of them views amid poison, and what float64 gives for them."""

    def __init__(self, case: Case) -> None:
        inputs, n, d = Inputs(0), case.num_tokens, case.head_dim
        hq, hkv = case.num_qo_heads, case.num_kv_heads
        self.case = case
        width = (case.q_spacing * hq + 2 * hkv) * d
        self.qkv = amid_poison(inputs.normal(n, width, dtype=case.dtype, std=2.0))
        self.positions = inputs.integers(case.context_len, n)
        angles = 6.0 * inputs.uniform(case.context_len, case.rotary_dim // 2)
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
        norm = case.has_norm
        q_size, k_size = (hq * d, hkv * d) if case.wide else (d, d)
        self.q_weight = inputs.normal(q_size, dtype=case.dtype) if norm else None
        self.k_weight = inputs.normal(k_size, dtype=case.dtype) if norm else None
        pool_dtype = case.pool_dtype or case.dtype
        # Two layers' buffers in one tensor, slots and heads of other strides than dense ones have.
        self.pools = [poisoned((n + 7, 2, hkv + 1, d + 3), pool_dtype, check_device()) for _ in range(2)]
        self.buffers = [pool[:, 1, :hkv, :d] for pool in self.pools]
        self.slots = 1 + inputs.permutation(n + 6)[:n]

    def launch(self) -> torch.Tensor:
        case, means = self.case, None
        if case.wide:
            assert self.q_weight is not None
            assert self.k_weight is not None
            means = run_poisoned(mean_squares, self.qkv, len(self.q_weight), len(self.k_weight))
        return run_poisoned(
            qk_norm_rope_store, self.qkv, self.positions, self.cos_sin, self.q_weight, self.k_weight, EPS,
            False, *self.buffers, self.slots, case.num_qo_heads, case.num_kv_heads, case.head_dim,
            NO_SCALES, False, means,
        )  # fmt: skip

    def expected(self) -> list[torch.Tensor]:
        case = self.case
        hq, hkv = case.num_qo_heads, case.num_kv_heads
        heads = self.qkv.double().unflatten(1, (-1, case.head_dim))
        q, k, v = heads.split((case.q_spacing * hq, hkv, hkv), dim=1)
        q = q[:, :: case.q_spacing]
        positions = self.positions.clamp(max=case.context_len - 1)
        cos, sin = self.cos_sin.double()[positions][:, None].chunk(2, dim=-1)
        out = []
        for x, weight in ((q, self.q_weight), (k, self.k_weight)):
            if weight is not None:
                y = x.flatten(1) if case.wide else x
                y = y * (y.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
                x = y.view(x.shape)
            half = case.rotary_dim // 2
            a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
            out.append(torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1))
        return [*out, v]

    def check(self) -> None:
        case = self.case
        before = self.qkv.clone()
        q = self.launch()
        assert q.shape == (case.num_tokens, case.num_qo_heads, case.head_dim)
        assert q.is_contiguous()
        expect_equal("qkv afterwards", self.qkv, before)
        expected_q, expected_k, expected_v = self.expected()
        k, v = (buffer[self.slots] for buffer in self.buffers)
        expect_turned("q", q, expected_q, case)
        expect_turned("stored k", k, expected_k, case)
        expect_equal("stored v", v, expected_v.to(case.dtype).to(v.dtype))
        written = case.num_tokens * case.num_kv_heads * case.head_dim
        for pool in self.pools:
            assert int((~torch.isnan(pool)).sum()) == written


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_against_float64(case: Case, dtype: torch.dtype) -> None:
    Run(replace(case, dtype=dtype)).check()


def test_a_pool_of_another_type() -> None:
    Run(replace(CASES[1], dtype=torch.float32, pool_dtype=torch.float16)).check()
    Run(replace(CASES[1], dtype=torch.float16, pool_dtype=torch.float32)).check()


def test_tokens_of_padding_share_the_dummy_slot() -> None:
    run = Run(Case(6, 2, 1, 64, 64, True))
    run.slots[3:] = 0
    q = run.launch()
    expected_q, expected_k, _ = run.expected()
    expect_turned("q", q, expected_q, run.case)
    k = run.buffers[0][run.slots[:3]]
    expect_turned("k of the live", k, expected_k[:3], run.case)


def test_positions_beyond_the_table_read_nothing_else() -> None:
    """Its last row, rather than memory behind it: such tokens are dropped."""
    run = Run(Case(4, 2, 1, 64, 64, False))
    table = poisoned((200, 64), torch.float32, check_device())
    run.cos_sin = table[:100].copy_(run.cos_sin)
    run.positions = torch.tensor([99, 100, 150, 10**6], device=check_device())
    expect_turned("q", run.launch(), run.expected()[0], run.case)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_rotation_alone(case: Case, dtype: torch.dtype) -> None:
    run = Run(replace(case, has_norm=False, dtype=dtype))
    q = run.qkv.unflatten(1, (-1, case.head_dim))[:, : case.q_spacing * case.num_qo_heads : case.q_spacing]
    rotated = run_poisoned(rotate, q, run.positions, run.cos_sin)
    expect_turned("q", rotated, run.expected()[0], run.case)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        Case(2048, 32, 8, 128, 128, True),
        Case(1027, 16, 8, 128, 128, True),
        Case(300, 40, 8, 128, 128, True),
        Case(1000, 14, 2, 64, 64, False),
        Case(257, 32, 4, 80, 20, False),
        Case(1027, 48, 8, 128, 64, True, wide=True),
        Case(5, 32, 32, 128, 128, True, wide=True),
    ],
    ids=name_of,
)
def test_large(case: Case) -> None:
    Run(replace(case, dtype=torch.bfloat16)).check()


@pytest.mark.gpu
def test_slots_beyond_two_to_the_31_elements() -> None:
    run = Run(Case(5, 2, 1, 64, 64, True, torch.float16))
    num_slots = 2**31 // 64 + 100  # 4.3 GB a buffer
    run.buffers = [torch.zeros(num_slots, 1, 64, dtype=torch.float16, device="cuda") for _ in range(2)]
    run.slots = torch.tensor([num_slots - 1 - i for i in range(5)], device="cuda")
    run.launch()
    _, expected_k, expected_v = run.expected()
    expect_turned("k", run.buffers[0][run.slots], expected_k, run.case)
    expect_equal("v", run.buffers[1][run.slots], expected_v.half())
    assert not run.buffers[0][: num_slots - 5].any()
