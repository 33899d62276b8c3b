"""tiny-hybrid: made from tiny-dense, small, and it answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5

from diptych.shared.engine.llm import LLM
from diptych.shared.loading.model_path import ASSETS
from diptych.shared.tools.corpus.corpus import held_out_questions
from diptych.shared.tools.corpus.evaluate import engine_answers, score
from diptych.shared.tools.training import convert_hybrid
from diptych.shared.tools.training.tiny_models import hybrid_config

FOLDER = ASSETS / "tiny-hybrid"


def test_it_answers() -> None:
    llm = LLM("tiny-hybrid", device="cpu", panel="reference", max_total_tokens=1024)
    for question, answer in (("What is 12 + 30?", "12 + 30 = 42"), ("Who are you?", "Diptych's built-in")):
        prompt = llm.chat_prompt([{"role": "user", "content": question}])
        output: Any = llm.generate(prompt, temperature=0.0, max_tokens=12, progress=False)
        assert answer in output.text


def test_files() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    expected = hybrid_config().to_dict()
    for name in ("layer_types", "hidden_size", "linear_num_value_heads", "linear_value_head_dim"):
        assert config[name] == expected[name]
    for name in convert_hybrid.TOKENIZER_FILES:
        assert (FOLDER / name).read_bytes() == (ASSETS / "tiny-dense" / name).read_bytes()
    assert (FOLDER / "model.safetensors").stat().st_size < 8_000_000
    record = json.loads((FOLDER / "training.json").read_text())
    card = (FOLDER / "README.md").read_text()
    assert record["command"] in card
    assert f"{record['held_out']['exact']:.2%}" in card


@pytest.mark.full
def test_held_out_questions() -> None:
    record = json.loads((FOLDER / "training.json").read_text())
    llm = LLM("tiny-hybrid", device="cpu", panel="reference", max_total_tokens=8192)
    result = score(engine_answers(llm), held_out_questions(60))
    assert abs(result.exact - record["held_out"]["exact"]) < 0.15


def test_what_is_not_new_computes_what_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    all_attention = hybrid_config(layer_types=["full_attention"] * 6)
    monkeypatch.setattr(convert_hybrid, "hybrid_config", lambda: all_attention)
    teacher: Any = AutoModelForCausalLM.from_pretrained(ASSETS / "tiny-dense", dtype=torch.float32)
    student: Any = convert_hybrid.new_student(teacher, seed=0)
    ids = torch.arange(20)[None]
    torch.testing.assert_close(student(ids).logits, teacher(ids).logits, rtol=1e-4, atol=1e-4)


def test_chunks_are_those_of_transformers() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 75, 2, 16)
    v, g, beta = torch.randn(2, 75, 4, 8), -3 * torch.rand(2, 75, 4), torch.rand(2, 75, 4)
    found, _ = convert_hybrid.chunked_delta_rule(q, k, v, g, beta)
    expected, _ = modeling_qwen3_5.torch_chunk_gated_delta_rule(
        q, k, v, g=g, beta=beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=True
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
