"""A router's near ties: reported, not counted; with teacher forcing the comparison continues."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.reference.moe import TopK
from diptych.shared.config import MoEConfig
from diptych.shared.tools.conformance.diff.outcome import Outcome
from diptych.shared.tools.conformance.oracles.router_ties import experts_part, take_experts

from .lockstep_harness import NUM_NEW, compare, divergence_of, engine, num_tokens, plant, prompts

# Two experts' router logits are a millionth apart, and each side prefers another one.
NEAR = """
    import torch
    from diptych.reference import moe

    class Near(moe.MoE):
        def __init__(self, config, hidden_size):
            super().__init__(config, hidden_size)
            product = self.gate.forward

            def gate(x):
                logits = product(x)
                logits[:, 1] = logits[:, 0] + {offset}
                return logits

            self.gate.forward = gate

        {body}
"""


def near_tie_sides(folder: Path, body: str = "") -> tuple[dict[str, Any], dict[str, Any]]:
    """`body`: what else B's class has."""
    a, b = (
        {
            "model": "tiny-moe",
            "use": {"moe": f"{plant(folder, NEAR.format(offset=offset, body=text), name)}:Near"},
        }
        for name, offset, text in (("ahead.py", 1e-6, ""), ("behind.py", -1e-6, body))
    )
    return a, b


def flipped(outcome: Outcome) -> set[str]:
    """Ops at near ties of experts."""
    assert all("expert [1] or [0]" in tie.what for tie in outcome.near_ties)
    return {tie.op for tie in outcome.near_ties}


def test_experts_that_flip_on_an_allowed_error_are_a_near_tie(tmp_path: Path) -> None:
    outcome = compare(*near_tie_sides(tmp_path))
    assert outcome.divergence is None
    assert flipped(outcome)
    # Each request is given up at the first op with one of them.
    given_up = sorted({(tie.key[0], tie.op) for tie in outcome.near_ties})
    assert [rid for rid, _ in given_up] == ["prompt-0", "prompt-1", "prompt-2"]


def test_teacher_forcing_looks_beyond_them(tmp_path: Path) -> None:
    """B takes A's experts, with its own weights: everything that follows is compared in float32."""
    outcome = compare(*near_tie_sides(tmp_path), teacher_forced=True)
    assert outcome.divergence is None
    assert outcome.finished
    assert outcome.num_tokens == num_tokens(engine())
    assert flipped(outcome) == {f"layers.{i}.mlp.topk_ids" for i in range(6)}
    assert len({tie.key for tie in outcome.near_ties}) > outcome.num_tokens // 3
    assert outcome.worst["layer"].ratio < 1e-5


@pytest.mark.parametrize("forced", [False, True])
def test_a_bug_behind_a_near_tie_is_found(tmp_path: Path, forced: bool) -> None:
    """In a layer that no token reaches without a tie before it."""
    body = """def forward(self, x):
            self.is_last = getattr(Near, "calls", 0) % 6 == 5
            Near.calls = getattr(Near, "calls", 0) + 1
            return super().forward(x) * (1.001 if self.is_last else 1)
    """
    outcome = compare(*near_tie_sides(tmp_path, body), teacher_forced=forced)
    if forced:
        assert divergence_of(outcome).op == "layers.5.mlp"
    else:
        assert outcome.divergence is None, "given up before: this is what forcing is for"


@pytest.mark.parametrize("forced", [False, True])
def test_a_choice_that_no_logits_explain_is_a_divergence(tmp_path: Path, forced: bool) -> None:
    code = """
        from diptych.reference import moe

        class Bad(moe.MoE):
            def __init__(self, config, hidden_size):
                super().__init__(config, hidden_size)
                right = self.topk

                def third_best(logits, bias):
                    chosen = right(logits, bias)
                    if len(logits) < 9:
                        chosen.topk_ids[0, 1] = logits[0].topk(3).indices[2]
                    return chosen

                self.topk = third_best
    """
    moe = f"{plant(tmp_path, code)}:Bad"
    outcome = compare(
        {"model": "tiny-moe"}, {"model": "tiny-moe", "use": {"moe": moe}}, teacher_forced=forced
    )
    found = divergence_of(outcome)
    assert (found.op, found.kind, found.steps) == ("layers.0.mlp.topk_ids", "experts", (2, 2))
    assert ("A", str(int(found.found.a))) in found.rows()
    assert outcome.near_ties == []


