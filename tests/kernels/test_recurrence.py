"""Kernels of linear attention: padding rows, the two forms, and the bits of chunks."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from diptych.optimized.kernels.recurrence import decode_step
from diptych.optimized.kernels.recurrence.gates import decay_and_beta, gate_heads, norm_and_gate
from diptych.optimized.kernels.recurrence.step_tables import CHUNK
from diptych.optimized.linear_attention import LinearAttention
from diptych.shared.interfaces.linear_attention import StateStore
from diptych.shared.loading import kv_sizing
from diptych.shared.tools.conformance.clauses.device import check_device
from diptych.shared.tools.conformance.oracles.linear_batches import (
    LAYER,
    LinearCase,
    World,
    forward_batch,
    world_of,
)

pytestmark = pytest.mark.contract


def case_of(*steps: tuple[int, ...]) -> LinearCase:
    return LinearCase("case", steps=steps, num_k_heads=1, num_v_heads=2, k_head_dim=16, v_head_dim=20)


def run(world: World) -> list[torch.Tensor]:
    """The outputs of request 0, step by step."""
    backend = LinearAttention(world.pool)
    return [world.step(backend, step)[0] for step in range(len(world.case.steps))]


def test_padding_rows_touch_no_live_state() -> None:
    """A padded decode step, as a graph replays it: padding is requests of one token in row 0."""
    world, padded = world_of(case_of((3, 2), (1, 1))), world_of(case_of((3, 2), (1, 1)))
    expected = run(world)[1]
    backend = LinearAttention(padded.pool)
    padded.step(backend, 0)
    other_rows = [row for row in range(1, padded.pool.recurrent.shape[1]) if row not in padded.rows]
    batch = forward_batch([padded.rows[0], padded.rows[1], 0, 0], [(3, 4), (2, 3), (0, 1), (0, 1)])
    u, g, beta = (
        torch.cat([each[0][3:4], each[1][2:3], torch.full_like(each[0][:2], torch.nan)])
        for each in ([getattr(s, name) for s in padded.sequences] for name in ("u", "g", "beta"))
    )
    found = backend.run(u, g, beta, padded.layer, backend.plan(batch))
    assert torch.equal(found[0], expected[0])
    for row in padded.rows:
        assert torch.equal(padded.pool.recurrent[LAYER, row], world.pool.recurrent[LAYER, row])
        assert torch.equal(padded.pool.inputs[LAYER, row], world.pool.inputs[LAYER, row])
    assert padded.pool.recurrent[:, other_rows].isnan().all()
    assert padded.pool.inputs[:, other_rows].isnan().all()


def test_chunks_that_end_at_multiples_of_64_have_equal_bits() -> None:
    """Also behind a checkpoint inside a step; the recurrent form has other bits."""
    whole = run(world_of(case_of((70,))))[0]
    world = world_of(case_of((64,), (6,)))
    assert torch.equal(torch.cat(run(world)), whole)
    stored = world_of(case_of((70,)))
    stored.pool.stores[stored.rows[0]] = [StateStore(stored.pool.checkpoints[0], 64)]
    assert torch.equal(run(stored)[0], whole)
    short, single = run(world_of(case_of((6,))))[0], torch.cat(run(world_of(case_of(*[(1,)] * 6))))
    assert not torch.equal(short, single)
    torch.testing.assert_close(short, single, rtol=1e-5, atol=1e-6)


def test_equal_keys() -> None:
    """The inverse of a chunk whose keys are all equal has no large numbers on the way."""
    world = world_of(case_of((64,)))
    tokens = world.sequences[0]
    tokens.u[:] = tokens.u[:1]
    tokens.g.fill_(0.0)
    tokens.beta.fill_(1.0)
    chunk = run(world)[0]
    single = world_of(case_of(*[(1,)] * 64))
    single.sequences[0].u[:], single.sequences[0].g[:], single.sequences[0].beta[:] = (
        tokens.u, tokens.g, tokens.beta,
    )  # fmt: skip
    torch.testing.assert_close(chunk, torch.cat(run(single)), rtol=1e-4, atol=1e-5)


def test_gates() -> None:
    torch.manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(check_device())

    projected = 9.0 * normal(5, 20)
    a, b = projected[:, 3:9], projected[:, 9:15]
    A_log, dt_bias = normal(6), normal(6)
    g, beta = decay_and_beta(a, b, A_log, dt_bias)
    torch.testing.assert_close(g, -A_log.exp() * torch.nn.functional.softplus(a + dt_bias))
    torch.testing.assert_close(beta, torch.sigmoid(b))
    o, z, weight = normal(5, 6, 12), normal(5, 80)[:, :72], normal(12)
    normed = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + 1e-6) * weight
    expected = normed.flatten(1) * torch.nn.functional.silu(z)
    torch.testing.assert_close(norm_and_gate(o, z, weight, 1e-6), expected)
    heads, gates = normal(5, 72), normal(5, 2, 6, 24)[:, 1, :, 5:17]
    expected = heads * torch.sigmoid(gates).flatten(1)
    torch.testing.assert_close(gate_heads(heads, gates), expected)


def test_a_norm_has_the_bits_of_a_token_alone() -> None:
    """With 300 tokens of 8 heads as with one: deterministic mode needs it."""
    torch.manual_seed(0)
    o, z = torch.randn(2, 300, 1024).to(check_device(), torch.bfloat16)
    weight = torch.randn(128).to(check_device())
    together = norm_and_gate(o.unflatten(1, (8, 128)), z, weight, 1e-6)
    alone = norm_and_gate(o[7:8].unflatten(1, (8, 128)), z[7:8], weight, 1e-6)
    assert torch.equal(together[7:8], alone)


@pytest.mark.parametrize("columns", [128, 16])
def test_a_decode_step_with_gates_is_its_parts(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a head's columns are those of two CTAs."""
    monkeypatch.setattr(decode_step, "MAX_COLUMNS", columns)
    torch.manual_seed(0)
    a, b, z = torch.randn(2, 44).to(check_device()).split([2, 2, 40], dim=1)
    A_log, dt_bias, weight = (torch.randn(n).to(check_device()) for n in (2, 2, 20))
    worlds = [world_of(case_of((3, 2), (1, 1))) for _ in range(2)]
    outputs = []
    for world in worlds:
        backend = LinearAttention(world.pool)
        world.step(backend, 0)
        _, (u, *_), batch = world.inputs_of(1)
        plan, gates = backend.plan(batch), decode_step.Gates(z, A_log, dt_bias, weight, 1e-6, True)
        y = backend.run_gated(u, a, b, gates, world.layer, plan) if outputs else None
        if y is None:
            o = backend.run(u, *decay_and_beta(a, b, A_log, dt_bias), world.layer, plan)
            y = norm_and_gate(o, z, weight, 1e-6)
        outputs.append(y)
        assert not backend.arrived.any()
    torch.testing.assert_close(*outputs)
    for name in ("recurrent", "inputs"):
        pools = [getattr(world.pool, name)[LAYER, world.rows] for world in worlds]
        torch.testing.assert_close(*pools)


