"""The EAGLE-3 trainer: what it unrolls is what the engine's draft model computes while drafting."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from diptych.reference.models import model_class
from diptych.reference.moe import MoE
from diptych.reference.speculative.draft_models.eagle3 import Eagle3Model
from diptych.shared import registry
from diptych.shared.config import read_config, read_draft_config
from diptych.shared.interfaces import CausalLM
from diptych.shared.loading.draft_weights import iterate_draft_weights
from diptych.shared.loading.weights import iterate_weights
from diptych.shared.tools.conformance.contracts.draft_models.forward import DraftSession
from diptych.shared.tools.conformance.oracles.model_session import ModelSession
from diptych.shared.tools.training.eagle3_head import Eagle3Head, find_slots
from diptych.shared.tools.training.packing import Batch, PackedBatches
from diptych.shared.tools.training.train import TrainOptions
from diptych.shared.tools.training.train_eagle3 import (
    TARGET,
    TARGET_LAYERS,
    evaluate,
    held_out_batch,
    lesson_of,
    new_head,
    save_head,
    train_steps,
)

NUM_STEPS = 4


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    return model.requires_grad_(False)


def load_target() -> CausalLM:
    config = read_config(TARGET)
    model = model_class(config.architecture)(config, registry.load("layers", "reference"), MoE).float()
    model.load_weights(iterate_weights(TARGET, config))
    return model


def load_draft(folder: Path, target: CausalLM) -> Eagle3Model:
    config = read_draft_config(folder, target.config)
    draft = Eagle3Model(config, registry.load("layers", "reference"), MoE).float()
    draft.load_weights(iterate_draft_weights(folder))
    draft.share(target)
    return draft


def batches(num_batches: int, num_rows: int = 2, row_len: int = 160) -> list[Batch]:
    dataset = PackedBatches((TARGET / "tokenizer.json").read_text(), 5, num_batches, num_rows, row_len)
    return [dataset[i] for i in range(num_batches)]


def test_slots_are_found_in_order_and_know_their_neighbours() -> None:
    is_slot = torch.tensor([[0, 1, 1, 0, 1, 0], [0, 0, 0, 1, 0, 0]], dtype=torch.bool)
    slots = find_slots(is_slot)
    assert slots.indices[0].tolist() == [1, 2, 4]
    assert slots.indices[1, 0] == 3
    assert slots.is_slot.tolist() == [[True, True, True], [True, False, False]]
    assert slots.follows[0].tolist() == [False, True, False]


def test_unrolled_training_is_drafting_step_by_step(target: PreTrainedModel, tmp_path: Path) -> None:
    """Each slot's branch once more, one token at a time, by the engine's own draft model with a KV pool."""
    head = new_head(target, seed=3)
    torch.nn.init.normal_(head.norm.weight, 1.0, 0.3)
    torch.nn.init.normal_(head.midlayer.hidden_norm.weight, 1.0, 0.3)
    save_head(head, target, tmp_path)
    head.load_state_dict({name: each.to(torch.bfloat16) for name, each in head.state_dict().items()})
    engine_target = load_target()
    draft = load_draft(tmp_path, engine_target)
    assert draft.config.target_layers == TARGET_LAYERS

    (batch,) = batches(1, num_rows=1)
    lesson = lesson_of(target, batch)
    with torch.no_grad():
        drafted = head(
            lesson.embeds, lesson.features, batch.positions, batch.document_ids, lesson.slots, NUM_STEPS
        )
    assert drafted[-1][1].sum() > 10
    columns = drafted[-1][1][0].nonzero().flatten().tolist()
    num_compared = 0
    for column in columns[:: len(columns) // 5]:  # the column of the last step's slot
        last = int(lesson.slots.indices[0, column])
        start = last - int(batch.positions[0, last])
        first = last - (NUM_STEPS - 1)
        session = DraftSession(draft, max_len=256)
        ids = batch.input_ids[0, start + 1 : first + 2].tolist()
        output = session.draft(ids, lesson.features[0, start : first + 1])
        for step, (log_probs, is_drafted) in enumerate(drafted):
            if step > 0:
                next_id = int(batch.input_ids[0, first + step + 1])
                output = session.draft([next_id], output.next_hidden_states[-1:])
            expected = draft.compute_logits(output.hidden_states[-1:]).log_softmax(-1)[0]
            at = column - (NUM_STEPS - 1) + step
            assert is_drafted[0, at]
            found = log_probs[int(is_drafted[0, :at].sum())]
            # Both in float32, summed in another order, through at most four passes of one layer.
            torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
            num_compared += 1
    assert num_compared >= 5 * NUM_STEPS


def test_features_are_the_engines_hidden_states(target: PreTrainedModel) -> None:
    (batch,) = batches(1, num_rows=1)
    lesson = lesson_of(target, batch)
    num_tokens = int((batch.document_ids[0] == 0).sum())
    session = ModelSession(load_target())
    step = session.forward_batch({0: batch.input_ids[0, :num_tokens].tolist()})
    captured = dict.fromkeys(TARGET_LAYERS, torch.empty(0))
    session.hidden_states(step, captured)
    features = torch.cat([captured[layer_id] for layer_id in TARGET_LAYERS], dim=-1)
    torch.testing.assert_close(lesson.features[0, :num_tokens], features, atol=1e-3, rtol=1e-3)


def test_drafted_is_what_the_assistant_says_after_its_first_token(target: PreTrainedModel) -> None:
    (batch,) = batches(1)
    slots = lesson_of(target, batch).slots
    for row in range(2):
        said = {i + 1 for i in range(159) if batch.weights[row, i] == 1.0}
        expected = [i for i in range(158) if {i + 1, i + 2} <= said]
        assert slots.indices[row][slots.is_slot[row]].tolist() == expected
    assert bool((slots.is_slot.sum(1) > 20).all())


@pytest.mark.full
def test_training_lowers_the_loss_at_every_depth(target: PreTrainedModel) -> None:
    head, held_out = new_head(target, seed=0), held_out_batch(TARGET, 4, 256)
    before = evaluate(head, target, held_out, NUM_STEPS)
    options = TrainOptions(num_steps=10, num_rows=2, row_len=160, learning_rate=3e-3)
    losses = [float(loss) for loss in train_steps(head, target, batches(10), options, num_draft_steps=3)]
    assert losses[-1] < losses[0] - 1.0
    after = evaluate(head, target, held_out, NUM_STEPS)
    assert all(b["loss"] < a["loss"] - 1.0 for a, b in zip(before, after))


def test_checkpoint_is_in_the_public_format(target: PreTrainedModel, tmp_path: Path) -> None:
    head = new_head(target, seed=0)
    save_head(head, target, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [n - 1 for n in TARGET_LAYERS]
    names = dict(iterate_draft_weights(tmp_path))
    assert {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"} <= set(names)
    assert names["midlayer.self_attn.q_proj.weight"].shape == (256, 512)
    assert {tensor.dtype for tensor in names.values()} == {torch.bfloat16, torch.int64, torch.bool}
    assert isinstance(head, Eagle3Head)
