"""Speculation in CUDA graphs on a GPU: same text as without speculation, and replay equals launch."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import torch

from diptych.shared.config import draft_shape
from diptych.shared.engine.llm import LLM
from diptych.shared.loading.model_path import ASSETS
from diptych.shared.tools.bench.round_cost import pieces_of
from diptych.shared.tools.bench.step_inputs import fill_pool
from diptych.shared.tools.conformance.whole_engine.switches import expect_answers
from diptych.shared.tools.training.acceptance import measure_acceptance
from diptych.shared.types import DraftShape, DraftTree

from .harness import OPTIMIZED, is_launched_without_waiting, name_of, optimized, reference_answers

pytestmark = pytest.mark.gpu

OVERLAPPED = {"attention": "triton"}  # takes float32
USE = {**OVERLAPPED, "scheduler": "reference"}
EAGLE = {"speculative": "eagle3", "speculative_draft_model": "tiny-dense-eagle3"}
SHAPES: tuple[dict[str, Any], ...] = (
    {},
    {"speculative_topk": 1, "speculative_num_steps": 4},
    {"speculative_topk": 2, "speculative_num_steps": 3, "speculative_num_draft_tokens": 8, "page_size": 16},
    {"disable_cuda_graph": True},
)


def speculating(**flags: Any) -> LLM:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*kernel by kernel")  # everything can be captured
        return optimized("tiny-dense", **{"use": USE, **EAGLE, **flags})


@pytest.mark.parametrize("flags", SHAPES, ids=name_of)
@pytest.mark.parametrize("use", [USE, OVERLAPPED], ids=["in sequence", "overlapped"])
def test_float32_answers_are_the_references(use: dict[str, str], flags: dict[str, Any]) -> None:
    expected = [output.output_ids for output in reference_answers("tiny-dense")]
    expect_answers("tiny-dense", expected, **{**OPTIMIZED, **EAGLE, "use": use, **flags})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=name_of)
def test_replays_are_what_is_launched(shape: dict[str, Any], dtype: str) -> None:
    """Bit for bit, at sizes with and without padding, one after the other."""
    llm = speculating(**shape, dtype=dtype)
    fill_pool(llm.assembly.kv_pool)
    parts = llm.assembly.parts
    drafter: Any = parts.drafter
    for buffer in (drafter.kv_pool.k_buffer(0), drafter.kv_pool.v_buffer(0), *drafter.last_rows):
        buffer.normal_()
    for bs in (8, 3, 1, 5):
        with pieces_of(llm.assembly.parts, draft_shape(llm.config), bs, 200) as pieces:
            num_before = drafter.graphs[0].num_replays, parts.model_runner.replays.steps
            before = [values.clone() for values in drafter.last_rows]
            drafted: Any = pieces["draft"]()
            tree = {name: values.clone() for name, values in vars(drafted).items()}
            pieces["extend"]()
            extended = [values[1:].clone() for values in drafter.last_rows]
            output, sampled = pieces["verify"]()  # type: ignore[misc]
            verified = [
                output.next_token_logits.clone(),
                output.hidden_states.clone(),
                sampled.next_token_ids,
            ]
            assert drafter.graphs[0].num_replays == num_before[0] + 2
            assert parts.model_runner.replays.steps == num_before[1] + 1

            size = next(size for size in drafter.graphs[0].batch_sizes if size >= bs)
            for values, old in zip(drafter.last_rows, before):
                values.copy_(old)
            launched: DraftTree = drafter._draft(
                drafter.graphs[0].buffers_of_draft(size), drafter.graphs[0].shape
            )
            for name, values in vars(launched).items():
                assert torch.equal(values[:bs], tree[name]), (bs, name)
            drafter._extend(*drafter.graphs[0].buffers_of_extend(size))
            for found, expected in zip(drafter.last_rows, extended):
                assert torch.equal(found[1:], expected), bs
            parts.model_runner.is_watched = True
            output, sampled = pieces["verify"]()  # type: ignore[misc]
            parts.model_runner.is_watched = False
            eager = output.next_token_logits, output.hidden_states, sampled.next_token_ids
            for found, expected in zip(verified, eager):
                assert torch.equal(found, expected), bs


def test_a_round_waits_for_nothing() -> None:
    llm = speculating()
    with pieces_of(llm.assembly.parts, draft_shape(llm.config), 3, 200) as pieces:
        for call in pieces.values():
            call()
        assert is_launched_without_waiting(lambda: [call() for call in pieces.values()])


def test_acceptance_is_the_recorded_one() -> None:
    """Acceptance of the built-in head on held-out questions equals the reference's within 0.01."""
    head = ASSETS / "tiny-dense-eagle3"
    recorded = json.loads((head / "training.json").read_text())["acceptance"]["5/4/16"]
    flags = {**OPTIMIZED, "use": OVERLAPPED, "dtype": "float32"}
    stats = measure_acceptance(str(head), DraftShape(5, 4, 16), recorded["num_questions"], **flags)
    assert stats.acceptance_length_with_bonus == pytest.approx(recorded["with_bonus"], rel=0.01)
