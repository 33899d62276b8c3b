"""Clauses of multi-head latent attention: the applicable clauses of attention, over latent rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from diptych.shared.interfaces import AttentionBackend
from diptych.shared.tools.conformance.clauses.clause import contract
from diptych.shared.tools.conformance.clauses.inputs import type_name
from diptych.shared.tools.conformance.contracts.attention import batches, masks, outputs, ragged, steps
from diptych.shared.tools.conformance.oracles.attention_batches import expect_attention
from diptych.shared.tools.conformance.oracles.mla_batches import MLACase
from diptych.shared.types.attention import KVScales

DECODE = MLACase("decode", ((4, 1), (0, 1), (63, 1), (31, 1), (64, 1)))
EXTEND = MLACase("cached prefixes", ((17, 3), (0, 7), (1, 32), (16, 1)))
MIXED = MLACase("mixed", ((23, 17), (0, 21), (8, 1), (29, 1), (4, 1)))
SMALL: dict[str, Any] = {"kv_lora_rank": 24, "qk_nope_head_dim": 20, "qk_rope_head_dim": 12, "v_head_dim": 28}


def grid(*cases: MLACase) -> tuple[MLACase, ...]:
    """Every case in 32 and 16 bits, with different page sizes."""
    pages = 1, 4, 16
    return tuple(
        replace(
            case, name=f"{case.name}, {type_name(dtype)}, page {page_size}", dtype=dtype, page_size=page_size
        )
        for i, case in enumerate(cases)
        for dtype, page_size in ((torch.float32, pages[i % 3]), (torch.bfloat16, pages[(i + 1) % 3]))
    )


STEPS = (
    replace(DECODE, name="decode, page 4", page_size=4),
    replace(EXTEND, name="extend, bfloat16, page 16", page_size=16, dtype=torch.bfloat16),
    replace(MIXED, name="mixed, bfloat16, small sizes", dtype=torch.bfloat16, **SMALL),
)

decode = batches.decode.with_cases(
    grid(
        DECODE,
        MLACase("one token", ((0, 1),)),
        MLACase("one far longer", ((2, 1), (1, 1), (259, 1), (3, 1)), num_qo_heads=16),
        MLACase("20 heads", ((40, 1), (5, 1)), num_qo_heads=20),
        MLACase("small sizes", ((40, 1), (5, 1), (130, 1)), num_qo_heads=3, **SMALL),
    )
)
extend = batches.extend.with_cases(
    grid(
        EXTEND,
        MLACase("prompts", ((0, 1), (0, 7), (0, 19))),
        MLACase("a long prompt behind a prefix", ((70, 90), (3, 2))),
        MLACase("small sizes", ((17, 30), (0, 41)), num_qo_heads=5, **SMALL),
    )
)
mixed = batches.mixed.with_cases(grid(MIXED))


@contract(
    "The layer's scale multiplies the scores, whatever head_dim is.",
    grid(replace(DECODE, name="decode", scale=1.59), replace(EXTEND, name="extend", scale=1.59)),
)
def any_scale(impl: type[AttentionBackend], case: MLACase) -> None:
    expect_attention(impl, case)


FP8_ROWS = KVScales(0.043, 0.043)


@contract(
    "In an FP8 pool a row is what it holds times the layer's scale.",
    grid(
        *(
            replace(case, name=f"{case.name}, FP8", kv_scales=FP8_ROWS)
            for case in (
                DECODE,
                MLACase("few requests", ((40, 1), (300, 1))),
                EXTEND,
                MIXED,
                MLACase("a long prompt behind a prefix", ((70, 90), (3, 2))),
                MLACase("trees", ((11, 7), (0, 7), (26, 7)), mask="tree", tail=7),
            )
        ),
        *(
            replace(case, name=f"{case.name}, e5m2", kv_scales=FP8_ROWS, kv_dtype=torch.float8_e5m2)
            for case in (DECODE, MLACase("a long prompt behind a prefix", ((70, 90), (3, 2))))
        ),
    ),
)
def fp8_rows(impl: type[AttentionBackend], case: MLACase) -> None:
    expect_attention(impl, case)


fixed_shape = masks.fixed_shape.with_cases(
    grid(
        MLACase("trees", ((11, 7), (0, 7), (26, 7)), mask="tree", tail=7),
        MLACase("shorter than the mask", ((3, 4), (0, 4), (9, 4)), mask="tree", tail=8),
    )
)
trees = masks.trees.with_cases(grid(MLACase("flat mask", ((17, 5), (3, 2)), mask="tree")))
tokens_without_visible_keys = masks.tokens_without_visible_keys.with_cases(
    grid(MLACase("blind rows", ((3, 4), (7, 2)), mask="blind"))
)
idle = steps.idle.with_cases(grid(MLACase("idle", ())))
planned_before_stored = steps.planned_before_stored.with_cases(STEPS)
given_k_and_v = steps.given_k_and_v.with_cases(STEPS)
nothing_changes = steps.nothing_changes.with_cases(STEPS)
layers_of_one_plan = steps.layers_of_one_plan.with_cases(STEPS)
plans_follow_one_another = steps.plans_follow_one_another.with_cases(STEPS)
backends_stand_beside_each_other = steps.backends_stand_beside_each_other.with_cases(STEPS)
nan_stays = steps.nan_stays.with_cases(STEPS)
same_output = steps.same_output.with_cases(STEPS)
output_given = outputs.output_given.with_cases(STEPS)
ragged_plans = ragged.ragged.with_cases(
    (
        MLACase("prompts", ((17, 3), (0, 21), (5, 1), (130, 40), (0, 2)), **SMALL),
        MLACase("decoding", ((17, 1), (70, 1), (5, 1), (150, 1), (0, 1)), dtype=torch.bfloat16, page_size=4),
        MLACase("few requests", ((17, 1), (150, 1), (0, 1))),
    )
)
