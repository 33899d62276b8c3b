"""Images in prompts of Qwen3-VL: answers are those of transformers, whatever is cached, chunked or mixed."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from diptych.optimized.graphs.rehearsal import MANY_TOKENS, prefill_batches
from diptych.optimized.modes import qwen_vision
from diptych.reference.modes.qwen_vision import QwenVisionTower
from diptych.shared import registry
from diptych.shared.config import EngineConfig, read_config
from diptych.shared.config.vision_config import read_vision_config
from diptych.shared.engine.requests import images as image_prompts
from diptych.shared.engine.requests.image_grid import rope_positions
from diptych.shared.loading.load_model import tell_unused
from diptych.shared.loading.vision_weights import load_vision
from diptych.shared.modeling.vision_modules import normalized
from diptych.shared.types import PromptEmbeds
from tests.engine.test_images import (
    CHUNKED,
    GREEDY,
    IMAGE,
    NUM_NEW,
    OTHERS,
    Answer,
    Image,
    answers,
    engine,
    expect_answers,
    picture,
    random_model,
    save,
)  # fmt: skip
from tests.planted import Bug, Bugs

VIDEO, SECTION = 329, [4, 2, 2]
PICTURES = [picture(0), picture(2, 25, 61), picture(1, 9, 14)]  # of 3 x 4, 5 x 2 and 3 x 2 rows
PROMPTS = [
    ([5, 6, 7, 8, IMAGE, 9, 10], PICTURES[:1]),
    ([5, 6, 7, 8, IMAGE, 9, 10, 3, IMAGE, 4, 4], PICTURES[:2]),
    ([11, 12, 13, 14, 15, 16, 17, 18], []),
    ([5, 6, 7, 8, IMAGE, 9, IMAGE, 12], PICTURES[1:]),
]
SIZES = {"hidden_size": 32, "intermediate_size": 48}
TEXT = {
    **SIZES, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": SECTION},
}  # fmt: skip
VISION = {
    **SIZES, "depth": 3, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1],
}  # fmt: skip
PROCESSOR = Qwen2VLImageProcessorPil(
    size={"shortest_edge": 256, "longest_edge": 768}, patch_size=4, image_mean=[0.5] * 3, image_std=[0.5] * 3
)


def qwen3_vl(image_token_id: int = IMAGE, vocab_size: int = 331) -> PreTrainedModel:
    ids = {"image_token_id": image_token_id, "video_token_id": VIDEO}
    config = Qwen3VLConfig(text_config={**TEXT, "vocab_size": vocab_size}, vision_config=VISION, **ids)
    return random_model(Qwen3VLForConditionalGeneration, config)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return qwen3_vl()


@pytest.fixture(scope="module")
def folder(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model, tmp_path_factory.mktemp("qwen3-vl"), PROCESSOR)


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel) -> list[Answer]:
    return [hf_answer(model, ids, pictures) for ids, pictures in PROMPTS]


def hf_answer(model: PreTrainedModel, prompt: list[int], pictures: list[Any]) -> Answer:
    """Greedy tokens and their log-probabilities, from transformers without a cache."""
    given = PROCESSOR(images=pictures, return_tensors="pt") if pictures else {}
    num_rows = iter([int(grid.prod()) // 4 for grid in given.get("image_grid_thw", ())])
    ids = [i for token in prompt for i in [token] * (next(num_rows) if token == IMAGE else 1)]
    start, logprobs = len(ids), []
    with torch.inference_mode():
        while len(ids) < start + NUM_NEW:
            tokens = torch.tensor([ids])
            last = model(input_ids=tokens, mm_token_type_ids=(tokens == IMAGE).int(), **given).logits[0, -1]
            last[IMAGE] = -torch.inf
            last = last.log_softmax(-1)
            ids.append(int(last.argmax()))
            logprobs.append(float(last.max()))
    return ids[start:], logprobs


@pytest.mark.parametrize("panel", ["reference", pytest.param("optimized", marks=pytest.mark.full)])
def test_a_retracted_request_rotates_by_the_same_positions(
    folder: Path, expected: list[Answer], panel: str
) -> None:
    llm = engine(folder, panel=panel, max_total_tokens=64, schedule_conservativeness=0.1)
    images, bias = [pictures for _, pictures in PROMPTS], {IMAGE: -torch.inf}
    ids = [ids for ids, _ in PROMPTS]
    outputs = llm.generate(ids, GREEDY, images=images, logit_bias=bias, progress=False)
    assert [each.output_ids for each in outputs] == [ids for ids, _ in expected]
    assert sum(each.num_retractions for each in outputs) > 0


def test_an_image_beside_text_in_the_optimized_panel(folder: Path, expected: list[Answer]) -> None:
    """Attention of the reference, because Triton's interpreter is slow."""
    flags = {**CHUNKED, "chunked_prefill_size": 12, "use": {"attention": "reference", "sampler": "reference"}}
    llm = engine(folder, panel="optimized", **flags)
    expect_answers(answers(llm, PROMPTS[:1] + PROMPTS[2:3]), [expected[0], expected[2]])


