"""Clauses of linear attention: outputs and states are those of the recurrence, however tokens come."""

from __future__ import annotations

import torch

from diptych.shared.interfaces import LinearAttention
from diptych.shared.tools.conformance.clauses.case import table
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.compare import expect_close, expect_equal, expect_form
from diptych.shared.tools.conformance.clauses.inputs import type_name
from diptych.shared.tools.conformance.clauses.tolerance import tolerance
from diptych.shared.tools.conformance.oracles.linear_batches import LAYER, LinearCase, recurrence, world_of

HALF = torch.bfloat16


def expect_recurrence(impl: type[LinearAttention], case: LinearCase) -> None:
    world, limit = world_of(case), tolerance("linear attention", case.dtype)
    backend, weight = impl(world.pool), world.layer.conv_weight
    found: list[list[torch.Tensor]] = [[] for _ in world.sequences]

    def expect_state(i: int, expected: torch.Tensor) -> None:
        row = world.pool.recurrent[LAYER, world.rows[i]]
        expect_close(f"state of request {i}", row, expected, limit)

    for step in range(len(case.steps)):
        for i, output in world.step(backend, step).items():
            if step in case.verify:
                num_before = sum(map(len, found[i]))
                expect_state(i, recurrence(case, weight, world.sequences[i], num_before)[1])
            found[i].append(output)
    for i, tokens in enumerate(world.sequences):
        outputs, state = recurrence(case, weight, tokens)
        output = torch.cat(found[i])
        expect_form(f"outputs of request {i}", output, outputs.to(output.device), case.dtype)
        expect_close(f"outputs of request {i}", output, outputs, limit)
        expect_state(i, state)


@contract(
    "The outputs and the state of a prompt are those of the recurrence, token by token.",
    table(
        "steps num_k_heads num_v_heads k_head_dim v_head_dim conv_kernel dtype",
        ("one token", ((1,),)),
        ("shorter than the convolution", ((2,),)),
        ("a prompt", ((67,),)),
        ("three value heads a key head, unequal sizes", ((20,),), 2, 6, 12, 20),
        ("one head of each", ((9,),), 1, 1),
        ("two taps", ((9,),), 2, 4, 16, 16, 2),
        *((f"a prompt, {type_name(HALF)}", ((33,),), 2, 4, 32, 16, 4, dtype) for dtype in (HALF,)),
        of=LinearCase,
    ),
)
def prompts(impl: type[LinearAttention], case: LinearCase) -> None:
    expect_recurrence(impl, case)


@contract(
    "However the tokens of a request are divided into steps, its outputs and its state are the same: the "
    "convolution and the state go on where the last step ended.",
    table(
        "steps dtype",
        ("token by token", ((1,),) * 9),
        ("a chunk, then tokens", ((6,), (1,), (1,), (1,))),
        ("chunks shorter than the convolution", ((2,), (1,), (2,), (3,))),
        ("chunks", ((31,), (40,), (1,))),
        ("chunks, bfloat16", ((31,), (8,), (1,), (1,)), HALF),
        of=LinearCase,
    ),
)
def chunks(impl: type[LinearAttention], case: LinearCase) -> None:
    expect_recurrence(impl, case)


@contract(
    "Requests do not disturb each other: prompts beside decoding requests, in any order of rows, some of "
    "them not in a step.",
    table(
        "steps v_head_dim",
        ("prompts of different lengths", ((3, 17, 1),), 20),
        ("mixed", ((5, 0, 3), (1, 4, 1), (1, 1, 0), (1, 1, 2)), 20),
        ("decoding in turns", ((2, 2, 2), (1, 0, 1), (0, 1, 1), (1, 1, 1)), 20),
        of=LinearCase,
    ),
)
def batches(impl: type[LinearAttention], case: LinearCase) -> None:
    expect_recurrence(impl, case)


@contract(
    "A request starts from zero, whatever its row holds: NaN, or the state of an earlier request.",
    table("steps", ("a prompt", ((5,),)), ("a single token", ((1,),)), of=LinearCase),
)
def rows_begin_at_zero(impl: type[LinearAttention], case: LinearCase) -> None:
    world = world_of(case)
    backend = impl(world.pool)
    first = world.step(backend, 0)[0]
    again = world.step(backend, 0)[0]
    expect_equal("the outputs of the same prompt in the same row", again, first)
    expect_close(
        "and they", first, recurrence(case, world.layer.conv_weight, world.sequences[0])[0],
        tolerance("linear attention", case.dtype),
    )  # fmt: skip


