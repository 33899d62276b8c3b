import json
import time
from pathlib import Path

import pytest
import torch

from diptych.shared.tools.training.checkpoint import save_checkpoint, save_record
from diptych.shared.tools.training.learn_tokenizer import VOCAB_SIZE
from diptych.shared.tools.training.packing import PackedBatches, batch_loader
from diptych.shared.tools.training.tiny_models import PADDED_VOCAB_SIZE, model_config
from diptych.shared.tools.training.train import (
    MasterAdamW,
    TrainOptions,
    load_balancing_loss,
    load_weights,
    new_model,
    padding_loss,
    train_steps,
)

TOKENIZER_JSON = Path(__file__).parents[2] / "shared" / "assets" / "tiny-dense" / "tokenizer.json"
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
SMALLER_MLP = {
    "dense": {"intermediate_size": 96},
    "moe": {"moe_intermediate_size": 32, "num_experts": 4},
    "hybrid": {"intermediate_size": 96, "layer_types": ["linear_attention", "full_attention"]},
}


@pytest.mark.parametrize("name", ["dense", "moe", "hybrid"])
def test_a_dozen_steps_lower_the_loss(name: str) -> None:
    options = TrainOptions(num_steps=12, num_rows=4, row_len=256, learning_rate=1e-2)
    model = new_model(model_config(name, **SMALL, **SMALLER_MLP[name]), "cpu", seed=0)
    data = PackedBatches(TOKENIZER_JSON.read_text(), 0, options.num_steps, options.num_rows, options.row_len)
    losses = [loss.item() for loss in train_steps(model, batch_loader(data, num_workers=0), options)]
    # It starts at ln(1920) = 7.6, the loss of knowing nothing, and drops by two within the warm-up.
    assert len(losses) == 12
    assert 7.0 < losses[0] < 8.5
    assert losses[-1] < losses[0] - 2.0


def test_learning_rate_warms_up_and_ends_near_zero() -> None:
    options = TrainOptions(num_steps=100, learning_rate=1.0)
    rates = [options.learning_rate_at(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == 1.0
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] < 1e-3


def test_a_bound_in_seconds_ends_the_training_and_the_learning_rate() -> None:
    options = TrainOptions(num_steps=1000, num_rows=1, row_len=32, learning_rate=1.0, seconds=3.0)
    assert [options.learning_rate_at(step, 0.5) for step in (49, 100, 500)] == pytest.approx([0.5, 0.5, 0.5])
    assert options.learning_rate_at(100, 1.0) == 0.0
    model = new_model(model_config("hybrid", **SMALL, **SMALLER_MLP["hybrid"]), "cpu", seed=0)
    data = PackedBatches(TOKENIZER_JSON.read_text(), 0, options.num_steps, options.num_rows, options.row_len)
    begin, num_steps = time.monotonic(), len(list(train_steps(model, [data[0]] * 1000, options)))
    # The last step may begin before the end.
    assert 3.0 <= time.monotonic() - begin < 20.0
    assert 1 < num_steps < 1000


def test_a_training_goes_on_from_saved_weights(tmp_path: Path) -> None:
    """Weights rounded to bfloat16, tied; the card names the commands of both trainings."""
    config = model_config("hybrid", **SMALL, **SMALLER_MLP["hybrid"])
    saved, other = (new_model(config, "cpu", seed=seed) for seed in (0, 1))
    save_checkpoint(saved, tmp_path)
    other.load_state_dict(load_weights(tmp_path))
    expected = {name: weight.float() for name, weight in saved.state_dict().items()}
    torch.testing.assert_close(dict(other.state_dict()), expected, rtol=0.0, atol=0.0)
    assert other.lm_head.weight is other.model.embed_tokens.weight
    record = json.loads((TOKENIZER_JSON.parents[1] / "tiny-hybrid" / "training.json").read_text())
    save_record(tmp_path, {**record, "command": "the second", "started_from": record})
    card = (tmp_path / "README.md").read_text()
    assert card.index(record["command"]) < card.index("the second")
    assert f"in {2 * record['seconds']:.0f} s ({2 * record['num_tokens'] / 1e6:.0f} M tokens)" in card


def test_updates_below_bfloat16_resolution_add_up() -> None:
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    model.weight.data.fill_(1.0)
    optimizer = MasterAdamW(model, TrainOptions(num_steps=1, weight_decay=0.0))
    for _ in range(40):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step(learning_rate=1e-3)
    # bfloat16 has steps of 1/256 below 1: a single update of 1e-3 would be rounded away each time.
    assert model.weight.item() == pytest.approx(1 - 40e-3, abs=1 / 256)


def test_padding_loss_vanishes_when_padded_ids_are_improbable() -> None:
    logits = torch.zeros(3, PADDED_VOCAB_SIZE)
    level = padding_loss(logits).item()
    logits[:, VOCAB_SIZE:] = -40.0
    assert padding_loss(logits).item() < 1e-6 < 0.01 < level


def test_load_balancing_loss_is_one_for_equal_shares() -> None:
    even = torch.eye(4).repeat(8, 1) * 20
    assert load_balancing_loss(even, top_k=1).item() == pytest.approx(1.0, abs=1e-3)
    one_for_all = torch.tensor([[20.0, 0, 0, 0]]).repeat(32, 1)
    assert load_balancing_loss(one_for_all, top_k=1).item() == pytest.approx(4.0, abs=1e-3)


def test_unknown_model_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="dense, moe, hybrid"):
        model_config("large")
