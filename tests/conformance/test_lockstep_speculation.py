"""Lockstep where a side speculates: of what it verifies, only what it keeps is a token of the request."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.shared.tools.conformance.diff.recorder import Recorder
from diptych.shared.types import ForwardMode, SamplingParams

from .lockstep_harness import compare, divergence_of, engine, num_tokens, plant, prompts

NGRAM = {"speculative": "ngram"}
EAGLE = {"speculative": "eagle3", "speculative_draft_model": "tiny-dense-eagle3"}
AHEAD = {**EAGLE, "use": {"scheduler": "optimized", "memory_pool": "optimized"}}
"""A round is launched before the kept tokens of the previous one are known."""


SIDES = {
    "ngram": ({}, NGRAM),
    "eagle3": ({}, EAGLE),
    "the-other-side": (EAGLE, {}),
    "both": (NGRAM, EAGLE),
    "ahead": ({}, AHEAD),
}


@pytest.mark.parametrize("name", SIDES)
@pytest.mark.parametrize("teacher_forced", [False, True])
def test_speculation_is_no_divergence(name: str, teacher_forced: bool) -> None:
    outcome = compare(*SIDES[name], teacher_forced=teacher_forced)
    assert outcome.divergence is None, outcome.divergence
    assert outcome.finished
    assert outcome.near_ties == []
    # A side that speculates may go on behind a request's last token; what both compute is compared.
    assert outcome.num_tokens >= num_tokens(engine())


def test_drafts_that_are_not_accepted_have_no_key() -> None:
    llm = engine(**EAGLE)
    recorder = Recorder(llm)
    collectors = [
        llm.submit(prompt, SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True))[0]
        for prompt in prompts(llm)
    ]
    while llm.step():
        pass
    verified = [step for step in recorder.take() if step.forward_mode is ForwardMode.TARGET_VERIFY]
    texts = {rid: req.origin_input_ids + req.output_ids for rid, req in recorder.reqs.items()}
    recorder.close()
    assert all(collector.is_finished for collector in collectors)
    assert "accept" not in vars(llm.assembly.parts.draft_tree)
    num_kept = num_dropped = 0
    for step in verified:
        assert step.heads.keys == step.tokens.keys
        for key, token_id in zip(step.tokens.keys, step.tokens.tensors["input_ids"].tolist()):
            num_dropped += key is None
            if key is not None and key[1] < len(texts[key[0]]):
                num_kept += 1
                assert texts[key[0]][key[1]] == token_id
    assert num_kept > len(verified)  # more than the roots: drafts were accepted
    assert num_dropped > 0


ATTENTION = """
    from diptych.reference.attention import TorchAttention
    from diptych.shared.types import ForwardMode

    class Bad(TorchAttention):
        def plan(self, forward_batch):
            self.verifies = forward_batch.forward_mode is ForwardMode.TARGET_VERIFY
            return super().plan(forward_batch)

        def run(self, q, layer, plan, **kv):
            output = super().run(q, layer, plan, **kv)
            if layer.layer_id == 3 and self.verifies:
                output[1::2] *= 1.01
            return output
"""


def test_a_difference_at_accepted_drafts_is_found(tmp_path: Path) -> None:
    bad = {**EAGLE, "use": {"attention": f"{plant(tmp_path, ATTENTION)}:Bad"}}
    found = divergence_of(compare(b=bad))
    assert (found.op, found.forward_mode) == ("layers.3.self_attn.attention", "TARGET_VERIFY")
    assert found.position >= found.num_prompt_tokens
