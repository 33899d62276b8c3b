"""The vision tower in the config.json of a LLaVA checkpoint, and how its images are prepared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diptych.shared.config.fields import Fields

LLAVA = "LlavaForConditionalGeneration"
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
BICUBIC = 3


@dataclass(frozen=True)
class VisionConfig:
    """CLIP's vision transformer, and a projector of two layers behind it."""

    image_token_id: int  # the placeholder: one in a prompt's text for each image
    image_size: int  # pixels on either side
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

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def num_tokens(self) -> int:
        """Rows of the prompt that an image fills."""
        return self.num_patches + self.has_class_token


def read_vision_config(folder: Path) -> VisionConfig | None:
    """None for a model without images that this engine runs. Raises `ValueError` for a LLaVA with other parts
    than CLIP and a GELU projector, or with other steps of preparation than CLIP's."""
    config = _read(folder / "config.json")
    if config.get("architectures") != [LLAVA]:
        return None
    fields = Fields(config, "config.json")
    tower = Fields(fields.raw("vision_config", "an object"), "config.json, vision_config")
    _expect(tower, model_type="clip_vision_model", hidden_act="quick_gelu")
    _expect(fields, projector_hidden_act="gelu")
    num_layers, layer = tower.integer("num_hidden_layers", 12), config.get("vision_feature_layer", -2)
    if not isinstance(layer, int) or not -num_layers - 1 <= layer <= num_layers:
        raise fields.error("vision_feature_layer", f"an integer in [{-num_layers - 1}, {num_layers}]")
    strategy = config.get("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise fields.error("vision_feature_select_strategy", "default or full")
    image_size = tower.integer("image_size", 224)
    hidden_size, num_heads = tower.integer("hidden_size", 768), tower.integer("num_attention_heads", 12)
    if hidden_size % num_heads:
        raise tower.error("num_attention_heads", f"a divisor of hidden_size={hidden_size}")
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


def _preparation(folder: Path, image_size: int) -> tuple[int, tuple[float, ...], tuple[float, ...]]:
    """resize_to, mean and std of the files that transformers writes; CLIP's where there is none."""
    found: Mapping[str, Any] = {}
    where = "preprocessor_config.json"
    if (folder / where).is_file():
        found = _read(folder / where)
    elif (folder / "processor_config.json").is_file():
        where = "processor_config.json, image_processor"
        found = _read(folder / "processor_config.json").get("image_processor", {})
    fields = Fields(found, where)
    _expect(fields, do_resize=True, do_center_crop=True, do_rescale=True, do_normalize=True, resample=BICUBIC)
    size, crop = (found.get(key, image_size) for key in ("size", "crop_size"))
    resize_to = size.get("shortest_edge") if isinstance(size, Mapping) else size
    if not isinstance(resize_to, int) or resize_to < image_size:
        raise fields.error("size", f"a shortest_edge of at least {image_size}")
    if crop not in (image_size, {"height": image_size, "width": image_size}):
        raise fields.error("crop_size", f"{image_size} on either side, as in config.json")
    for key in ("image_mean", "image_std"):
        value = found.get(key, CLIP_MEAN)
        if not isinstance(value, (list, tuple)) or [type(each) for each in value] != [float] * 3:
            raise fields.error(key, "three numbers with a decimal point")
    mean, std = (tuple(found.get(k, v)) for k, v in (("image_mean", CLIP_MEAN), ("image_std", CLIP_STD)))
    return resize_to, mean, std


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
