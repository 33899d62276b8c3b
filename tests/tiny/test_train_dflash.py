"""The DFlash trainer: what it trains is what the engine's draft model computes, on the target's answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from diptych.shared import registry
from diptych.shared.config import read_draft_config
from diptych.shared.engine.llm import LLM
from diptych.shared.loading.draft_weights import iterate_draft_weights
from diptych.shared.tools.bench.prompt_texts import encode, held_out
from diptych.shared.tools.conformance.contracts.draft_models.forward import DraftSession, new_draft
from diptych.shared.tools.training import own_texts, train_dflash
from diptych.shared.tools.training.head_layers import train_steps
from diptych.shared.tools.training.own_texts import (
    Target,
    Text,
    answered,
    own_questions,
    questions,
    texts_of,
)
from diptych.shared.tools.training.train import TrainOptions
from diptych.shared.tools.training.train_dflash import (
    batches,
    blocks_of,
    chosen_layers,
    chosen_mask,
    loss_of,
    new_head,
    save_head,
)
from diptych.shared.types import SamplingParams

BLOCK_LEN = 5


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(model="tiny-dense", panel="reference", device="cpu", max_total_tokens=2048)


@pytest.fixture(scope="module")
def target(llm: LLM) -> Target:
    config = llm.assembly.model_config
    layers = chosen_layers(config.num_hidden_layers, 3)
    return Target(llm.assembly.parts.model_runner.model, config, layers, chosen_mask(llm))


@pytest.fixture(scope="module")
def texts(llm: LLM, target: Target) -> list[Text]:
    return [text for text in texts_of(target, answered(llm, questions(10), 24)) if text.anchors]


def test_layers_and_mask_are_chosen(target: Target) -> None:
    assert target.layers == (2, 4, 5)
    assert target.mask_id == 1871  # the first id without a token
    with pytest.raises(typer.BadParameter, match="--features is 5; a target of 6 layers has 1 to 4"):
        chosen_layers(6, 5)


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        (("--block-len", 1), "greater than or equal to 2"),
        (("--mask-id", 999999), "--mask-id is 999999; tiny-dense has ids below"),
        (("--features", 99), "--features is 99; a target of"),
        (("--texts", 31), "--texts is 31; of 32 prompts, 30 are trained on"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_generated(
    option: tuple[str, int], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_dflash, "answered", lambda *_: pytest.fail("generates"))
    app = typer.Typer()
    app.command()(train_dflash.main)
    given = ["--out", str(tmp_path), "--num-prompts", "32", "--device", "cpu", *map(str, option)]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 2
    assert problem in " ".join(result.output.replace("│", " ").split())


def test_trained_blocks_are_the_engines(target: Target, texts: list[Text], tmp_path: Path) -> None:
    """The same blocks, each alone, by the engine's draft model over a KV pool, from the saved head."""
    head = new_head(target, 2, 0, BLOCK_LEN, seed=3)
    torch.nn.init.normal_(head.norm.weight, 1.0, 0.3)
    torch.nn.init.normal_(head.hidden_norm.weight, 1.0, 0.3)
    save_head(head, target, tmp_path)
    head.load_state_dict({name: each.to(torch.bfloat16) for name, each in head.state_dict().items()})
    draft = new_draft(registry.load("draft_models", "reference"), read_draft_config(tmp_path, target.config))
    draft.load_weights(iterate_draft_weights(tmp_path))
    draft.share(target.model)
    some = texts[:3]
    anchors = [[text.anchors[0], text.anchors[-1]] for text in some]
    blocks = blocks_of(some, anchors, BLOCK_LEN, target.mask_id)
    said, shown = blocks.target_ids[..., 1:], target.model.compute_logits(blocks.last.to(target.dtype))
    assert torch.equal(shown.argmax(-1)[said >= 0], said[said >= 0])  # the texts are greedy
    with torch.no_grad():
        hidden = head(target.model.embed(blocks.input_ids), blocks.anchors, blocks.features)
    assert blocks.target_ids[0, 1].tolist()[2:] == [-1] * 3  # behind the end of the text
    for row, text in enumerate(some):
        for column, anchor in enumerate(anchors[row]):
            session = DraftSession(draft.eval())
            session.store(text.features[:anchor].float())
            expected = session.fill_in(int(text.token_ids[anchor]), BLOCK_LEN - 1)
            # Both in float32, summed in another order, through two layers.
            torch.testing.assert_close(hidden[row, column], expected, atol=2e-4, rtol=1e-4)


