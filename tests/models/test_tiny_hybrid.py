"""The built-in hybrid model answers, in both panels with transformers' text, cold and from the cache."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from model_harness import build_model, greedy, hf_greedy
from transformers import AutoModelForCausalLM

from diptych.shared.config import read_config
from diptych.shared.engine.llm import LLM
from diptych.shared.loading.model_path import ASSETS
from diptych.shared.loading.weights import iterate_weights
from diptych.shared.tools.corpus.corpus import held_out_questions
from diptych.shared.tools.corpus.evaluate import engine_answers, score
from diptych.shared.tools.training.tiny_models import model_config

FOLDER = ASSETS / "tiny-hybrid"
TOLERANCE = 3e-3
"""transformers computes prompts in chunks of 64, also in float32 (see test_hybrid.py)."""
STORY = (
    "Read this story: Zoe went to the zoo. David has a black vase. Grace has a red mug. Zoe lives in Oslo. "
    "Grace is a sailor. David likes rice. Zoe has a yellow tent. Sara went to the square. David is a chef. "
    "Sara has a yellow coat. Zoe likes rice. "
)
QUESTIONS = (STORY + "What does David like?", STORY + "Where did Sara go?")
FLAGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_total_tokens": 1024}


@pytest.fixture(scope="module")
def hf_model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, attn_implementation="eager")


def prompts_of(llm: LLM) -> list[list[int]]:
    assert llm.tokenizer is not None
    return [llm.tokenizer.chat([{"role": "user", "content": question}]) for question in QUESTIONS]


def record() -> dict[str, Any]:
    return json.loads((FOLDER / "training.json").read_text())


def test_shape_and_record() -> None:
    config = read_config(FOLDER)
    assert config.linear_attention is not None
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    written = json.loads((FOLDER / "config.json").read_text())
    assert written["layer_types"] == 2 * kinds == model_config("hybrid").layer_types
    for key in ("hidden_size", "intermediate_size", "head_dim", "vocab_size", "linear_num_value_heads"):
        assert written[key] == getattr(model_config("hybrid"), key)
    assert (FOLDER / "model.safetensors").stat().st_size < 1_200_000
    assert "--model hybrid" in record()["command"]
    assert f"{record()['held_out']['exact']:.2%}" in (FOLDER / "README.md").read_text()


def test_logits_are_those_of_transformers(hf_model: Any) -> None:
    config = read_config(FOLDER)
    model = build_model(config)
    model.load_weights(iterate_weights(FOLDER, config))
    prompt = torch.randint(0, 1871, (80,), generator=torch.Generator().manual_seed(1)).tolist()
    expected_ids, expected = hf_greedy(hf_model, prompt, 16)
    ids, logits = greedy(model, prompt, 16, (33,))
    torch.testing.assert_close(logits, expected, rtol=0.0, atol=TOLERANCE)
    assert ids == expected_ids


@pytest.mark.parametrize(("panel", "num_new"), [("reference", 12), ("optimized", 3)])
def test_text_is_that_of_transformers_cold_and_cached(panel: str, num_new: int, hf_model: Any) -> None:
    """The first prompt leaves a checkpoint of its state at token 64, at which the others begin."""
    llm = LLM("tiny-hybrid", panel=panel, check_invariants=True, **FLAGS)
    prompts = prompts_of(llm)
    outputs = [
        llm.generate(prompt, temperature=0, max_tokens=num_new, ignore_eos=True, progress=False)
        for prompt in (prompts[0], prompts[1], prompts[0])
    ]
    expected = [hf_greedy(hf_model, prompt, num_new)[0] for prompt in prompts]
    assert [output.output_ids for output in outputs] == [*expected, expected[0]]
    assert [output.num_cached_tokens for output in outputs] == [0, 64, 64]


def test_it_answers() -> None:
    """One question of each kind, and a little less often right than of all 400."""
    llm = LLM("tiny-hybrid", panel="reference", device="cpu", max_total_tokens=16384)
    found = score(engine_answers(llm), held_out_questions(20))
    assert found.exact >= record()["held_out"]["exact"] - 0.1, found.mistakes
