"""Choices that either side may make are reported and not counted as divergences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diptych.shared.tools.conformance.diff.recorder import SAMPLED_IDS

from .lockstep_harness import MODEL, NUM_NEW, compare, divergence_of, engine, num_tokens, plant, prompts

# The second-best logit is put right beside the best: below it on one side, above it on the other.
NEAR = """def compute_logits(self, hidden_states):
            logits = super().compute_logits(hidden_states)
            best = logits.topk(2)
            return logits.scatter(1, best.indices[:, 1:], best.values[:, :1] + {offset})
    """


def near_tie_sides(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    a, b = (
        plant(folder, MODEL.format(body=NEAR.format(offset=offset)), name)
        for name, offset in (("below.py", -3e-4), ("above.py", 1e-4))
    )
    return {"use": {"models": a}}, {"use": {"models": b}}


def test_a_near_tie_is_reported_and_not_counted(tmp_path: Path) -> None:
    outcome = compare(*near_tie_sides(tmp_path))
    assert outcome.divergence is None
    assert sorted(tie.key[0] for tie in outcome.near_ties) == ["prompt-0", "prompt-1", "prompt-2"]
    assert {tie.steps for tie in outcome.near_ties} == {(1, 1)}
    assert all(0.0002 < float(tie.what.split("logits ")[1].split()[0]) < 0.0004 for tie in outcome.near_ties)
    assert outcome.num_tokens == sum(map(len, prompts(engine())))


def test_teacher_forcing_looks_beyond_a_near_tie(tmp_path: Path) -> None:
    outcome = compare(*near_tie_sides(tmp_path), teacher_forced=True)
    assert outcome.divergence is None
    assert outcome.finished
    assert outcome.num_tokens == num_tokens(engine())
    assert len(outcome.near_ties) == 3 * NUM_NEW


def test_teacher_forcing_works_when_a_is_behind() -> None:
    sides = ({"chunked_prefill_size": chunk, "disable_radix_cache": True} for chunk in (12, 30))
    outcome = compare(*sides, teacher_forced=True)
    assert outcome.divergence is None
    assert outcome.finished
    assert outcome.num_tokens == num_tokens(engine())


def test_with_equal_logits_there_is_no_near_tie(tmp_path: Path) -> None:
    side = near_tie_sides(tmp_path)[0]
    code = """
        from diptych.reference.sampler import Sampler

        class Bad(Sampler):
            def sample(self, logits, info, positions):
                return super().sample(logits, info, positions)._replace(
                    next_token_ids=logits.topk(2).indices[:, 1])
    """
    use = {**side["use"], "sampler": f"{plant(tmp_path, code)}:Bad"}
    outcome = compare(side, {"use": use})
    assert divergence_of(outcome).op == SAMPLED_IDS
    assert outcome.near_ties == []
