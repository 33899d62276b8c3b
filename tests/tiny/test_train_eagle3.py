"""The EAGLE-3 trainer: what it unrolls is what the engine's draft model computes while drafting."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from diptych.shared import registry
from diptych.shared.config import read_draft_config
from diptych.shared.engine.llm import LLM
from diptych.shared.loading.draft_weights import iterate_draft_weights
from diptych.shared.tools.conformance.contracts.draft_models.forward import DraftSession, new_draft
from diptych.shared.tools.training.eagle3_head import find_slots
from diptych.shared.tools.training.own_texts import Target, Text, answered, questions, texts_of
from diptych.shared.tools.training.train import TrainOptions
from diptych.shared.tools.training.train_eagle3 import (
    NUM_STEPS,
    lesson_of,
    loss_of,
    new_head,
    save_head,
    train_on_texts,
)


@pytest.fixture(scope="module")
def target() -> Target:
    llm = LLM(model="tiny-dense", panel="reference", device="cpu", max_total_tokens=2048)
    target = Target(llm.assembly.parts.model_runner.model, llm.assembly.model_config, (2, 4, 5), 0)
    answers.extend(answered(llm, questions(6), 16))
    return target


answers: list[tuple[list[int], list[bool]]] = []


@pytest.fixture(scope="module")
def texts(target: Target) -> list[Text]:
    return texts_of(target, answers)


def test_slots_are_found_in_order_and_know_their_neighbours() -> None:
    is_slot = torch.tensor([[0, 1, 1, 0, 1, 0], [0, 0, 0, 1, 0, 0]], dtype=torch.bool)
    slots = find_slots(is_slot)
    assert slots.indices[0].tolist() == [1, 2, 4]
    assert slots.indices[1, 0] == 3
    assert slots.is_slot.tolist() == [[True, True, True], [True, False, False]]
    assert slots.follows[0].tolist() == [False, True, False]


def test_unrolled_training_is_drafting_step_by_step(
    target: Target, texts: list[Text], tmp_path: Path
) -> None:
    """Each slot's branch once more, one token at a time, by the engine's own draft model with a KV pool."""
    head = new_head(target, seed=3)
    torch.nn.init.normal_(head.norm.weight, 1.0, 0.3)
    torch.nn.init.normal_(head.midlayer.hidden_norm.weight, 1.0, 0.3)
    save_head(head, target, torch.arange(target.config.vocab_size), tmp_path)
    head.load_state_dict({name: each.to(torch.bfloat16) for name, each in head.state_dict().items()})
    draft = new_draft(registry.load("draft_models", "reference"), read_draft_config(tmp_path, target.config))
    draft.load_weights(iterate_draft_weights(tmp_path))
    draft.share(target.model)
    assert draft.config.target_layers == target.layers
    text = max(texts, key=lambda text: len(text.anchors))
    lesson = lesson_of(target, [text])
    said = text.token_ids[lesson.slots.indices[0] + 2]
    assert torch.equal(lesson.target_logits[0].argmax(-1), said)  # the text is greedy
    with torch.no_grad():
        drafted = head(lesson.embeds, lesson.features, lesson.slots, NUM_STEPS)
    columns = drafted[-1][1][0].nonzero().flatten().tolist()
    assert len(columns) > 5
    for column in columns[:: len(columns) // 5]:  # the column of the last step's slot
        first = int(lesson.slots.indices[0, column]) - (NUM_STEPS - 1)
        session = DraftSession(draft.eval(), max_len=1024)
        output = session.draft(text.token_ids[1 : first + 2].tolist(), lesson.features[0, : first + 1])
        for step, (log_probs, is_drafted) in enumerate(drafted):
            if step > 0:
                next_id = int(text.token_ids[first + step + 1])
                output = session.draft([next_id], output.next_hidden_states[-1:])
            expected = draft.compute_logits(output.hidden_states[-1:]).log_softmax(-1)[0]
            at = column - (NUM_STEPS - 1) + step
            assert is_drafted[0, at]
            found = log_probs[int(is_drafted[0, :at].sum())]
            # Both in float32, summed in another order, through at most four passes of one layer.
            torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


def test_drafted_is_what_the_assistant_says_after_its_first_token(target: Target, texts: list[Text]) -> None:
    slots = lesson_of(target, texts).slots
    for row, text in enumerate(texts):
        expected = [anchor - 1 for anchor in text.anchors]
        assert slots.indices[row][slots.is_slot[row]].tolist() == expected


def test_a_head_learns_and_is_cut(target: Target, texts: list[Text], tmp_path: Path) -> None:
    options = TrainOptions(num_steps=6, num_rows=2, learning_rate=3e-3)
    train_on_texts(target, texts[2:], texts[:2], options, tmp_path, 300)
    record = json.loads((tmp_path / "training.json").read_text())
    assert record["final_loss"] < 7.0
    weights = dict(iterate_draft_weights(tmp_path))
    assert weights["lm_head.weight"].shape == (300, 256)
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16, torch.int64, torch.bool}
    drafting = {"speculative": "eagle3", "speculative_draft_model": str(tmp_path)}
    LLM(model="tiny-dense", device="cpu", panel="reference", max_total_tokens=512, **drafting)


def test_answers_of_two_and_three_tokens_give_a_loss(target: Target, texts: list[Text]) -> None:
    """Nothing is drafted behind them."""
    marks = [torch.zeros_like(text.is_said) for text in texts]
    for mark, num in zip(marks, (2, 3)):
        mark[-num - 4 : -4] = True
    short = [text._replace(is_said=mark) for text, mark in zip(texts, marks)][:2]
    loss, right = loss_of(new_head(target, seed=0), lesson_of(target, short))
    assert loss.isfinite()
    assert right.isnan().tolist() == [False, False, True, True]


def test_each_question_is_asked_once() -> None:
    asked = [json.dumps(each) for each in questions(600)]
    assert len(asked) == len({*asked}) >= 400
