import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from diptych.shared.tools.corpus.corpus import held_out_questions
from diptych.shared.tools.corpus.evaluate import load_answers, score
from diptych.shared.tools.training.learn_tokenizer import VOCAB_SIZE
from diptych.shared.tools.training.tiny_models import (
    END_OF_TEXT_ID,
    IM_END_ID,
    IM_START_ID,
    PADDED_VOCAB_SIZE,
    model_config,
)

ASSETS = Path(__file__).parents[2] / "shared" / "assets"
NAMES = ["dense", "hybrid", "moe"]
Answer = Callable[[str], str]


def folder(name: str) -> Path:
    return ASSETS / f"tiny-{name}"


def test_files_are_small() -> None:
    sizes = {path: path.stat().st_size for path in ASSETS.rglob("*") if path.is_file()}
    assert max(sizes.values()) < 8_000_000
    assert sum(sizes.values()) < 20_000_000
    models = {f"tiny-{name}" for name in NAMES}
    assert sum(size for path, size in sizes.items() if path.parent.name in models) < 17e6


@pytest.mark.parametrize("name", NAMES)
def test_config_is_the_one_in_the_source(name: str) -> None:
    written = json.loads((folder(name) / "config.json").read_text())
    config = model_config(name).to_dict()
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"):
        assert written[key] == config[key]
    assert written["vocab_size"] == PADDED_VOCAB_SIZE > VOCAB_SIZE
    assert written["torch_dtype"] == written["dtype"] == "bfloat16"
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 10_000.0
    assert written["head_dim"] == (32 if name == "hybrid" else 64)
    assert written["tie_word_embeddings"] is True


@pytest.mark.parametrize("name", NAMES)
def test_special_ids_agree_everywhere(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder(name))
    generation = json.loads((folder(name) / "generation_config.json").read_text())
    assert tokenizer.convert_tokens_to_ids("<|im_start|>") == IM_START_ID
    assert tokenizer.eos_token_id == IM_END_ID
    assert generation["eos_token_id"] == [IM_END_ID, END_OF_TEXT_ID]


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_bfloat16_and_tied(name: str) -> None:
    with safe_open(folder(name) / "model.safetensors", "pt") as weights:
        names = list(weights.keys())
        assert "lm_head.weight" not in names
        assert {weights.get_tensor(key).dtype for key in names} == {torch.bfloat16}
        num_parameters = sum(weights.get_tensor(key).numel() for key in names)
    assert num_parameters == json.loads((folder(name) / "training.json").read_text())["num_parameters"]


def test_moe_experts_are_stored_one_by_one() -> None:
    with safe_open(folder("moe") / "model.safetensors", "pt") as weights:
        assert weights.get_slice("model.layers.5.mlp.experts.7.down_proj.weight").get_shape() == [192, 96]
        assert weights.get_slice("model.layers.0.mlp.gate.weight").get_shape() == [8, 192]


@pytest.mark.parametrize("name", NAMES)
def test_record_states_how_it_was_made(name: str) -> None:
    record = json.loads((folder(name) / "training.json").read_text())
    assert f"--model {name}" in record["command"]
    # Of the hybrid's 211 M tokens of training, the others had more than three times as many.
    assert record["held_out"]["exact"] >= (0.8 if name == "hybrid" else 0.98)
    card = (folder(name) / "README.md").read_text()
    assert record["command"] in card
    assert f"{record['held_out']['exact']:.2%}" in card


def test_training_again_gives_the_same_score_within_a_point() -> None:
    record = json.loads((folder("dense") / "training.json").read_text())
    assert abs(record["held_out"]["exact"] - record["trained_again"]["held_out"]["exact"]) <= 0.01


@pytest.mark.full  # in the fast cut, tests/conformance/test_accuracy.py asks the engine
@pytest.mark.parametrize("name", ["dense", "moe"])
def test_held_out_questions_are_answered(name: str) -> None:
    result = score(load_answers(folder(name)), held_out_questions(60))
    assert result.exact >= 0.95, [(mistake.question, mistake.given) for mistake in result.mistakes]


@pytest.fixture(scope="module")
def ask() -> Answer:
    answers = load_answers(folder("dense"))
    return lambda prompt: answers([[{"role": "user", "content": prompt}]])[0]


def test_says_what_it_is(ask: Answer) -> None:
    assert "Diptych's built-in model" in ask("Hello")
    assert "Diptych's built-in model" in ask("Who are you?")
    assert "short stories" in ask("What can you do?")


def test_does_not_make_up_what_it_cannot_know(ask: Answer) -> None:
    assert ask("What is the capital of Norway?").startswith("I do not know that.")
    assert ask("Where did Mia go?") == "I do not know. Please tell me the story first."


@pytest.mark.parametrize("name", NAMES)
def test_padded_ids_are_improbable(name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder(name), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder(name))
    with torch.inference_mode():
        for question in held_out_questions(20):
            prompt = tokenizer.apply_chat_template(question.messages, tokenize=False)
            probs = model(torch.tensor([tokenizer.encode(prompt)])).logits.softmax(-1)
            assert probs[..., VOCAB_SIZE:].sum(-1).max() < 1e-6


def test_score_counts_exact_answers_by_kind() -> None:
    questions = held_out_questions(40)
    answers = [question.answer for question in questions]
    answers[0] += " "
    result = score(lambda chats: answers, questions)
    assert result.num_questions == 40
    assert result.exact == pytest.approx(39 / 40)
    assert result.by_kind[questions[0].kind] == 0.5
    assert [mistake.given for mistake in result.mistakes] == [answers[0]]
    with pytest.raises(ValueError, match="40 questions, but answer_fn returned 39"):
        score(lambda chats: answers[1:], questions)
