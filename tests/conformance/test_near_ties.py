"""Choices that either side may make are told, and not counted as divergences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shared.conformance.recorder import SAMPLED_IDS
from shared.conformance.routing import experts_part

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


def test_a_near_tie_is_told_and_not_counted(tmp_path: Path) -> None:
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
    sides = ({"chunked_prefill_size": chunk, "disable_radix_cache": True} for chunk in (5, 20))
    outcome = compare(*sides, teacher_forced=True)
    assert outcome.divergence is None
    assert outcome.finished
    assert outcome.num_tokens == num_tokens(engine())


def test_with_equal_logits_there_is_no_near_tie(tmp_path: Path) -> None:
    side = near_tie_sides(tmp_path)[0]
    code = """
        from reference.sampler import Sampler

        class Bad(Sampler):
            def sample(self, logits, info, positions):
                return super().sample(logits, info, positions)._replace(
                    next_token_ids=logits.topk(2).indices[:, 1])
    """
    use = {**side["use"], "sampler": f"{plant(tmp_path, code)}:Bad"}
    outcome = compare(side, {"use": use})
    assert divergence_of(outcome).op == SAMPLED_IDS
    assert outcome.near_ties == []


def test_experts_that_flip_on_an_allowed_error_are_a_near_tie(tmp_path: Path) -> None:
    """Two experts' router logits are a millionth apart, on either side another one ahead."""
    code = """
        from reference import moe

        class Near(moe.MoE):
            def __init__(self, config, hidden_size):
                super().__init__(config, hidden_size)
                product = self.gate.forward

                def gate(x):
                    logits = product(x)
                    logits[:, 1] = logits[:, 0] + {offset}
                    return logits

                self.gate.forward = gate
    """
    a, b = (
        {"model": "tiny-moe", "use": {"moe": f"{plant(tmp_path, code.format(offset=offset), name)}:Near"}}
        for name, offset in (("ahead.py", 1e-6), ("behind.py", -1e-6))
    )
    outcome = compare(a, b)
    assert outcome.divergence is None
    assert outcome.near_ties
    assert all("expert [1] or [0]" in tie.what for tie in outcome.near_ties)


def test_experts_part_only_where_the_best_differ() -> None:
    config = engine(model="tiny-moe").model_config
    gate = torch.tensor([0.0, 3.0, 2.0, 1.0, -1.0, 0.5, 0.2, 0.1])
    flipped = gate.clone()
    flipped[3] = 2.5
    assert experts_part(config, gate, gate.flip(0).flip(0)) is None
    assert experts_part(config, gate, flipped) == "expert [2] or [3]: router logits 1 apart"
    assert experts_part(engine().model_config, gate, flipped) is None
    assert experts_part(config, None, flipped) is None
