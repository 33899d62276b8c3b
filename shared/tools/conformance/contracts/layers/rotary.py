"""Clauses of the rotary embedding."""

from __future__ import annotations

from typing import Any

import torch

from diptych.shared.config import RopeConfig
from diptych.shared.interfaces import Layers, RotaryEmbedding
from diptych.shared.modeling.rope import rope_angles
from diptych.shared.tools.conformance.clauses.case import EXAMPLE, Case, grid, table
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import (
    expect_close,
    expect_equal,
    expect_form,
    expect_true,
)
from diptych.shared.tools.conformance.clauses.device import building, check_device
from diptych.shared.tools.conformance.clauses.inputs import FLOAT_TYPES, Inputs
from diptych.shared.tools.conformance.clauses.poison import amid_poison, run_poisoned
from diptych.shared.tools.conformance.clauses.tolerance import tolerance

CONTEXT_LEN = 1024
ROPES = {
    "default": RopeConfig("default", 10000.0, 0),
    "linear": RopeConfig("linear", 10000.0, 0, factor=2.5),
    "dynamic": RopeConfig("dynamic", 10000.0, 0, factor=4.0, original_max_position_embeddings=256),
    "llama3": RopeConfig("llama3", 500000.0, 0, factor=8.0, original_max_position_embeddings=128),
    "yarn": RopeConfig("yarn", 10000.0, 0, factor=4.0, original_max_position_embeddings=256),
    "yarn, its own factor": RopeConfig(
        "yarn", 1e6, 0, factor=8.0, original_max_position_embeddings=64, attention_factor=1.5, truncate=False
    ),
}
"""Without a rotary_dim: the case has it."""


class Heads(Case):
    positions: tuple[int, ...] = (0, 3, 1023, 3, 255, 256, 257, 100, 63)
    dtype = torch.float32
    seed = 0

    def check(self) -> None:
        if self.rotary_dim % 2 or not 2 <= self.rotary_dim <= self.head_dim:
            raise ValueError(f"rotary_dim {self.rotary_dim} does not suit head_dim {self.head_dim}")
        if self.num_qo_heads < 1 or self.num_kv_heads < 1:
            raise ValueError("there must be heads")

    def config(self) -> RopeConfig:
        return RopeConfig(**{**vars(ROPES[self.rope]), "rotary_dim": self.rotary_dim})

    def draw(self, num_heads: int, inputs: Inputs) -> torch.Tensor:
        x = inputs.normal(len(self.positions), num_heads * self.head_dim, dtype=self.dtype)
        return amid_poison(x).view(len(self.positions), num_heads, self.head_dim)


NAME_OF_HEADS = "{rope}, {rotary_dim} of {head_dim}, {num_qo_heads}:{num_kv_heads} heads, {dtype}"
SHAPE = "dtype rope head_dim rotary_dim num_qo_heads num_kv_heads"


def heads(rope: str, head_dim: int, num_qo_heads: int, num_kv_heads: int, **fields: Any) -> Heads:
    """Random heads in float32; all dimensions rotate."""
    row = (torch.float32, rope, head_dim, head_dim, num_qo_heads, num_kv_heads)
    return table(SHAPE, row, name=NAME_OF_HEADS, of=Heads, **fields)[0]


SHAPES = table(
    SHAPE,
    *(
        (dtype, "default", *sizes)
        for dtype in FLOAT_TYPES
        for sizes in (
            (64, 64, 1, 1),
            (80, 80, 7, 1),
            (128, 128, 6, 2),
            (80, 20, 5, 5),
            (96, 4, 9, 3),
            (16, 2, 2, 1),
        )
    ),
    name=NAME_OF_HEADS,
    of=Heads,
)
SCALINGS = tuple(heads(rope, 64, 6, 2) for rope in ROPES)


def make_rotary(impl: Layers, case: Heads, context_len: int = CONTEXT_LEN) -> RotaryEmbedding:
    with building(case.dtype):
        return impl.RotaryEmbedding(case.config(), case.head_dim, context_len)


