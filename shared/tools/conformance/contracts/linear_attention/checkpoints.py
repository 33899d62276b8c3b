"""Clauses of linear attention: states are copied at the positions asked for, and loaded."""

from __future__ import annotations

import torch

from diptych.shared.interfaces import LinearAttention
from diptych.shared.interfaces.linear_attention import StateStore
from diptych.shared.tools.conformance.clauses.case import table
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_close, expect_equal, expect_raises
from diptych.shared.tools.conformance.clauses.tolerance import tolerance
from diptych.shared.tools.conformance.oracles.linear_batches import (
    LAYER,
    LinearCase,
    World,
    recurrence,
    world_of,
)


class StoreCase(LinearCase):
    """`stores`: for each request, positions at which its state is asked for."""

    steps: tuple[tuple[int, ...], ...] = ((70,),)
    stores: tuple[tuple[int, ...], ...] = ((64,),)
    num_k_heads: int = 1
    num_v_heads: int = 2
    v_head_dim: int = 20


def expect_state(case: LinearCase, world: World, request: int, position: int, row: int) -> None:
    """Row `row` has state and inputs of the request's first `position` tokens."""
    tokens, name = world.sequences[request], f"of request {request} at {position}"
    state = recurrence(case, world.layer.conv_weight, tokens, position)[1]
    limit = tolerance("linear attention", case.dtype)
    expect_close(f"the state {name}", world.pool.recurrent[LAYER, row], state, limit)
    num_inputs = case.conv_kernel - 1
    before = torch.nn.functional.pad(tokens.u, (0, 0, num_inputs, 0))[position : position + num_inputs]
    expect_equal(f"the inputs {name}", world.pool.inputs[LAYER, row], before)


@contract(
    "Each checkpoint that is ordered has the state and the inputs of its position: at the end of a step, "
    "inside, at both; of prompts, of chunks and of decoding requests; the row itself goes on.",
    table(
        "steps stores",
        ("inside a prompt", ((70,),), ((64,),)),
        ("at its end", ((64,),), ((64,),)),
        ("twice in a step", ((130,),), ((64, 128),)),
        ("inside a chunk", ((30,), (45,)), ((64,),)),
        ("while decoding", ((63,), (1,), (1,)), ((64,),)),
        ("a mixed step", ((63, 0), (1, 66)), ((64,), (64,))),
        ("two of three requests", ((66, 3, 64), (1, 1, 1)), ((64,), (), (64,))),
        of=StoreCase,
    ),
)
def stores(impl: type[LinearAttention], case: StoreCase) -> None:
    world = world_of(case)
    backend, free = impl(world.pool), [*world.pool.checkpoints]
    orders = {
        i: [StateStore(free.pop(), position) for position in positions]
        for i, positions in enumerate(case.stores)
    }
    world.pool.stores |= {world.rows[i]: stores for i, stores in orders.items()}
    for step in range(len(case.steps)):
        world.step(backend, step)
    for i, stores in orders.items():
        for store in stores:
            assert store.stored is not None
            expect_state(case, world, i, store.stored, store.checkpoint)
        expect_state(case, world, i, sum(step[i] for step in case.steps), world.rows[i])
    for row in free:
        is_nan = bool(world.pool.recurrent[:, row].isnan().all() and world.pool.inputs[:, row].isnan().all())
        expect_equal(f"checkpoint {row}, which no order names, is as it was", is_nan, True)


