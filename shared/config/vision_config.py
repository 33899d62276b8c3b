"""The vision tower in the config.json of a LLaVA or a Qwen, and how its images are prepared."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from diptych.shared.config.fields import Fields, only_name

LLAVA = "LlavaForConditionalGeneration"
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
BICUBIC = 3


class QwenTower(NamedTuple):
    """What a missing key of its config.json stands for."""

    image_token_id: int
    video_token_id: int
    deepstack_layers: tuple[int, ...]


_QWEN3_VL, _QWEN3_5 = QwenTower(151_655, 151_656, (8, 16, 24)), QwenTower(248_056, 248_057, ())
QWEN = {
    "Qwen3VLForConditionalGeneration": _QWEN3_VL,
    "Qwen3VLMoeForConditionalGeneration": _QWEN3_VL,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5,
}
"""The architectures with Qwen3-VL's tower. Qwen3.5 has it without deepstack."""


@dataclass(frozen=True)
class DynamicResolution:
    """The tower of Qwen3-VL, whose images keep their shape and have as many rows as that needs."""

    min_pixels: int
    max_pixels: int
    merge_size: int  # patches on either side of the square that becomes a row of the prompt
    temporal_patch_size: int  # frames of a patch; an image is so many equal ones
    grid_size: int  # position embeddings on either side of their grid, which is stretched over the image
    rope_theta: float
    deepstack_layers: tuple[int, ...]  # their outputs are added to those of the text model's first layers
    video_token_id: int


@dataclass(frozen=True)
class VisionConfig:
    """CLIP's vision transformer, and a projector of two layers behind it; or, with `dynamic`, Qwen3-VL's."""

    image_token_id: int  # the placeholder: one in a prompt's text for each image
    image_size: int  # pixels on either side; with `dynamic` a multiple of it
    patch_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int  # that run: the features are the output of the last of them
    num_heads: int
    layer_norm_eps: float
    has_class_token: bool  # in the features, before the patches
    projector_bias: bool
    resize_to: int  # pixels of an image's shorter side before its middle is cut out
    image_mean: tuple[float, ...] = CLIP_MEAN  # of each colour, in units of 255
    image_std: tuple[float, ...] = CLIP_STD
    dynamic: DynamicResolution | None = None

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def num_tokens(self) -> int:
        """Rows of the prompt that an image of fixed size fills."""
        return self.num_patches + self.has_class_token

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of an image of so many pixels, of which each is a row of the prompt."""
        if self.dynamic is None:
            return 1, self.num_tokens
        return height // self.image_size, width // self.image_size


def has_tower(folder: Path) -> bool:
    """Whether images of a model run, by the architecture in its config.json."""
    text = (folder / "config.json").read_text("utf-8")
    return LLAVA in text or (any(map(text.count, QWEN)) and bool(_preparation_fields(folder).values))


def read_vision_config(folder: Path) -> VisionConfig | None:
    """None for a model without images that this engine runs. Raises `ValueError` for a LLaVA with other parts
    than CLIP and a GELU projector, for a Qwen's tower of another form, or for other steps of preparation."""
    config = _read(folder / "config.json")
    if not has_tower(folder) or only_name(config.get("architectures")) not in (LLAVA, *QWEN):
        return None
    fields = Fields(config, "config.json")
    tower = Fields(fields.raw("vision_config", "an object"), "config.json, vision_config")
    return (_llava if config["architectures"] == [LLAVA] else _qwen)(folder, fields, tower)


