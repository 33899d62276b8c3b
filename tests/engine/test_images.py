"""Images in prompts: LLaVA's answers are those of transformers, whatever is cached or chunked."""

from __future__ import annotations

import base64
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlavaConfig, LlavaForConditionalGeneration, PreTrainedModel
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from diptych.shared.config.vision_config import read_vision_config
from diptych.shared.engine.llm import LLM
from diptych.shared.engine.requests import images as image_prompts
from diptych.shared.engine.requests.tower_rows import TowerRows
from diptych.shared.types import SamplingParams
from tests.engine.test_input_embeds import ON_GPU, Answer, expect_answers
from tests.planted import Bug, Bugs

Image = pytest.importorskip("PIL.Image")
IMAGE, NUM_ROWS, NUM_NEW = 330, 9, 5
GREEDY = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0, ignore_eos=True, return_logprob=True)
CHUNKED = {"chunked_prefill_size": 6, "enable_mixed_chunk": True, "page_size": 4}
TEXT_CONFIG = {
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
VISION_CONFIG = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 24,
    "patch_size": 8,
}


def picture(seed: int, width: int = 40, height: int = 30) -> Any:
    """Large blots: noise that the resize keeps."""
    blots = np.random.default_rng(seed).integers(0, 256, (6, 5, 3), dtype=np.uint8)
    return Image.fromarray(blots).resize((width, height), Image.Resampling.NEAREST)


OTHERS = [picture(3, 24, 24), picture(4, 300, 24), picture(7), picture(8).convert("P")]
OTHERS[2].putalpha(OTHERS[2].convert("L"))
OTHERS[3].info["transparency"] = 0
PICTURES = [picture(0), picture(1), picture(2, 25, 61)]
PROMPTS = [
    ([5, 6, 7, 8, IMAGE, 9, 10], PICTURES[:1]),
    ([5, 6, 7, 8, IMAGE, 9, 10], PICTURES[1:2]),
    ([5, 6, 7, 8, IMAGE, 9, 10, 3, IMAGE, IMAGE, 4], [PICTURES[0], PICTURES[2], PICTURES[0]]),
]


def llava(image_token_id: int = IMAGE, vocab_size: int = 331, **fields: Any) -> PreTrainedModel:
    config = LlavaConfig(
        text_config={**TEXT_CONFIG, "vocab_size": vocab_size},
        vision_config=dict(VISION_CONFIG),
        image_token_index=image_token_id,
        **fields,
    )
    return random_model(LlavaForConditionalGeneration, config)


def random_model(model_class: Any, config: Any) -> PreTrainedModel:
    model = model_class._from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(float("norm" in name and "weight" in name), 0.2, generator=generator)
            else:
                std = 0.3 if "embed" in name or "lm_head" in name else 1.5 * parameter[0].numel() ** -0.5
                parameter.normal_(0.0, std, generator=generator)
    return model


def save(model: PreTrainedModel, folder: Path, preparation: Any = None) -> Path:
    model.save_pretrained(folder)
    (preparation or processor()).save_pretrained(folder)
    return folder


def processor() -> Any:
    return CLIPImageProcessorPil(size={"shortest_edge": 26}, crop_size={"height": 24, "width": 24})


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return llava()


@pytest.fixture(scope="module")
def folder(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model, tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel) -> list[Answer]:
    return [hf_answer(model, ids, pictures) for ids, pictures in PROMPTS]


def hf_answer(
    model: PreTrainedModel, prompt: list[int], pictures: list[Any], num_rows: int = NUM_ROWS
) -> Answer:
    """Greedy tokens and their log-probabilities, from transformers without a cache."""
    pixels = processor()(images=pictures, return_tensors="pt")["pixel_values"]
    ids = [i for token in prompt for i in [token] * (num_rows if token == IMAGE else 1)]
    start, logprobs = len(ids), []
    with torch.inference_mode():
        while len(ids) < start + NUM_NEW:
            last = model(input_ids=torch.tensor([ids]), pixel_values=pixels).logits[0, -1]
            last[IMAGE] = -torch.inf  # else it would ask for another image
            last = last.log_softmax(-1)
            ids.append(int(last.argmax()))
            logprobs.append(float(last.max()))
    return ids[start:], logprobs


def engine(folder: Path, **flags: Any) -> LLM:
    given = {"device": "cpu", "panel": "reference", "max_total_tokens": 256, **flags}
    return LLM(str(folder), check_invariants=True, **given)