@contract(
    "A plan for graphs gives decode or verify steps of any requests, fewer than it has, their outputs and "
    "states, and the checkpoints that are ordered; padding that holds NaN touches row 0 alone. An "
    "implementation without such plans raises.",
    table(
        "steps stores verify",
        ("prompts, then tokens", ((9, 70, 62), (1, 1, 1), (0, 1, 1), (1, 0, 0)), ((), (), (64,))),
        ("the first tokens", ((1, 1), (1, 1)), ((), (2,))),
        ("drafts", ((5, 9, 1), (4, 1, 0), (2, 0, 3), (1, 1, 1)), ((), (), ()), (1, 2)),
        of=StoreCase,
    ),
)
def graph_plans(impl: type[LinearAttention], case: StoreCase) -> None:
    size, world = 4, world_of(case)
    backend = impl(world.pool)
    if not backend.supports_cuda_graph:
        expect_raises("a plan for graphs", ValueError, backend.plan_for_graph, world.padding(0, size))
        return
    if case.verify and not backend.supports_drafts:
        return
    checkpoints = list(world.pool.checkpoints)
    plans = {
        step in case.verify: backend.plan_for_graph(world.padding(step, size)) for step in (0, *case.verify)
    }
    orders = {i: StateStore(checkpoints[i], at) for i, stores in enumerate(case.stores) for at in stores}
    world.pool.stores |= {world.rows[i]: [order] for i, order in orders.items()}
    found: list[list[torch.Tensor]] = [[] for _ in world.sequences]
    for step, lens in enumerate(case.steps):
        plan = plans[step in case.verify]
        has_plan = max(lens) == 1 or step in case.verify
        outputs = world.padded_step(backend, step, plan, size) if has_plan else world.step(backend, step)
        for i, output in outputs.items():
            found[i].append(output)
    for i, tokens in enumerate(world.sequences):
        expected = recurrence(case, world.layer.conv_weight, tokens)[0]
        expect_close(
            f"outputs of request {i}",
            torch.cat(found[i]),
            expected,
            tolerance("linear attention", case.dtype),
        )
        expect_state(case, world, i, len(tokens.u), world.rows[i])
    for i, order in orders.items():
        expect_state(case, world, i, order.position, order.checkpoint)
    used = {0, *world.rows, *(order.checkpoint for order in orders.values())}
    others = [row for row in range(world.pool.recurrent.shape[1]) if row not in used]
    is_nan = world.pool.recurrent[:, others].isnan().all() and world.pool.inputs[:, others].isnan().all()
    expect_equal("the other rows are as they were", bool(is_nan), True)


@contract(
    "A request goes on from a checkpoint as from its own state, in another row, beside another request that "
    "overwrites the checkpoint in the same step.",
    table("steps", ("the rest of a prompt", ((64,), (9,), (2,))), ("a token", ((64,), (1,))), of=StoreCase),
)
def loads(impl: type[LinearAttention], case: StoreCase) -> None:
    wide = case.replace(steps=tuple((n, 64 * (i == 1)) for i, (n,) in enumerate(case.steps)))
    world = world_of(wide)
    backend, checkpoint = impl(world.pool), world.pool.checkpoints[0]
    world.pool.stores[world.rows[0]] = [StateStore(checkpoint, 64)]
    world.step(backend, 0)
    world.rows[0] = next(row for row in range(1, 5) if row not in world.rows)
    world.pool.stores[world.rows[1]] = [StateStore(checkpoint, 64)]
    world.pool.loads[world.rows[0]] = checkpoint
    for step in range(1, len(wide.steps)):
        world.step(backend, step)
    expect_equal("orders to load that are left", world.pool.loads, {})
    expect_state(wide, world, 0, sum(n for n, _ in wide.steps), world.rows[0])
    expect_state(wide, world, 1, 64, checkpoint)


@contract(
    "A request goes on from a state that another engine has written to its row, whatever the row has held: "
    "with a token, or with drafts.",
    table(
        "steps verify",
        ("a token", ((9,), (1,), (1,))),
        ("drafts", ((9,), (2,), (3,)), (1, 2)),
        of=StoreCase,
    ),
)
def states_that_come(impl: type[LinearAttention], case: StoreCase) -> None:
    world = world_of(case)
    backend, pool = impl(world.pool), world.pool
    if case.verify and not backend.supports_drafts:
        return
    world.step(backend, 0)
    old, new = world.rows[0], next(row for row in range(1, 3) if row not in world.rows)
    for states in (pool.inputs, pool.recurrent):
        states[:, new] = states[:, old]
    world.rows[0], num_tokens = new, case.steps[0][0]
    pool.has_come(new, num_tokens)
    outputs = [world.step(backend, step)[0] for step in range(1, len(case.steps))]
    expected = recurrence(case, world.layer.conv_weight, world.sequences[0])[0][num_tokens:]
    limit = tolerance("linear attention", case.dtype)
    expect_close("outputs behind the state", torch.cat(outputs), expected, limit)
