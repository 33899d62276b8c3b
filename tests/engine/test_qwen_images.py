"""Images in prompts of Qwen3-VL: answers are those of transformers, whatever is cached, chunked or mixed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from diptych.reference.modes.qwen_vision import QwenVisionTower, normalized
from diptych.shared import registry
from diptych.shared.config.model import RopeConfig
from diptych.shared.config.vision_config import read_vision_config
from diptych.shared.engine.llm import LLM
from diptych.shared.engine.requests import images as image_prompts
from diptych.shared.engine.requests.image_grid import rope_positions
from diptych.shared.types import PromptEmbeds, SamplingParams
from tests.engine.test_images import Answer, expect_answers, picture
from tests.planted import Bug, Bugs

Image = pytest.importorskip("PIL.Image")
IMAGE, VIDEO, NUM_NEW = 330, 329, 5
SECTION = [4, 2, 2]
GREEDY = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0, ignore_eos=True, return_logprob=True)
PICTURES = [picture(0), picture(2, 25, 61), picture(1, 9, 14)]
"""Of 3 x 4, 5 x 2 and 3 x 2 rows."""
PROMPTS = [
    ([5, 6, 7, 8, IMAGE, 9, 10], PICTURES[:1]),
    ([5, 6, 7, 8, IMAGE, 9, 10, 3, IMAGE, 4, 4], PICTURES[:2]),
    ([11, 12, 13, 14, 15, 16, 17, 18], []),
    ([5, 6, 7, 8, IMAGE, 9, IMAGE, 12], PICTURES[1:]),
]
TEXT_CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "vocab_size": 331,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": SECTION},
}
VISION_CONFIG = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1],
}


def processor() -> Any:
    return Qwen2VLImageProcessorPil(
        size={"shortest_edge": 256, "longest_edge": 768},
        patch_size=4,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    config = Qwen3VLConfig(
        text_config=TEXT_CONFIG, vision_config=VISION_CONFIG, image_token_id=IMAGE, video_token_id=VIDEO
    )
    model = Qwen3VLForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(float("norm" in name and "weight" in name), 0.2, generator=generator)
            else:
                std = 0.3 if "embed" in name or "lm_head" in name else 1.5 * parameter[0].numel() ** -0.5
                parameter.normal_(0.0, std, generator=generator)
    return model


@pytest.fixture(scope="module")
def folder(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3-vl")
    model.save_pretrained(folder)
    processor().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel) -> list[Answer]:
    return [hf_answer(model, ids, pictures) for ids, pictures in PROMPTS]


def hf_answer(model: PreTrainedModel, prompt: list[int], pictures: list[Any]) -> Answer:
    """Greedy tokens and their log-probabilities, from transformers without a cache."""
    given: dict[str, Any] = {}
    ids, kinds = list(prompt), [0] * len(prompt)
    if pictures:
        given = processor()(images=pictures, return_tensors="pt")
        num_rows = iter([int(grid.prod()) // 4 for grid in given["image_grid_thw"]])
        ids = [i for token in prompt for i in [token] * (next(num_rows) if token == IMAGE else 1)]
        kinds = [int(token == IMAGE) for token in ids]
    start, logprobs = len(ids), []
    with torch.inference_mode():
        while len(ids) < start + NUM_NEW:
            of_images = {**given, "mm_token_type_ids": torch.tensor([kinds])} if pictures else {}
            last = model(input_ids=torch.tensor([ids]), **of_images).logits[0, -1]
            last[[IMAGE, VIDEO]] = -torch.inf
            last = last.log_softmax(-1)
            ids, kinds = [*ids, int(last.argmax())], [*kinds, 0]
            logprobs.append(float(last.max()))
    return ids[start:], logprobs


def engine(folder: Path, **flags: Any) -> LLM:
    given = {"device": "cpu", "panel": "reference", "max_total_tokens": 256, **flags}
    return LLM(str(folder), check_invariants=True, **given)


def answers(llm: LLM, prompts: list[Any]) -> list[Any]:
    outputs = llm.generate(
        [ids for ids, _ in prompts],
        GREEDY,
        images=[pictures for _, pictures in prompts],
        logit_bias={IMAGE: -torch.inf, VIDEO: -torch.inf},
        progress=False,
    )
    assert isinstance(outputs, list)
    return outputs


def tokens_of(outputs: list[Any]) -> list[Answer]:
    return [(each.output_ids, [p.logprob for p in each.output_logprobs]) for each in outputs]


CHUNKED = {"chunked_prefill_size": 6, "enable_mixed_chunk": True, "page_size": 4}
ON_GPU = {"device": "cuda", "panel": "optimized", "use": {"attention": "triton"}, "skip_warmup": True}


@pytest.mark.parametrize(
    "flags",
    [
        {},
        CHUNKED,
        pytest.param({"panel": "optimized"}, marks=pytest.mark.full),
        pytest.param({"panel": "optimized", **CHUNKED}, marks=pytest.mark.full),
        pytest.param({"chunked_prefill_size": 16, "page_size": 16}, marks=pytest.mark.full),
        pytest.param({"disable_radix_cache": True}, marks=pytest.mark.full),
        *(pytest.param({**ON_GPU, **flags}, marks=pytest.mark.gpu) for flags in ({}, CHUNKED)),
    ],
    ids=str,
)
def test_cold_warm_and_chunked_are_transformers(
    folder: Path, expected: list[Answer], flags: dict[str, Any]
) -> None:
    llm = engine(folder, **flags)
    for _ in range(2):
        expect_answers(tokens_of(answers(llm, PROMPTS)), expected)


@pytest.mark.parametrize("panel", ["reference", pytest.param("optimized", marks=pytest.mark.full)])
def test_a_retracted_request_rotates_by_the_same_positions(
    folder: Path, expected: list[Answer], panel: str
) -> None:
    llm = engine(folder, panel=panel, max_total_tokens=64, schedule_conservativeness=0.1)
    outputs = answers(llm, PROMPTS)
    expect_answers(tokens_of(outputs), expected)
    assert sum(each.num_retractions for each in outputs) > 0


def test_a_decoding_image_beside_a_prompt_of_text_in_the_optimized_panel(
    folder: Path, expected: list[Answer]
) -> None:
    """And the chunk of the text is padded, as for a graph. Triton's interpreter is slow, so attention is the
    reference's."""
    flags = {**CHUNKED, "chunked_prefill_size": 12, "use": {"attention": "reference", "sampler": "reference"}}
    llm = engine(folder, panel="optimized", **flags)
    expect_answers(tokens_of(answers(llm, PROMPTS[:1] + PROMPTS[2:3])), [expected[0], expected[2]])


