"""Answers in half types: a departure is allowed at a near tie, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diptych.shared.tools.conformance.clauses.compare import Mismatch
from diptych.shared.tools.conformance.whole_engine.switches import (
    NUM_NEW_TOKENS,
    answers_with_alternatives,
    expect_near_answers,
)

from .lockstep_harness import plant

REFERENCE = {"device": "cpu", "panel": "reference"}

SECOND_BEST = """
    from diptych.reference.sampler import Sampler

    class Bad(Sampler):
        num_calls = 0

        def sample(self, logits, info, positions):
            output = super().sample(logits, info, positions)
            Bad.num_calls += 1
            if Bad.num_calls == 9:
                output.next_token_ids[1] = logits[1].topk(2).indices[1]
            return output
"""


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    return answers_with_alternatives("tiny-dense", **REFERENCE, dtype="bfloat16", max_total_tokens=8192)


def test_other_chunks_and_pages_depart_at_near_ties_at_most(expected: list[Any]) -> None:
    flags = {"chunked_prefill_size": 32, "page_size": 4, "enable_mixed_chunk": True}
    departed = expect_near_answers("tiny-dense", expected, "bfloat16", **REFERENCE, **flags)
    assert departed <= len(expected) // 2
    assert all(len(output.output_logprobs) == NUM_NEW_TOKENS for output in expected)


def test_a_token_that_is_not_nearly_as_likely_is_named(tmp_path: Path, expected: list[Any]) -> None:
    use = {"sampler": f"{plant(tmp_path, SECOND_BEST)}:Bad"}
    # Without a cache no request waits for a prefix that another computes: row 1 is prompt 1.
    flags = {"disable_radix_cache": True, "use": use}
    with pytest.raises(Mismatch, match="prompt 1, output token 8"):
        expect_near_answers("tiny-dense", expected, "bfloat16", **REFERENCE, **flags)
