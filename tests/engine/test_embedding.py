"""Embeddings and rewards: transformers' hidden states, whatever is cached, chunked or running beside them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForSequenceClassification

from diptych.shared.engine.llm import LLM
from diptych.shared.engine.requests.embedding import (
    HEAD,
    check_dimensions,
    embed_outputs,
    finish_embedding,
    read_reward_head,
)
from diptych.shared.tools.conformance.oracles.configs import CONFIGS
from diptych.shared.types import FinishAbort, SamplingParams
from tests.models.model_harness import random_hf_model

PROMPTS = [[(7 * i + j * j) % 331 for j in range(length)] for i, length in enumerate((1, 23, 40, 40))]
PROMPTS[3] = [*PROMPTS[2][:30], 5, 6, 7]  # a prefix of another prompt
GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
ATOL = 2e-5  # of numbers below 1, whose sums both sides take in another order


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embedding")
    random_hf_model(CONFIGS["qwen3-layer-types"]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> torch.Tensor:
    """[prompts, hidden]: the last hidden state of each prompt, not scaled."""
    model = random_hf_model(CONFIGS["qwen3-layer-types"]).model
    with torch.inference_mode():
        return torch.stack([model(torch.tensor([ids])).last_hidden_state[0, -1] for ids in PROMPTS])


def engine(folder: Path, **flags: Any) -> LLM:
    given = {"device": "cpu", "panel": "reference", "max_total_tokens": 512, **flags}
    return LLM(str(folder), check_invariants=True, **given)


def vectors(llm: LLM, **keywords: Any) -> torch.Tensor:
    outputs = llm.embed(PROMPTS, **keywords)
    assert isinstance(outputs, list)
    return torch.tensor([output.embedding for output in outputs])


@pytest.mark.parametrize(
    "flags", [{}, {"chunked_prefill_size": 7, "enable_mixed_chunk": True, "page_size": 4}], ids=str
)
def test_cold_warm_and_chunked_are_transformers(
    folder: Path, expected: torch.Tensor, flags: dict[str, Any]
) -> None:
    llm = engine(folder, **flags)
    alone = llm.generate(PROMPTS[1], GREEDY, progress=False)
    llm.flush_cache()
    for _ in range(2):
        answer = llm.submit(PROMPTS[1], GREEDY)[0]  # an answer in the same batches
        llm.step()
        torch.testing.assert_close(vectors(llm), F.normalize(expected, dim=-1), rtol=0, atol=ATOL)
        while llm.step():
            pass
        assert answer.output_ids == alone.output_ids
    assert llm.embed(PROMPTS[2]).num_cached_tokens >= 36
    assert llm.stats().num_running == 0


def test_dimensions_are_cut_before_the_norm(folder: Path, expected: torch.Tensor) -> None:
    llm = engine(folder)
    cut = F.normalize(expected[:, :8], dim=-1)
    torch.testing.assert_close(vectors(llm, dimensions=8), cut, rtol=0, atol=ATOL)
    assert finish_embedding([3.0, 4.0, 12.0], 2) == [0.6, 0.8]
    with pytest.raises(ValueError, match=r"dimensions must be an integer in \[1, 60\], got 61"):
        llm.embed(PROMPTS[0], dimensions=61)


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled for a GPU, kernels round otherwise")
def test_the_optimized_panel_in_the_interpreter(folder: Path, expected: torch.Tensor) -> None:
    llm = engine(folder, panel="optimized", use={"attention": "triton"}, max_running_requests=4)
    answer = llm.submit(PROMPTS[1], SamplingParams(max_new_tokens=2, temperature=0.0))[0]
    output = llm.embed(PROMPTS[0])
    expected = F.normalize(expected[0], dim=-1)
    torch.testing.assert_close(torch.tensor(output.embedding), expected, rtol=0, atol=ATOL)
    while llm.step():
        pass
    assert answer.num_output_tokens == 2


@pytest.mark.gpu
def test_the_optimized_panel_on_a_gpu(folder: Path, expected: torch.Tensor) -> None:
    llm = engine(folder, panel="optimized", device="cuda", dtype="float32")
    answer = llm.submit(PROMPTS[1], GREEDY)[0]  # decodes by a graph between the embeddings
    for _ in range(2):
        torch.testing.assert_close(vectors(llm), F.normalize(expected, dim=-1), rtol=0, atol=1e-4)
    while llm.step():
        pass
    assert answer.num_output_tokens == GREEDY.max_new_tokens


def test_a_reward_model_gives_the_scores_of_transformers(tmp_path: Path) -> None:
    config = AutoConfig.for_model(**CONFIGS["llama-biases"], num_labels=3, pad_token_id=0)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = torch.cat([model(torch.tensor([ids])).logits for ids in PROMPTS])
    llm = engine(tmp_path)
    for _ in range(2):
        torch.testing.assert_close(vectors(llm), expected, rtol=0, atol=ATOL)
    with pytest.raises(ValueError, match="this is a reward model: it gives scores and no tokens"):
        llm.generate(PROMPTS[0], GREEDY)


def test_refusals(folder: Path) -> None:
    llm = engine(folder, speculative="ngram", speculative_topk=1)
    with pytest.raises(ValueError, match="embeddings do not work with speculative=ngram"):
        llm.embed(PROMPTS[0])
    with pytest.raises(ValueError, match="the prompt is empty"):
        engine(folder).embed([[]])


def test_dimensions_are_from_one_to_the_hidden_size() -> None:
    for dimensions in (None, 1, 8):
        check_dimensions(dimensions, 8)
    for dimensions in (0, 9, True, 2.0):
        with pytest.raises(ValueError, match=r"an integer in \[1, 8\], got"):
            check_dimensions(dimensions, 8)  # type: ignore[arg-type]


def test_states_that_are_not_finite_are_no_embedding(folder: Path) -> None:
    llm = engine(folder)
    norm: Any = llm.assembly.model.model.norm  # type: ignore[attr-defined]
    with torch.no_grad():
        norm.weight[3] = torch.nan
    with pytest.raises(RuntimeError, match="the hidden states held NaN or infinity"):
        llm.embed(PROMPTS[0])


def test_an_output_without_a_vector_names_its_end() -> None:
    ended: Any = SimpleNamespace(rid="a", embedding=None, finish_reason=FinishAbort("aborted"))
    with pytest.raises(RuntimeError, match=r"^a: .*aborted"):
        embed_outputs([ended], None, 0)


def test_the_head_of_a_reward_model_is_read_or_made_up(tmp_path: Path) -> None:
    config: Any = SimpleNamespace(num_labels=2, hidden_size=3)
    assert read_reward_head(tmp_path, SimpleNamespace(num_labels=0), False) is None  # type: ignore[arg-type]
    made_up = read_reward_head(tmp_path, config, True)
    assert made_up is not None
    assert made_up.shape == (2, 3)
    assert torch.equal(made_up, read_reward_head(tmp_path, config, True))  # type: ignore[arg-type]
    head = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    for tensors, problem in (
        ({"other": head}, "missing"),
        ({HEAD: head.clone().view(3, 2)}, r"of shape \[3, 2\]"),
    ):
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=rf"{HEAD} is {problem}; .* of shape \[2, 3\]"):
            read_reward_head(tmp_path, config, False)
    save_file({HEAD: head}, tmp_path / "model.safetensors")
    assert torch.equal(read_reward_head(tmp_path, config, False), head.float())  # type: ignore[arg-type]