def test_positions_are_those_of_transformers(model: PreTrainedModel) -> None:
    grids = [(3, 4), (5, 2), (1, 7)]
    ids = [1, 2, *[IMAGE] * 12, 3, *[IMAGE] * 10, 4, 5, 6, *[IMAGE] * 7]
    kinds = torch.tensor([[int(token == IMAGE) for token in ids]])
    sizes = torch.tensor([[1, 2 * height, 2 * width] for height, width in grids])
    theirs, deltas = model.model.get_rope_index(torch.tensor([ids]), kinds, sizes)
    places = [i for i, token in enumerate(ids) if token == IMAGE]
    ours = rope_positions(places, grids, len(ids))
    assert ours.equal(theirs[:, 0])
    assert int(ours.max()) + 1 - len(ids) == int(deltas)


@pytest.mark.parametrize("num_tokens", [1, 7])
def test_both_panels_rotate_alike(num_tokens: int) -> None:
    rope = RopeConfig("default", 100.0, 16, mrope_section=(4, 2, 2))
    generator = torch.Generator().manual_seed(0)
    positions = torch.randint(0, 60, (3, num_tokens), generator=generator)
    q, k = torch.randn(2, num_tokens, 4, 24, generator=generator)
    ours, theirs = (
        registry.load("layers", panel).RotaryEmbedding(rope, 24, 64)(positions, q.clone(), k.clone())
        for panel in ("optimized", "reference")
    )
    for ours_of, theirs_of in zip(ours, theirs):
        torch.testing.assert_close(ours_of, theirs_of, rtol=0, atol=1e-6)  # one rounding of products below 4


def test_images_are_cached_by_their_content_and_shape(folder: Path) -> None:
    llm = engine(folder)
    black = [Image.new("RGB", size) for size in ((32, 16), (16, 32))]
    rows = 4 * 2
    for image, num_cached in ((black[0], 0), (black[1], 2), (black[0].copy(), 2 + rows + 1)):
        output = llm.generate([5, 6, IMAGE, 7, 8], GREEDY, images=[image], progress=False)
        assert output.num_cached_tokens == num_cached