@pytest.mark.parametrize("cached", [pytest.param("a", marks=pytest.mark.full), "b"])
def test_experts_of_tokens_that_one_side_had_cached(tmp_path: Path, cached: str) -> None:
    """A chose them for another request of the same text, and B must take those."""
    a, b = near_tie_sides(tmp_path)
    alone, uncached = {"max_running_requests": 1}, {"disable_radix_cache": True}
    flags = (alone, alone | uncached) if cached == "a" else (alone | uncached, alone)
    outcome = compare(a | flags[0], b | flags[1], teacher_forced=True)
    assert outcome.divergence is None
    assert outcome.finished
    first, second = prompts(engine())[:2]
    num_shared = next(i for i, (x, y) in enumerate(zip(first, second)) if x != y)
    assert outcome.num_one_sided["ba".index(cached)] >= num_shared > 4


def test_a_is_stepped_until_it_has_chosen(tmp_path: Path) -> None:
    a, b = near_tie_sides(tmp_path)
    a, b = a | {"chunked_prefill_size": 9}, b | {"chunked_prefill_size": 30, "page_size": 4}
    outcome = compare(a | {"disable_radix_cache": True}, b, teacher_forced=True)
    assert outcome.divergence is None
    assert outcome.finished
    assert outcome.num_steps[0] > outcome.num_steps[1] > NUM_NEW


GATE = torch.tensor([0.0, 3.0, 2.0, 1.0, -1.0, 0.5, 0.2, 0.1])


def test_experts_part_only_where_each_side_took_its_best() -> None:
    config = engine(model="tiny-moe").model_config
    other = GATE.clone()
    other[3] = 2.5
    best, others = torch.tensor([1, 2]), torch.tensor([1, 3])
    assert experts_part(config, (GATE, other), (best, others)) == "expert [2] or [3]: router logits 1 apart"
    assert experts_part(config, (GATE, GATE), (best, others)) is None
    assert experts_part(config, (other, other), (best, others)) is None
    assert experts_part(config, (None, other), (best, others)) is None
    assert experts_part(engine().model_config, (GATE, other), (best, others)) is None


@pytest.mark.parametrize("norm_topk_prob", [False, True])
@pytest.mark.parametrize("routing", ["softmax", "biased-grouped"])
def test_weights_of_given_experts(routing: str, norm_topk_prob: bool) -> None:
    """As the router weighs those that it chose itself. Rows without given experts stay as they are."""
    config = MoEConfig(8, 2, 16, norm_topk_prob, routing, routed_scaling_factor=1.5)
    logits = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    own = TopK(config)(logits, None)
    forced = take_experts(
        config, logits, own, torch.tensor([[2, 5], [-1, -1], own.topk_ids[2].sort()[0].tolist()])
    )
    assert forced.topk_ids.tolist() == [[2, 5], *own.topk_ids[1:].tolist()]
    assert torch.equal(forced.topk_weights[1:], own.topk_weights[1:])
    # A router for which the two experts are the best: nothing else may change their scores.
    everyone = TopK(replace(config, num_experts_per_tok=8, norm_topk_prob=False))(logits, None)
    scores = dict(zip(everyone.topk_ids[0].tolist(), everyone.topk_weights[0].tolist()))
    total = (scores[2] + scores[5]) / 1.5 if norm_topk_prob else 1.0
    expected = torch.tensor([scores[2], scores[5]]) / total
    torch.testing.assert_close(forced.topk_weights[0], expected)