def test_positions_are_those_of_transformers(model: PreTrainedModel) -> None:
    grids = [(3, 4), (5, 2), (1, 7)]
    ids = torch.tensor([[1, 2, *[IMAGE] * 12, 3, *[IMAGE] * 10, 4, 5, 6, *[IMAGE] * 7]])
    sizes = torch.tensor([[1, 2 * height, 2 * width] for height, width in grids])
    theirs, delta = model.model.get_rope_index(ids, (ids == IMAGE).int(), sizes)
    ours = rope_positions((ids[0] == IMAGE).nonzero()[:, 0].tolist(), grids, ids.shape[1])
    assert ours.equal(theirs[:, 0])
    assert int(ours.max()) + 1 - ids.shape[1] == int(delta)


def test_images_are_cached_by_their_content_and_shape(folder: Path) -> None:
    llm = engine(folder)
    black = [Image.new("RGB", size) for size in ((32, 16), (16, 32))]  # 8 rows each
    for image, num_cached in ((black[0], 0), (black[1], 2), (black[0].copy(), 2 + 8 + 1)):
        output = llm.generate([5, 6, IMAGE, 7, 8], GREEDY, images=[image], progress=False)
        assert output.num_cached_tokens == num_cached


def test_pixels_are_those_of_transformers(folder: Path) -> None:
    config = read_vision_config(folder)
    assert config is not None
    tower = QwenVisionTower(config, 32)
    for each in (*PICTURES, *OTHERS, picture(5, 3, 4), picture(6, 20, 28)):
        pixels = image_prompts.pixels_of(each, config)
        theirs = PROCESSOR(images=each, return_tensors="pt")
        assert [side // 4 for side in pixels.shape[1:]] == theirs["image_grid_thw"][0, 1:].tolist()
        ours = tower.patches(normalized(pixels, config))
        torch.testing.assert_close(ours, theirs["pixel_values"], rtol=0, atol=1e-5)


def test_passes_are_not_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qwen_vision, "MAX_PIXELS", 20)
    images = [torch.empty(3, 4, width) for width in (2, 3, 1, 9, 1)]
    found = [[each.shape[2] for each in some] for some in qwen_vision.passes(images)]
    assert found == [[2, 3], [1], [9], [1]]


def test_attention_never_holds_all_scores(folder: Path) -> None:
    config = read_vision_config(folder)
    assert config is not None
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        QwenVisionTower(config, 32)([torch.zeros(3, 16, 24, dtype=torch.uint8)])