def rotate64(rope: RopeConfig, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Rotate in float64: each pair (i, i + rotary_dim / 2) as a complex number, times factor * e^(i
    angle)."""
    half = rope.rotary_dim // 2
    angles, factor = rope_angles(rope, positions.cpu())
    x = x.double().cpu()
    pairs = torch.complex(x[..., :half], x[..., half : rope.rotary_dim])
    turned = pairs * torch.polar(torch.full_like(angles, factor).double(), angles.double())[:, None]
    return torch.cat((turned.real, turned.imag, x[..., rope.rotary_dim :]), dim=-1)


def expect_rotated(impl: Layers, case: Heads, kind: str = "rotary", context_len: int = CONTEXT_LEN) -> None:
    inputs = Inputs(case.seed)
    q, k = case.draw(case.num_qo_heads, inputs), case.draw(case.num_kv_heads, inputs)
    positions = torch.tensor(case.positions, dtype=torch.int64, device=check_device())
    before = positions.clone()
    expected = [rotate64(case.config(), positions, x) for x in (q, k)]
    untouched = [x[..., case.rotary_dim :].clone() for x in (q, k)]
    results = run_poisoned(make_rotary(impl, case, context_len), positions, q.clone(), k.clone())
    for what, x, y, e, beyond in zip("qk", (q, k), results, expected, untouched):
        expect_form(f"rotated {what}", y, like=x)
        expect_close(f"rotated {what}", y, e, tolerance(kind, case.dtype))
        expect_equal(f"{what} beyond rotary_dim", y[..., case.rotary_dim :], beyond)
    expect_equal("positions afterwards", positions, before)


@contract(
    "The first rotary_dim dimensions of q and k turn, dimension i paired with i + rotary_dim / 2; the "
    "others stay.",
    SHAPES,
)
def rotation(impl: Layers, case: Heads) -> None:
    expect_rotated(impl, case)


@contract("The frequencies, and the factor on q and k, follow the scaling.", SCALINGS)
def scaling(impl: Layers, case: Heads) -> None:
    expect_rotated(impl, case)


@contract(
    "With mrope_section positions may be [3, num_tokens], in time, by rows and by columns: frequency i turns "
    "by the row where i % 3 is 1, by the column where it is 2, as far as the section goes, else by time.",
    table(
        "head_dim rotary_dim section",
        (128, 128, (24, 20, 20)),
        (80, 16, (4, 2, 2)),
        (64, 64, (12, 14, 6)),
        name="{rotary_dim} of {head_dim}, {section}",
    ),
)
def axes(impl: Layers, case: Case) -> None:
    rope, inputs = RopeConfig("default", 1e6, case.rotary_dim, mrope_section=case.section), Inputs(0)
    with building(torch.float32):
        rotary = impl.RotaryEmbedding(rope, case.head_dim, CONTEXT_LEN)
    positions = inputs.integers(CONTEXT_LEN, 3, 33)
    q, k = inputs.normal(33, 4, case.head_dim), inputs.normal(33, 2, case.head_dim)
    _, num_rows, num_columns = case.section
    of_rows = torch.arange(case.rotary_dim // 2) % 3 == 1
    of_columns = torch.arange(case.rotary_dim // 2) % 3 == 2
    of_rows[3 * num_rows :] = of_columns[3 * num_columns :] = False
    results = run_poisoned(rotary, positions, q.clone(), k.clone())
    for what, x, y in zip("qk", (q, k), results):
        by_time, by_row, by_column = (rotate64(rope, each, x) for each in positions)
        rest = torch.zeros(case.head_dim - case.rotary_dim, dtype=torch.bool)
        expected = by_time.where(~torch.cat((of_rows, of_rows, rest)), by_row)
        expected = expected.where(~torch.cat((of_columns, of_columns, rest)), by_column)
        expect_form(f"rotated {what}", y, like=x)
        expect_close(f"rotated {what}", y, expected, tolerance("rotary", torch.float32))


@contract("Q and k as slices of one tensor, as a fused projection gives them.", SCALINGS[:1])
def slices(impl: Layers, case: Heads) -> None:
    inputs = Inputs(case.seed)
    qkv = inputs.normal(len(case.positions), 10, case.head_dim)
    q, k = qkv[:, : case.num_qo_heads], qkv[:, case.num_qo_heads : case.num_qo_heads + case.num_kv_heads]
    positions = torch.tensor(case.positions, dtype=torch.int64, device=check_device())
    expected = [rotate64(case.config(), positions, x) for x in (q, k)]
    value = qkv[:, case.num_qo_heads + case.num_kv_heads :].clone()
    results = run_poisoned(make_rotary(impl, case), positions, q, k)
    for what, y, e in zip("qk", results, expected):
        expect_close(f"rotated {what}", y, e, tolerance("rotary", case.dtype))
    expect_equal("v beside them", qkv[:, case.num_qo_heads + case.num_kv_heads :], value)


@contract(
    "No tokens: nothing comes back.",
    tuple(heads(rope, 64, 4, 2, positions=()) for rope in ROPES),
)
def no_tokens(impl: Layers, case: Heads) -> None:
    expect_rotated(impl, case)


@contract("Angles are float32, also far out: in a half type position 100,001 would be 100,000.", EXAMPLE)
def far_positions(impl: Layers, case: Case) -> None:
    positions = (100_000, 100_001, 131_071, 65_537, 0)
    far = heads("llama3", 64, 2, 1, positions=positions)
    expect_rotated(impl, far, "rotary, far", context_len=131_072)


@contract("Position 0 turns nothing.", SHAPES)
def position_zero(impl: Layers, case: Heads) -> None:
    inputs = Inputs(case.seed)
    q, k = case.draw(case.num_qo_heads, inputs), case.draw(case.num_kv_heads, inputs)
    positions = torch.zeros(len(case.positions), dtype=torch.int64, device=check_device())
    rotated_q, rotated_k = run_poisoned(make_rotary(impl, case), positions, q.clone(), k.clone())
    expect_equal("q at position 0", rotated_q, q)
    expect_equal("k at position 0", rotated_k, k)


@contract("q·k depends on the distance of the two positions only.", EXAMPLE)
def distance_only(impl: Layers, case: Case) -> None:
    shape = heads("default", 32, 1, 1)
    inputs = Inputs(0)
    q, k = inputs.normal(1, 1, 32).expand(2, -1, -1), inputs.normal(1, 1, 32).expand(2, -1, -1)
    rotary_emb = make_rotary(impl, shape)
    device = check_device()
    rotated_q, _ = run_poisoned(rotary_emb, torch.tensor([17, 917], device=device), q.clone(), k.clone())
    _, rotated_k = run_poisoned(rotary_emb, torch.tensor([5, 905], device=device), q.clone(), k.clone())
    scores = (rotated_q * rotated_k).sum(-1).flatten().cpu().double()
    expect_close("the score, 900 positions on", scores[1:], scores[:1], tolerance("rotary", torch.float32))
    unrotated = float((q * k)[0].sum())
    expect_true("the distance of 12 matters", abs(float(scores[0]) - unrotated) > 0.1, float(scores[0]))


@contract(
    "A token's angles depend on its own position alone: neither on its mates in the step nor on earlier "
    "steps, though one object serves them all.",
    grid(
        "{rope}",
        rope=list(ROPES),
        steps=[((0, 255, 7), (10, 900), (300,), (10, 256, 7), (1023,), (7,))],
        seed=0,
    ),
)
def own_position_alone(impl: Layers, case: Case) -> None:
    shape = heads(case.rope, 64, 2, 1)
    rotary_emb = make_rotary(impl, shape)
    inputs = Inputs(case.seed)
    for number, step in enumerate(case.steps):
        q, k = inputs.normal(len(step), 2, 64), inputs.normal(len(step), 1, 64)
        positions = torch.tensor(step, dtype=torch.int64, device=check_device())
        expected = rotate64(shape.config(), positions, q), rotate64(shape.config(), positions, k)
        results = run_poisoned(rotary_emb, positions, q, k)
        for what, y, e in zip("qk", results, expected):
            expect_close(f"step {number}, rotated {what}", y, e, tolerance("rotary", torch.float32))