def answers(llm: LLM, prompts: list[Any]) -> list[Answer]:
    outputs = llm.generate(
        [ids for ids, _ in prompts],
        GREEDY,
        images=[pictures for _, pictures in prompts],
        logit_bias={IMAGE: -torch.inf},
        progress=False,
    )
    assert isinstance(outputs, list)
    return [(each.output_ids, [p.logprob for p in each.output_logprobs]) for each in outputs]


@pytest.mark.parametrize(
    "flags",
    [
        CHUNKED,
        pytest.param({}, marks=pytest.mark.full),
        pytest.param({"chunked_prefill_size": 16, "page_size": 16}, marks=pytest.mark.full),
        pytest.param({"disable_radix_cache": True}, marks=pytest.mark.full),
        pytest.param({"panel": "optimized", "chunked_prefill_size": 6}, marks=pytest.mark.full),
        pytest.param({"panel": "optimized", **CHUNKED}, marks=pytest.mark.full),
        *(pytest.param({**ON_GPU, **flags}, marks=pytest.mark.gpu) for flags in ({}, CHUNKED)),
    ],
    ids=str,
)
def test_cold_warm_and_chunked_are_transformers(
    folder: Path, expected: list[Answer], flags: dict[str, Any]
) -> None:
    llm = engine(folder, **flags)
    for _ in range(2):
        beside = llm.submit([11, 12, 13], GREEDY)[0]
        expect_answers(answers(llm, PROMPTS), expected)
        assert beside.is_finished


@pytest.mark.full
@pytest.mark.parametrize(
    "fields",
    [
        {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        {"vision_feature_layer": 1, "multimodal_projector_bias": False},
    ],
    ids=str,
)
def test_other_features(tmp_path: Path, fields: dict[str, Any]) -> None:
    model = llava(**fields)
    num_rows = NUM_ROWS + ("vision_feature_select_strategy" in fields)
    expected = [hf_answer(model, ids, pictures, num_rows) for ids, pictures in PROMPTS[:2]]
    expect_answers(answers(engine(save(model, tmp_path)), PROMPTS[:2]), expected)


def test_images_are_cached_by_their_content(folder: Path, expected: list[Answer]) -> None:
    llm = engine(folder)
    wanted = (0, 4, 4 + NUM_ROWS + 2, 4 + NUM_ROWS + 1)
    for (ids, pictures), answer, num_cached in zip([*PROMPTS, PROMPTS[1]], [*expected, expected[1]], wanted):
        copies = [each.copy() for each in pictures]
        output = llm.generate(ids, GREEDY, images=copies, logit_bias={IMAGE: -torch.inf}, progress=False)
        assert output.output_ids == answer[0]
        assert output.num_cached_tokens == num_cached
    text = llm.generate([5, 6, 7, 8, *[IMAGE] * NUM_ROWS], GREEDY, progress=False)
    assert text.num_cached_tokens == 4


def test_pixels_are_those_of_transformers(folder: Path) -> None:
    config = read_vision_config(folder)
    assert config is not None
    assert config.resize_to == 26
    mean, std = (torch.tensor(each)[:, None, None] for each in (config.image_mean, config.image_std))
    for each in (*PICTURES, *OTHERS, picture(5, 7, 9).convert("L")):
        ours = (image_prompts.pixels_of(each, config) / 255 - mean) / std
        theirs = processor()(images=each, return_tensors="pt")["pixel_values"][0]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_forms_of_an_image(folder: Path, tmp_path: Path) -> None:
    config = read_vision_config(folder)
    assert config is not None
    file = BytesIO()
    PICTURES[0].save(file, "PNG")
    (tmp_path / "a.png").write_bytes(file.getvalue())
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    expected = image_prompts.pixels_of(PICTURES[0], config)
    for form in (file.getvalue(), url, tmp_path / "a.png", str(tmp_path / "a.png")):
        assert image_prompts.pixels_of(form, config).equal(expected)
    text, parts = {"type": "text", "text": "What?"}, [{"type": "image_url", "image_url": {"url": url}}]
    plain, images = image_prompts.take_images([{"role": "user", "content": [*parts, text]}])
    assert plain == [{"role": "user", "content": [{"type": "image"}, text]}]
    assert images == [file.getvalue()]
    for wrong, message in (
        (b"text", "these 4 bytes are not an image in one of the formats PNG, JPEG, WEBP, GIF"),
        (file.getvalue()[:200], "the image is damaged"),
        (7, "an image is a Pillow image, bytes, a path or a data URL, got int"),
        ("data:text/plain;base64,AA==", "an image URL must be data:image/"),
        ("data:image/png;base64,A*", "not base64"),
        (str(tmp_path / "none.png"), "the image cannot be read"),
        (bytes(image_prompts.MAX_IMAGE_BYTES + 1), "an image file has at most"),
        (Image.new("1", (10_000, 10_000)), "1 to 50000000 pixels"),
        (Image.new("1", (0, 0)), "1 to 50000000 pixels .* got 0 x 0"),
        (Image.new("1", (1, 51)), "sides of at most 1:50, got 1 x 51"),
    ):
        with pytest.raises(ValueError, match=message):
            image_prompts.pixels_of(wrong, config)
    with pytest.raises(ValueError, match="an image URL must be data:image/"):
        image_prompts.take_images(
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/a.png"}}]}]
        )


def test_a_data_url_is_limited_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_prompts, "MAX_IMAGE_BYTES", 6)
    assert image_prompts.bytes_of_data_url("data:image/png;base64," + "A" * 12) == bytes(9)
    with pytest.raises(ValueError, match="an image file has at most 6 bytes"):
        image_prompts.bytes_of_data_url("data:image/png;base64," + "A" * 16)