@contract(
    "Only the rows of the batch change, in this layer alone; what is given stays as it is.",
    table("steps", ("a mixed batch", ((4, 0, 2), (1, 3, 0))), of=LinearCase),
)
def nothing_else_changes(impl: type[LinearAttention], case: LinearCase) -> None:
    world = world_of(case)
    backend, weight = impl(world.pool), world.layer.conv_weight.clone()
    before = [(each.u.clone(), each.g.clone(), each.beta.clone()) for each in world.sequences]
    world.step(backend, 0)
    for name, buffer in (("inputs", world.pool.inputs), ("states", world.pool.recurrent)):
        is_written = ~torch.isnan(buffer).flatten(2).all(-1)  # [layers, rows]; row 0 is padding's
        rows = {(LAYER, world.rows[i]) for i in (0, 2)}
        written = {(layer, row) for layer, row in is_written.nonzero().tolist() if row > 0}
        expect_equal(f"(layer, row) of {name} that were written", written, rows)
    states = world.pool.recurrent[LAYER, world.rows[2]].clone()
    world.step(backend, 1)
    expect_equal("the state of a request not in the step", world.pool.recurrent[LAYER, world.rows[2]], states)
    expect_equal("the weight", world.layer.conv_weight, weight)
    for each, (u, g, beta) in zip(world.sequences, before):
        expect_equal("u", each.u, u)
        expect_equal("g", each.g, g)
        expect_equal("beta", each.beta, beta)


@contract(
    "A state that decays to nothing within a few tokens gives no infinity and no NaN.",
    table("steps decay", ("decay of e^-50 a token", ((70,), (3,)), 100.0), of=LinearCase),
)
def strong_decay(impl: type[LinearAttention], case: LinearCase) -> None:
    expect_recurrence(impl, case)


@contract(
    "With a decay for each channel of k outputs and states are those of the recurrence, too, also where a "
    "quotient of powers would overflow. An implementation without `supports_channel_decay` gets no such "
    "config.",
    table(
        "steps decay verify k_head_dim v_head_dim dtype",
        ("a prompt, unequal sizes", ((67,),), 1.0, (), 12, 20),
        ("mixed", ((5, 0, 66), (1, 9, 1), (1, 1, 0), (1, 2, 1)), 0.1),
        ("decay of e^-50 a token", ((70,), (3,)), 100.0),
        ("drafts", ((5, 2), (1, 4), (3, 1), (1, 1)), 1.0, (1, 2)),
        ("chunks, bfloat16", ((31,), (8,), (1,)), 1.0, (), 32, 16, HALF),
        of=LinearCase,
        channel_decay=True,
        num_k_heads=4,
    ),
)
def channel_decay(impl: type[LinearAttention], case: LinearCase) -> None:
    if impl.supports_channel_decay and (impl.supports_drafts or not case.verify):
        expect_recurrence(impl, case)


@contract(
    "Drafts that the next step does not follow leave no trace: one of them is accepted, or all, or none; by "
    "verify steps and by others, in any order of rows. During a verify step the state is that before its "
    "tokens. An implementation without `supports_drafts` gets no such step.",
    table(
        "steps verify dtype",
        ("some are accepted", ((5, 2, 9), (1, 4, 2), (3, 1, 0), (1, 1, 1)), (1, 2)),
        ("a plain step between", ((3, 1), (2, 4), (1, 1), (4, 1), (1, 1)), (1, 3)),
        ("many rounds", ((2,), (4,), (1,), (2,), (3,), (1,), (1,)), (1, 2, 3, 4)),
        ("some are accepted, bfloat16", ((5, 2), (1, 4), (3, 1), (1, 1)), (1, 2), HALF),
        of=LinearCase,
    ),
)
def drafts(impl: type[LinearAttention], case: LinearCase) -> None:
    if impl.supports_drafts:
        expect_recurrence(impl, case)