def test_without_preparation_text_alone_runs(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(folder / name)
    llm = engine(tmp_path)
    assert len(llm.generate([5, 6], GREEDY, progress=False).output_ids) == NUM_NEW
    with pytest.raises(ValueError, match="takes no images: they need weights and preprocessor_config"):
        llm.generate([5, IMAGE], images=PICTURES[:1])
    assert " for images\n" in capsys.readouterr().err
    for loads_tower in (False, True):
        tell_unused(folder, llm.assembly.model_config, loads_tower)
        assert (" for images\n" in capsys.readouterr().err) == (not loads_tower)


def test_a_checkpoint_without_a_tower_takes_texts(folder: Path, tmp_path: Path, capsys: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    tower = [name for name in tensors if ".visual." in name]
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).symlink_to(folder / name)
    rest = {name: each for name, each in tensors.items() if name not in tower}
    save_file({**rest, tower[0]: tensors[tower[0]]}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"{len(tower) - 1} weights of the vision tower are missing"):
        engine(tmp_path)
    save_file(rest, tmp_path / "model.safetensors")
    llm = engine(tmp_path)
    assert "no vision tower: images are refused" in capsys.readouterr().err
    assert len(llm.generate([5, 6], GREEDY, progress=False).output_ids) == NUM_NEW
    with pytest.raises(ValueError, match="takes no images"):
        llm.generate([5, IMAGE], images=PICTURES[:1])


def test_other_weights_may_be_quantized(folder: Path, tmp_path: Path) -> None:
    def load(name: str) -> Any:
        tensors = load_file(folder / "model.safetensors")
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        save_file(tensors, tmp_path / "model.safetensors")
        config, towers = read_vision_config(folder), registry.load("vision", "reference")
        assert config is not None
        return load_vision(towers, tmp_path, config, 32, torch.device("cpu"), torch.float32)

    load("model.language_model.layers.0.mlp.up_proj.weight")
    with pytest.raises(ValueError, match="F8_E4M3; a tower has one of"):
        load("model.visual.blocks.0.attn.qkv.weight")


def test_three_positions_are_rehearsed(folder: Path) -> None:
    config, model = EngineConfig(context_len=1024), read_config(folder)
    batches = prefill_batches(config, model, 64, torch.device("cpu"))
    assert {each.num_tokens for each in batches if each.model_positions.dim() == 2} == {1, MANY_TOKENS}


def test_refusals(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a placeholder of a video .token 329.: videos are not supported"):
        engine(folder).generate([5, VIDEO, IMAGE], images=PICTURES[:1])
    with pytest.raises(ValueError, match="a part of type video_url: videos are not supported, images are"):
        image_prompts.take_images([{"role": "user", "content": [{"type": "video_url", "video_url": {}}]}])
    config = json.loads((folder / "config.json").read_text())
    prepared = (folder / "preprocessor_config.json").read_text()
    (tmp_path / "preprocessor_config.json").write_text(prepared)
    for part, changes, message in (
        ("vision_config", {"deepstack_visual_indexes": [1, 3]}, "it must be ascending layers in .0, 3."),
        ("vision_config", {"num_position_embeddings": 15}, "it must be the square of an integer"),
        ("vision_config", {"patch_size": 8}, "patch_size is 4; it must be 8"),
        (
            "text_config",
            {"rope_parameters": {"rope_type": "default"}},
            "need a mrope_section of three integers",
        ),
        ("text_config", {"num_hidden_layers": 2}, "deepstack_visual_indexes has 2 layers; with 2 layers"),
    ):
        changed = {**config, part: {**config[part], **changes}}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=message):
            engine(tmp_path)
    for prepares, message in (
        ({"size": {"height": 2}}, "size: shortest_edge is missing"),
        ({"size": {"shortest_edge": 9, "longest_edge": 8}}, "at least 9 and at most 8 pixels"),
        ({"image_std": [0.5, 0.0, 0.5]}, "must be finite, and a std above 0"),
        ({"image_mean": [0.5, 0.5, math.nan]}, "must be finite"),
        ({"rescale_factor": 0.5}, "it must be 1 / 255"),
    ):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(json.loads(prepared) | prepares))
        with pytest.raises(ValueError, match=message):
            read_vision_config(tmp_path)


def without_delta(*args: Any) -> PromptEmbeds:
    """Output tokens rotate by their position in the text."""
    return replace(PromptEmbeds(*args), rope_delta=0)


def rows_for_columns(*args: Any) -> PromptEmbeds:
    """Positions by rows and by columns are swapped."""
    right = PromptEmbeds(*args)
    assert right.rope_positions is not None
    return replace(right, rope_positions=right.rope_positions[[0, 2, 1]])


def deepstack_too_late(*args: Any) -> PromptEmbeds:
    """Deepstack's rows are added one layer later."""
    right = PromptEmbeds(*args)
    first, later = right.rows.split([32, 64], dim=1)
    return replace(right, rows=torch.cat([first, torch.zeros_like(first), later], dim=1))


EMBEDS = Bugs("images of Qwen3-VL", f"{image_prompts.__name__}.PromptEmbeds", "other answers")
EMBEDS.add_all(without_delta, rows_for_columns, deepstack_too_late)


@EMBEDS.found_by(AssertionError)
def test_planted_bugs_are_found(bug: Bug, folder: Path, expected: list[Answer], monkeypatch: Any) -> None:
    bug.plant_in(monkeypatch)
    expect_answers(answers(engine(folder), PROMPTS[:1]), expected[:1])