def test_refusals(folder: Path, tmp_path: Path) -> None:
    llm = engine(folder)
    for ids, pictures, message in (
        ([1, 2], PICTURES[:1], "the prompt has 0 placeholders .token 330. for 1 images"),
        ([IMAGE] * 17, PICTURES[:1] * 17, "at most 16 images, got 17"),
        ([IMAGE] * 15, PICTURES[:1] * 15, "135 tokens with its images; the context has 128"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.generate(ids, images=pictures)
    with pytest.raises(ValueError, match="images must be a list for each of the 2 prompts"):
        llm.generate([[IMAGE], [IMAGE]], images=PICTURES[:2])
    with pytest.raises(ValueError, match="Qwen3ForCausalLM takes no images"):
        LLM("tiny-dense", panel="reference", device="cpu", max_total_tokens=64).generate("a", images=PICTURES)
    config = json.loads((folder / "config.json").read_text())
    for changes, message in (
        ({"vision_feature_layer": [1, 2]}, "vision_feature_layer is .* must be an integer"),
        ({"projector_hidden_act": "relu"}, "projector_hidden_act is 'relu'; it must be 'gelu'"),
        ({"vision_config": {"model_type": "siglip_vision_model"}}, "it must be 'clip_vision_model'"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(ValueError, match=message):
            read_vision_config(tmp_path)
    assert "speculative=None alone" in image_prompts.why_no_images(
        llm.config.updated(speculative="ngram"), llm.assembly.model_config, None
    )


def keyed_by_placeholders(kind: bytes, content: bytes) -> int:
    return IMAGE


def keyed_by_row(kind: bytes, content: bytes) -> int:
    """The digest of the image is left out."""
    return int.from_bytes(content[-4:], "little") + 2**64


def test_the_tower_runs_once_for_each_image() -> None:
    """And rows of an image are those of its call alone; the least recently used ones go."""
    calls: list[int] = []

    def tower(images: list[torch.Tensor]) -> list[torch.Tensor]:
        calls.append(len(images))
        return [image.float().mean(dim=0) for image in images]

    images = {name: torch.full((3, 2, 2), float(ord(name))) for name in "abcd"}

    def rows_of(names: str) -> list[float]:
        digests = [name.encode() for name in names]
        found = known.rows_of(digests, [images[name] for name in names], tower)
        assert all(rows.shape == (2, 2) for rows in found)
        return [float(rows[0, 0]) for rows in found]

    known = TowerRows(max_bytes=2 * 16)
    for names, num_new in (("aba", 2), ("b", 0), ("cb", 1), ("a", 1), ("abcd", 2), ("d", 0)):
        before = sum(calls)
        assert rows_of(names) == [ord(name) for name in names]
        assert sum(calls) - before == num_new, names
    known.rows_of([b"e"], [torch.ones(3, 3, 3)], tower)  # more bytes than the table holds
    assert known.num_bytes == 32
    assert rows_of("cd") == [99, 100]
    assert len(calls) == 5


KEYS = Bugs("keys of images", f"{image_prompts.__name__}.digest_key", "other answers")
KEYS.add_all(keyed_by_placeholders, keyed_by_row)


@KEYS.found_by(is_fast=lambda *_: False)
def test_planted_bugs_in_keys_are_found(
    bug: Bug, folder: Path, expected: list[Answer], monkeypatch: Any
) -> bool:
    bug.plant_in(monkeypatch)
    llm = engine(folder)
    found = [answers(llm, [each])[0][0] for each in PROMPTS]
    return found != [ids for ids, _ in expected]