class Allocations(TorchDispatchMode):
    """Counts the bytes of the tensors that are made without contents."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("empty", "new_empty", "empty_like"):
            self.num_bytes += found.nbytes
        return found


@pytest.mark.parametrize("channel_decay", [False, True])
def test_the_memory_plan_has_the_buffers_of_prompts(channel_decay: bool) -> None:
    """All that a step allocates, and its inputs, without the model's projections."""
    case = LinearCase(
        "case", steps=((CHUNK,),), num_k_heads=2, num_v_heads=2, v_head_dim=20, channel_decay=channel_decay
    )
    world = world_of(case)
    backend = LinearAttention(world.pool)
    _, (u, g, beta), batch = world.inputs_of(0)
    plan = backend.plan(batch)
    with Allocations() as found:
        backend.run(u, g, beta, world.layer, plan)
    assert kv_sizing.CHUNK == CHUNK
    planned, chunk = kv_sizing.linear_bytes(case.config, u.dtype)
    num_projected = sum(case.config.projections.values()) + (2 * 16 + 16 if channel_decay else 0)
    assert found.num_bytes + g.nbytes + beta.nbytes == CHUNK * (planned - num_projected * u.dtype.itemsize)
    assert chunk == (2 if channel_decay else 1) * 2 * CHUNK**2 * 4
