"""The built-in EAGLE-3 head is what its card says: in the public format, trained, and accepted that often."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from diptych.shared.config import read_config, read_draft_config
from diptych.shared.loading.draft_weights import draft_shapes, iterate_draft_weights
from diptych.shared.loading.model_path import ASSETS, builtin_models
from diptych.shared.tools.training import draft_vocabulary
from diptych.shared.tools.training.acceptance import measure_acceptance, save_card
from diptych.shared.tools.training.draft_vocabulary import cut
from diptych.shared.tools.training.learn_tokenizer import VOCAB_SIZE
from diptych.shared.tools.training.tiny_models import IM_END_ID
from diptych.shared.types import DraftShape

FOLDER = ASSETS / "tiny-dense-eagle3"
SHAPE = DraftShape(5, 4, 16)


def record() -> dict:
    return json.loads((FOLDER / "training.json").read_text())


def test_it_is_in_the_public_format() -> None:
    config = read_draft_config(FOLDER, read_config(ASSETS / "tiny-dense"))
    assert (config.draft_format, config.target_layers) == ("eagle3", (2, 4, 5))
    weights = dict(iterate_draft_weights(FOLDER))
    expected = {**draft_shapes(config), "lm_head.weight": (1088, 256), "d2t": (1088,), "t2d": (1920,)}
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == expected
    floats = [tensor for tensor in weights.values() if tensor.is_floating_point()]
    assert {tensor.dtype for tensor in floats} == {torch.bfloat16}
    assert sum(tensor.numel() for tensor in floats) == record()["num_parameters"]


def test_its_vocabulary_is_a_part_of_the_targets() -> None:
    """d2t leads to tokens in order; the one that ends an answer is among them."""
    weights = dict(iterate_draft_weights(FOLDER))
    token_ids = torch.arange(1088) + weights["d2t"]
    assert token_ids.tolist() == sorted(set(token_ids.tolist()))
    assert token_ids.max() < VOCAB_SIZE  # no row of the embedding without a token
    recorded = record()["draft_vocabulary"]
    assert recorded["size"] == len(token_ids)
    assert IM_END_ID in token_ids
    # What the record says of the uncut head: at most a fortieth of its accepted length is lost.
    for shape, before in recorded["acceptance_before"].items():
        assert record()["acceptance"][shape]["with_bonus"] >= 0.975 * before["with_bonus"]


def test_a_second_cut_keeps_the_record_of_the_whole_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(FOLDER, tmp_path / "head"))
    kept = torch.arange(1088) + dict(iterate_draft_weights(FOLDER))["d2t"]
    counts = torch.zeros(1920, dtype=torch.long).index_fill(0, kept[:700], 1)
    monkeypatch.setattr(draft_vocabulary, "count_said", lambda _: counts)
    for size, message in ((0, "--size is 0"), (1921, "from 1 to 1920"), (1920, "has no row")):
        with pytest.raises(ValueError, match=message):
            draft_vocabulary.main(folder, size)
    assert all((folder / file.name).read_bytes() == file.read_bytes() for file in FOLDER.iterdir())
    for size in (700, 700):
        draft_vocabulary.main(folder, size)
    written = json.loads((folder / "training.json").read_text())
    before = record()["draft_vocabulary"]["acceptance_before"]
    assert written["draft_vocabulary"]["acceptance_before"] == before
    assert (written["draft_vocabulary"]["size"], "acceptance" in written) == (700, False)
    weights = dict(iterate_draft_weights(folder))
    assert torch.equal(torch.arange(700) + weights["d2t"], kept[:700])


def test_cutting_keeps_the_rows_of_the_tokens() -> None:
    """A cut of the cut: rows follow their tokens through d2t, and a token without a row is refused."""
    weights = dict(iterate_draft_weights(FOLDER))
    token_ids = (torch.arange(1088) + weights["d2t"])[::7]
    smaller = cut(weights, token_ids)
    assert torch.equal(smaller["lm_head.weight"], weights["lm_head.weight"][::7])
    assert torch.equal(torch.arange(len(token_ids)) + smaller["d2t"], token_ids)
    assert torch.equal(smaller["t2d"].nonzero()[:, 0], token_ids)
    with pytest.raises(ValueError, match="the head has no row for the tokens"):
        cut(smaller, token_ids + 1)


def test_it_is_no_model_of_its_own() -> None:
    assert builtin_models() == ["tiny-dense", "tiny-hybrid", "tiny-moe"]


def test_card_and_record_agree(tmp_path: Path) -> None:
    for name in ("training.json", "config.json"):
        (tmp_path / name).write_text((FOLDER / name).read_text())
    save_card(tmp_path)
    assert (tmp_path / "README.md").read_text() == (FOLDER / "README.md").read_text()
    assert "--out shared/assets/tiny-dense-eagle3" in record()["command"]


def test_later_steps_are_guessed_nearly_as_well_as_the_first() -> None:
    """What training-time test is for: without it the second step, the first from own states, falls apart."""
    top1 = [step["top1"] for step in record()["held_out"]["steps"]]
    assert len(top1) == 5
    assert min(top1[1:4]) > 0.8 * top1[0]


@pytest.mark.full
def test_it_is_accepted_as_often_as_the_record_says() -> None:
    recorded = record()["acceptance"]["5/4/16"]
    assert recorded["with_bonus"] >= 3.0
    stats = measure_acceptance(str(FOLDER), SHAPE, 20, panel="reference", device="cpu")
    # Twenty questions, one of each kind, against the record's more: their answers are of other lengths.
    assert stats.acceptance_length_with_bonus >= 3.0