def test_pixels_are_those_of_transformers(folder: Path) -> None:
    config = read_vision_config(folder)
    assert config is not None
    tower = QwenVisionTower(config, 32)
    for each in (*PICTURES, picture(3, 24, 24), picture(4, 300, 24), picture(5, 3, 4), picture(6, 20, 28)):
        pixels = image_prompts.pixels_of(each, config)
        ours = tower._patches(normalized(pixels, config))
        theirs = processor()(images=each, return_tensors="pt")
        assert [side // 4 for side in pixels.shape[1:]] == theirs["image_grid_thw"][0, 1:].tolist()
        torch.testing.assert_close(ours, theirs["pixel_values"], rtol=0, atol=1e-5)


def test_refusals(folder: Path, tmp_path: Path) -> None:
    llm = engine(folder)
    with pytest.raises(ValueError, match=r"a placeholder of a video .token 329.: videos are not supported"):
        llm.generate([5, VIDEO, IMAGE], images=PICTURES[:1])
    with pytest.raises(ValueError, match="a part of type video_url: videos are not supported, images are"):
        image_prompts.take_images([{"role": "user", "content": [{"type": "video_url", "video_url": {}}]}])
    config = json.loads((folder / "config.json").read_text())
    prepared = json.loads((folder / "preprocessor_config.json").read_text())
    for part, changes, message in (
        ("vision_config", {"deepstack_visual_indexes": [1, 3]}, "it must be ascending layers in .0, 3."),
        ("vision_config", {"num_heads": 5}, "num_heads is 5; it must be a divisor of hidden_size=32"),
        ("vision_config", {"num_position_embeddings": 15}, "it must be the square of an integer"),
        ("vision_config", {"patch_size": 8}, "patch_size is 4; it must be 8"),
        ("vision_config", {"hidden_act": "relu"}, "hidden_act is 'relu'; it must be 'gelu_pytorch_tanh'"),
        (
            "text_config",
            {"rope_parameters": {"rope_type": "default"}},
            "need a mrope_section of three integers",
        ),
        ("text_config", {"num_hidden_layers": 2}, "deepstack_visual_indexes has 2 layers; with 2 layers"),
    ):
        changed = {**config, part: {**config[part], **changes}}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(prepared))
        with pytest.raises(ValueError, match=message):
            engine(tmp_path)


def without_delta(*args: Any) -> PromptEmbeds:
    """Output tokens rotate by their position in the text."""
    return replace(PromptEmbeds(*args), rope_delta=0)


def rows_for_columns(positions: Any, rows: Any, ids: Any, has_ids: bool, places: Any, delta: int) -> Any:
    """Positions by rows and by columns are swapped."""
    return PromptEmbeds(positions, rows, ids, has_ids, places[[0, 2, 1]], delta)


def deepstack_too_late(positions: Any, rows: Any, *more: Any) -> Any:
    """Deepstack's rows are added one layer later."""
    rows = torch.cat([rows[:, :32], torch.zeros(len(rows), 32), rows[:, 32:]], dim=1)
    return PromptEmbeds(positions, rows, *more)  # type: ignore[call-arg]


def blocks_of_sections(values: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """The first frequencies turn by time, the next by rows, the last by columns."""
    axis = torch.tensor([i for i, num in enumerate(rope.mrope_section) for _ in range(num)]).repeat(2)
    return values.gather(0, axis.expand(1, *values.shape[1:]))[0]


EMBEDS = Bugs("images of Qwen3-VL", f"{image_prompts.__name__}.PromptEmbeds", "other answers")
EMBEDS.add_all(without_delta, rows_for_columns, deepstack_too_late)
EMBEDS.add("blocks_of_sections", blocks_of_sections, where="diptych.reference.layers.by_axis")


@EMBEDS.found_by(AssertionError)
def test_planted_bugs_are_found(bug: Bug, folder: Path, expected: list[Answer], monkeypatch: Any) -> None:
    bug.plant_in(monkeypatch)
    expect_answers(tokens_of(answers(engine(folder), PROMPTS[:1])), expected[:1])