def _llava(folder: Path, fields: Fields, tower: Fields) -> VisionConfig:
    _expect(tower, model_type="clip_vision_model", hidden_act="quick_gelu")
    _expect(fields, projector_hidden_act="gelu")
    config, num_layers = fields.values, tower.integer("num_hidden_layers", 12)
    layer = config.get("vision_feature_layer", -2)
    if not isinstance(layer, int) or not -num_layers - 1 <= layer <= num_layers:
        raise fields.error("vision_feature_layer", f"an integer in [{-num_layers - 1}, {num_layers}]")
    strategy = config.get("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise fields.error("vision_feature_select_strategy", "default or full")
    image_size = tower.integer("image_size", 224)
    hidden_size, num_heads = _heads(tower, "num_attention_heads", 768, 12)
    resize_to, mean, std = _preparation(folder, image_size)
    return VisionConfig(
        image_token_id=fields.integer(
            "image_token_id" if "image_token_id" in fields else "image_token_index", 32_000, minimum=0
        ),
        image_size=image_size,
        patch_size=tower.integer("patch_size", 32),
        hidden_size=hidden_size,
        intermediate_size=tower.integer("intermediate_size", 3072),
        num_layers=layer if layer >= 0 else num_layers + 1 + layer,
        num_heads=num_heads,
        layer_norm_eps=tower.number("layer_norm_eps", 1e-5),
        has_class_token=strategy == "full",
        projector_bias=fields.boolean("multimodal_projector_bias", True),
        resize_to=resize_to,
        image_mean=mean,
        image_std=std,
    )


def _qwen(folder: Path, fields: Fields, tower: Fields) -> VisionConfig:
    defaults = QWEN[only_name(fields.values["architectures"])]
    _expect(tower, hidden_act="gelu_pytorch_tanh", in_channels=3)
    hidden_size, num_heads = _heads(tower, "num_heads", 1152, 16)
    if hidden_size // num_heads % 4:
        raise tower.error("num_heads", f"heads of a multiple of 4 dimensions, of hidden_size={hidden_size}")
    num_layers, patch_size = tower.integer("depth", 27), tower.integer("patch_size", 16)
    merge_size, frames = tower.integer("spatial_merge_size", 2), tower.integer("temporal_patch_size", 2)
    num_positions = tower.integer("num_position_embeddings", 2304)
    if math.isqrt(num_positions) ** 2 != num_positions:
        raise tower.error("num_position_embeddings", "the square of an integer")
    key = "deepstack_visual_indexes"
    deepstack = tower.integers(key) if key in tower else list(defaults.deepstack_layers)
    if deepstack != sorted(set(deepstack)) or max(deepstack, default=0) >= num_layers:
        raise tower.error(key, f"ascending layers in [0, {num_layers})")
    rope = Fields(tower.values.get("rope_parameters") or {}, f"{tower.where}, rope_parameters")
    _expect(rope, rope_type="axial")
    found = _preparation_fields(folder)
    _expect(found, do_resize=True, do_rescale=True, do_normalize=True, resample=BICUBIC)
    sizes = {"patch_size": patch_size, "merge_size": merge_size, "temporal_patch_size": frames}
    _expect(Fields({"patch_size": 14, **found.values}, found.where), **sizes)
    mean, std = _colours(found)
    min_pixels, max_pixels = _pixel_limits(found)
    return VisionConfig(
        image_token_id=fields.integer("image_token_id", defaults.image_token_id, minimum=0),
        image_size=patch_size * merge_size,
        patch_size=patch_size,
        hidden_size=hidden_size,
        intermediate_size=tower.integer("intermediate_size", 4304),
        num_layers=num_layers,
        num_heads=num_heads,
        layer_norm_eps=1e-6,
        has_class_token=False,
        projector_bias=True,
        resize_to=0,
        image_mean=mean,
        image_std=std,
        dynamic=DynamicResolution(
            min_pixels=min_pixels,
            max_pixels=max_pixels,
            merge_size=merge_size,
            temporal_patch_size=frames,
            grid_size=math.isqrt(num_positions),
            rope_theta=rope.number("rope_theta", 10_000.0),
            deepstack_layers=tuple(deepstack),
            video_token_id=fields.integer("video_token_id", defaults.video_token_id, minimum=0),
        ),
    )


def _pixel_limits(found: Fields) -> tuple[int, int]:
    """The fewest and the most pixels of an image."""
    edges = {"shortest_edge": 56**2, "longest_edge": 28**2 * 1280}
    size = Fields(found.raw("size", "an object", edges), f"{found.where}, size")
    low, high = (
        found.integer(key) if key in found else size.integer(edge)
        for key, edge in zip(("min_pixels", "max_pixels"), edges)
    )
    if low > high:
        raise ValueError(f"{found.where}: no image has at least {low} and at most {high} pixels")
    return low, high


def _heads(tower: Fields, key: str, hidden_size: int, num_heads: int) -> tuple[int, int]:
    """hidden_size and the number of heads; the given ones where they are missing."""
    hidden_size, num_heads = tower.integer("hidden_size", hidden_size), tower.integer(key, num_heads)
    if hidden_size % num_heads:
        raise tower.error(key, f"a divisor of hidden_size={hidden_size}")
    return hidden_size, num_heads


def _preparation_fields(folder: Path) -> Fields:
    """The preparation of images, from the files that transformers writes; empty where there is none."""
    found: Mapping[str, Any] = {}
    where = "preprocessor_config.json"
    if (folder / where).is_file():
        found = _read(folder / where)
    elif (folder / "processor_config.json").is_file():
        where = "processor_config.json, image_processor"
        found = _read(folder / "processor_config.json").get("image_processor", {})
    return Fields(found, where)


def _preparation(folder: Path, image_size: int) -> tuple[int, tuple[float, ...], tuple[float, ...]]:
    """resize_to, mean and std; CLIP's where there is no file."""
    fields = _preparation_fields(folder)
    found = fields.values
    _expect(fields, do_resize=True, do_center_crop=True, do_rescale=True, do_normalize=True, resample=BICUBIC)
    size, crop = (found.get(key, image_size) for key in ("size", "crop_size"))
    resize_to = size.get("shortest_edge") if isinstance(size, Mapping) else size
    if not isinstance(resize_to, int) or resize_to < image_size:
        raise fields.error("size", f"a shortest_edge of at least {image_size}")
    if crop not in (image_size, {"height": image_size, "width": image_size}):
        raise fields.error("crop_size", f"{image_size} on either side, as in config.json")
    return resize_to, *_colours(fields)


def _colours(fields: Fields) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std."""
    found = fields.values
    for key in ("image_mean", "image_std"):
        value = found.get(key, CLIP_MEAN)
        if not isinstance(value, (list, tuple)) or [type(each) for each in value] != [float] * 3:
            raise fields.error(key, "three numbers with a decimal point")
        if not all(map(math.isfinite, value)) or (key == "image_std" and min(value) <= 0):
            raise fields.error(key, "finite, and a std above 0")
    scale = found.get("rescale_factor", 1 / 255)
    if not isinstance(scale, float) or not math.isclose(scale, 1 / 255, rel_tol=1e-6):
        raise fields.error("rescale_factor", "1 / 255")
    mean, std = (tuple(found.get(k, v)) for k, v in (("image_mean", CLIP_MEAN), ("image_std", CLIP_STD)))
    return mean, std


def _expect(fields: Fields, **only: Any) -> None:
    for key, value in only.items():
        if fields.values.get(key, value) != value:
            raise fields.error(key, repr(value))


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # ModelConfig says what is wrong with it
    return found if isinstance(found, dict) else {}
