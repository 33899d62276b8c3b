"""Images in prompts of the families with Qwen3-VL's tower: answers are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from diptych.shared.tools.conformance.oracles.hybrid_configs import HYBRID_CONFIGS
from tests.engine.test_images import (
    CHUNKED,
    GREEDY,
    IMAGE,
    ON_GPU,
    Answer,
    answers,
    engine,
    expect_answers,
    random_model,
    save,
)
from tests.engine.test_qwen_images import PICTURES, PROCESSOR, PROMPTS, TEXT, VIDEO, VISION, hf_answer

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [2]}
NO_DEEPSTACK = {key: value for key, value in VISION.items() if key != "deepstack_visual_indexes"}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen3VL": (TEXT, VISION),
    "Qwen3VLMoe": ({**TEXT, **EXPERTS, "tie_word_embeddings": False}, VISION),
    "Qwen3_5": (HYBRID_CONFIGS["qwen3.5"], {**NO_DEEPSTACK, "out_hidden_size": 60}),
    "Qwen3_5Moe": (HYBRID_CONFIGS["qwen3.5-moe"], {**NO_DEEPSTACK, "out_hidden_size": 60}),
}


class Served(NamedTuple):
    model: PreTrainedModel
    folder: Path  # its checkpoint
    expected: list[Answer]  # to PROMPTS


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Served:
    model = small_model(request.param)
    folder = save(model, tmp_path_factory.mktemp(request.param), PROCESSOR)
    if request.param == "Qwen3VLMoe":
        transpose_experts(folder / "model.safetensors")
    return Served(model, folder, [hf_answer(model, *each) for each in PROMPTS])


def small_model(family: str) -> PreTrainedModel:
    text, vision = FAMILIES[family]
    config = getattr(transformers, f"{family}Config")(
        text_config={**text, "vocab_size": 331},
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        tie_word_embeddings=text.get("tie_word_embeddings", False),
    )
    return random_model(getattr(transformers, f"{family}ForConditionalGeneration"), config)


def transpose_experts(file: Path) -> None:
    """As published checkpoints have them. transformers writes them as it holds them."""
    tensors = load_file(file)
    packed = {name: tensor.mT.contiguous() for name, tensor in tensors.items() if ".experts." in name}
    assert packed
    save_file(tensors | packed, file, {"format": "pt"})


@pytest.mark.parametrize(
    "flags",
    [
        CHUNKED,
        pytest.param({"disable_radix_cache": True}, marks=pytest.mark.full),
        pytest.param({"panel": "optimized"}, marks=pytest.mark.full),
        pytest.param({"panel": "optimized", **CHUNKED}, marks=pytest.mark.full),
        *(pytest.param({**ON_GPU, **flags}, marks=pytest.mark.gpu) for flags in ({}, CHUNKED)),
    ],
    ids=str,
)
def test_cold_warm_and_chunked_are_transformers(served: Served, flags: dict[str, Any]) -> None:
    llm = engine(served.folder, **flags)
    for _ in range(2):
        expect_answers(answers(llm, PROMPTS), served.expected)


def test_a_prefix_that_ends_in_an_image(served: Served) -> None:
    """States of linear attention are kept every 64 tokens."""
    llm, text = engine(served.folder, chunked_prefill_size=48), [7 * i % 200 for i in range(58)]
    prompts = [([*text, IMAGE, 9, 10], [picture]) for picture in PICTURES[:2]]
    for (ids, pictures), is_cached in zip(prompts * 2, (False, False, True, True)):
        again = llm.generate(ids, GREEDY, images=pictures, progress=False)
        assert (again.num_cached_tokens >= 64) == is_cached
        expect_answers(answers(llm, [(ids, pictures)]), [hf_answer(served.model, ids, pictures)])


def test_experts_as_transformers_writes_them(tmp_path: Path) -> None:
    model = small_model("Qwen3VLMoe")
    llm = engine(save(model, tmp_path, PROCESSOR))
    expect_answers(answers(llm, PROMPTS[:1]), [hf_answer(model, *PROMPTS[0])])