def test_training_lowers_the_loss(target: Target, texts: list[Text]) -> None:
    head = new_head(target, 1, 64, BLOCK_LEN, seed=0)
    options = TrainOptions(num_steps=12, learning_rate=3e-3)
    steps = batches(texts, 12, 4, 3, BLOCK_LEN, target.mask_id, seed=1)
    losses = [float(loss) for loss in train_steps(head, (loss_of(head, target, s) for s in steps), options)]
    assert losses[-1] < losses[0] - 1.0
    late = TrainOptions(num_steps=12, seconds=1e-9)
    steps = batches(texts, 12, 4, 3, BLOCK_LEN, target.mask_id, seed=1)
    assert len(list(train_steps(head, (loss_of(head, target, s) for s in steps), late))) == 1


def test_anchors_are_tokens_of_answers(texts: list[Text]) -> None:
    for blocks in batches(texts, 5, 3, 8, BLOCK_LEN, 1871, seed=2):
        for row, anchors in enumerate(blocks.anchors.tolist()):
            newest = blocks.input_ids[row, :, 0]
            text = next(t for t in texts if len(t.token_ids) > max(anchors) and torch.equal(
                t.token_ids[anchors], newest))  # fmt: skip
            assert set(anchors) <= set(text.anchors)


def test_every_turn_of_the_assistant_is_trained_on(llm: LLM) -> None:
    chat = [
        {"role": "user", "content": "Where did Mia go?"},
        {"role": "assistant", "content": "Mia went to the harbour."},
        {"role": "user", "content": "What is 2 + 3?"},
    ]
    ((ids, is_said),) = answered(llm, [chat], 3)
    said = llm.tokenizer.decode([token for token, each in zip(ids[:-3], is_said) if each])
    assert said == "Mia went to the harbour.<|im_end|>"
    assert is_said[-3:] == [True] * 3


def test_whole_texts_give_the_states_of_the_reference(
    target: Target, texts: list[Text], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [(text.token_ids.tolist(), text.is_said.tolist()) for text in texts]
    monkeypatch.setattr(own_texts, "attention_component", lambda _: "other")
    for text, expected in zip(texts, texts_of(target, answers)):
        # Rounded to bfloat16.
        torch.testing.assert_close(text.features.float(), expected.features.float(), atol=0.02, rtol=0.02)
        torch.testing.assert_close(text.last.float(), expected.last.float(), atol=0.02, rtol=0.02)


def test_a_model_asks_itself_and_knows_both_answers(llm: LLM) -> None:
    asked = own_questions(llm, 12)
    assert 1 <= len({str(each) for each in asked}) == len(asked) <= 12
    ((_, said), _) = answered(llm, asked[:1] * 2, 4, temperature=5.0)
    assert sum(said) >= 1


@pytest.mark.full
def test_a_trained_head_leaves_texts_alone(llm: LLM, tmp_path: Path) -> None:
    train_dflash.main(
        out=tmp_path, target="tiny-dense", prompts=None, num_prompts=96, max_new_tokens=48, steps=120,
        texts=8, blocks=4, block_len=6, layers=1, intermediate_size=0, features=3, mask_id=-1,
        learning_rate=3e-3, seed=0, device="cpu",
    )  # fmt: skip
    right = json.loads((tmp_path / "training.json").read_text())["held_out"]["right_by_place"]
    assert len(right) == 5
    assert right[0] > 0.1  # 0.26 when it was written; chance is 1 of 1,872
    drafts = {"speculative": "dflash", "speculative_draft_model": str(tmp_path)}
    greedy = SamplingParams(temperature=0.0, max_new_tokens=24)
    prompts = encode(llm, held_out(6))
    expected = [output.output_ids for output in llm.generate(prompts, greedy)]
    for panel in ("reference", "optimized"):
        other = LLM(model="tiny-dense", panel=panel, device="cpu", max_total_tokens=2048, **drafts)
        assert [output.output_ids for output in other.generate(prompts, greedy)] == expected
