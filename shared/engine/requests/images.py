"""Images in prompts: decodes and crops them, and computes the rows that replace placeholder tokens."""

from __future__ import annotations

import base64
import binascii
import contextlib
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from diptych.shared.config import EngineConfig, ModelConfig
from diptych.shared.config.vision_config import VisionConfig
from diptych.shared.engine.requests.image_grid import dynamic_size, rope_positions
from diptych.shared.engine.requests.input_embeds import check_supported, digest_key
from diptych.shared.types import PromptEmbeds

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_IMAGES = 16
"""Of one prompt."""
MAX_IMAGE_BYTES = 20 * 2**20
"""Of one file."""
MAX_PIXELS = 50_000_000
"""The limit of one image's pixels, checked by its header, because a small file can expand to a huge image."""
MAX_ASPECT_RATIO = 50
NEEDS_PILLOW = "images need Pillow: pip install 'diptych[images]'"


@dataclass(frozen=True)
class ImagesPrompt:
    """A text or token ids with one placeholder token for each image, and the images in that order: Pillow
    images, file bytes, paths, or `data:` URLs."""

    prompt: Any
    images: Sequence[Any]


def takes_images(config: EngineConfig) -> bool:
    """Whether an engine with these flags loads a model's vision tower."""
    with contextlib.suppress(ValueError):
        check_supported("images", config)
        return config.load_format != "dummy"
    return False


def why_no_images(engine_config: EngineConfig, model_config: ModelConfig, vision: Any) -> str:
    """The reason why an engine takes no images; "": it takes them."""
    try:
        check_supported("images", engine_config)
    except ValueError as error:
        return str(error)
    if vision is not None:
        return ""
    needs = "weights and preprocessor_config.json of a LLaVA, Qwen3-VL or Qwen3.5"
    return f"{model_config.architecture} takes no images: they need {needs}"


def images_prompt(
    prompt_ids: list[int],
    images: Sequence[Any],
    engine_config: EngineConfig,
    model_config: ModelConfig,
    vision: Any,
) -> tuple[list[int], PromptEmbeds]:
    """Token ids and `PromptEmbeds` of a prompt with one placeholder for each image. Raises `ValueError` if
    the engine takes no images, for a wrong number of placeholders, and for an invalid image."""
    if why := why_no_images(engine_config, model_config, vision):
        raise ValueError(why)
    if len(images) > MAX_IMAGES:
        raise ValueError(f"a prompt has at most {MAX_IMAGES} images, got {len(images)}")
    config: VisionConfig = vision.config
    pixels = [pixels_of(image, config) for image in images]
    prompt_ids = expand_placeholders(prompt_ids, [tuple(each.shape[1:]) for each in pixels], config)
    if len(prompt_ids) >= (engine_config.context_len or 0):
        raise ValueError(
            f"the prompt has {len(prompt_ids)} tokens with its images; the context has "
            f"{engine_config.context_len}"
        )
    return prompt_ids, image_embeds(prompt_ids, pixels, vision)


def expand_placeholders(
    prompt_ids: list[int], sizes: Sequence[tuple[int, ...]], config: VisionConfig
) -> list[int]:
    """Repeat each placeholder once for each row of its image. sizes: height and width of
    each image, in pixels."""
    if config.dynamic is not None and config.dynamic.video_token_id in prompt_ids:
        raise ValueError(
            f"the prompt has a placeholder of a video (token {config.dynamic.video_token_id}): videos are "
            "not supported, images are"
        )
    # --8<-- [start:expand-placeholders]
    found, num_images = prompt_ids.count(config.image_token_id), len(sizes)
    if found != num_images:
        raise ValueError(
            f"the prompt has {found} placeholders (token {config.image_token_id}) for "
            f"{num_images} images: give one for each image"
        )
    num_rows = iter([math.prod(config.grid_of(*size)) for size in sizes])
    expanded: list[int] = []
    for token_id in prompt_ids:
        expanded += [token_id] * (next(num_rows) if token_id == config.image_token_id else 1)
    return expanded
    # --8<-- [end:expand-placeholders]


# --8<-- [start:image-embeds]
def image_embeds(prompt_ids: list[int], images: Sequence[torch.Tensor], vision: Any) -> PromptEmbeds:
    """The `PromptEmbeds` of images, each uint8 [3, height, width]. prompt_ids have a
    placeholder for each row."""
    config, key_ids = vision.config, list(prompt_ids)
    positions = (torch.tensor(prompt_ids) == config.image_token_id).nonzero()[:, 0]
    grids = [config.grid_of(*image.shape[1:]) for image in images]
    if len(positions) != sum(map(math.prod, grids)):
        raise ValueError(f"{len(positions)} placeholders for {len(images)} images")
    digests = [sha256(pack_pixels(image)).digest() for image in images]
    rows_of_images = [(d, row) for d, grid in zip(digests, grids) for row in range(math.prod(grid))]
    for position, (digest, row) in zip(positions.tolist(), rows_of_images):
        key_ids[position] = digest_key(b"image", digest + row.to_bytes(4, "little"))
    rows = torch.cat(vision.known.rows_of(digests, images, vision))
    rows = rows.to("cpu", non_blocking=True)  # requests may wait long. What reads them is behind the copy.
    if config.dynamic is None:
        return PromptEmbeds(positions, rows, key_ids, has_token_ids=True)
    places = rope_positions(positions.tolist(), grids, len(prompt_ids))
    delta = int(places.max()) + 1 - len(prompt_ids)
    return PromptEmbeds(positions, rows, key_ids, True, places, delta)
    # --8<-- [end:image-embeds]


def pack_pixels(pixels: torch.Tensor) -> bytes:
    """uint8 [3, height, width] as the engine's process receives it: height and width, then the pixels."""
    return struct.pack("<II", *pixels.shape[1:]) + pixels.numpy().tobytes()


def size_of_packed(data: bytes) -> tuple[int, int]:
    """height and width of the result of `pack_pixels`"""
    height, width = struct.unpack_from("<II", data)
    return height, width


def received_images(prompt_ids: list[int], images: Sequence[bytes], vision: Any) -> PromptEmbeds:
    """`image_embeds` of results of `pack_pixels`."""
    if vision is None:
        raise ValueError("this engine takes no images")
    pixels = [
        torch.frombuffer(bytearray(each), dtype=torch.uint8, offset=8).view(3, *size_of_packed(each))
        for each in images
    ]
    return image_embeds(prompt_ids, pixels, vision)


def pixels_of(image: Any, config: VisionConfig) -> torch.Tensor:
    """The pixels of an image, uint8 [3, height, width], resized for the model. Raises `ValueError` for an
    invalid or too large image."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise ValueError(NEEDS_PILLOW) from None
    if isinstance(image, str) and image.startswith("data:"):
        image = bytes_of_data_url(image)
    elif isinstance(image, (str, Path)):
        image = _read(Path(image))
    if isinstance(image, bytes):
        if len(image) > MAX_IMAGE_BYTES:
            raise ValueError(f"an image file has at most {MAX_IMAGE_BYTES} bytes, got {len(image)}")
        image = _opened(image, Image)
    if not isinstance(image, Image.Image):
        raise ValueError(
            f"an image is a Pillow image, bytes, a path or a data URL, got {type(image).__name__}"
        )
    short, long = sorted(image.size)
    if short < 1 or short * long > MAX_PIXELS or long > short * MAX_ASPECT_RATIO:
        raise ValueError(
            f"an image has 1 to {MAX_PIXELS} pixels and sides of at most 1:{MAX_ASPECT_RATIO}, got "
            f"{image.width} x {image.height}"
        )
    try:
        image = ImageOps.exif_transpose(image)
        if "A" in image.getbands() or image.info.get("transparency") is not None:
            white = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(white, image.convert("RGBA"))
        image = image.convert("RGB")
    except (OSError, ValueError, SyntaxError) as error:
        raise ValueError(f"the image is damaged: {error}") from None
    if config.dynamic is None:
        image = _cropped(image, config, Image.Resampling.BICUBIC)
    else:
        image = image.resize(dynamic_size(image.size, config), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def _cropped(image: Any, config: VisionConfig, resampling: Any) -> Any:
    # --8<-- [start:pixels-of-image]
    short, size = min(image.size), config.image_size
    width, height = (int(side * config.resize_to / short) for side in image.size)
    image = image.resize((width, height), resampling)
    left, top = (width - size) // 2, (height - size) // 2
    return image.crop((left, top, left + size, top + size))
    # --8<-- [end:pixels-of-image]


def _opened(data: bytes, pillow: Any) -> Any:
    """Open an image, reading the header only."""
    try:
        return pillow.open(BytesIO(data), formats=FORMATS)
    except Exception:  # a decoder may raise anything on untrusted bytes
        raise ValueError(
            f"these {len(data)} bytes are not an image in one of the formats {', '.join(FORMATS)}"
        ) from None


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_IMAGE_BYTES:
            raise ValueError(f"{path} has more than {MAX_IMAGE_BYTES} bytes")
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"the image cannot be read: {error}") from None


def bytes_of_data_url(url: str) -> bytes:
    """The file in `data:image/png;base64,...`. Raises `ValueError` for any other URL; no URL is fetched."""
    head, comma, data = url.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64") or not comma:
        raise ValueError(f"an image URL must be data:image/...;base64,..., got {url[:40]!r}")
    if len(data) > MAX_IMAGE_BYTES * 4 // 3 + 4:
        raise ValueError(f"an image file has at most {MAX_IMAGE_BYTES} bytes")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("the data of an image URL are not base64") from None


def take_images(messages: Any) -> tuple[Any, list[Any]]:
    """Messages as chat templates take them, and the images in their parts: {"type": "image", "image": ...} or
    OpenAI's {"type": "image_url", "image_url": {"url": ...}}. Parts that are all text become one text,
    because templates of models without images take no parts."""
    if not isinstance(messages, (list, tuple)):
        return messages, []  # the tokenizer refuses them
    plain: list[Any] = []
    images: list[Any] = []
    for message in messages:
        parts = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(parts, (list, tuple)):
            plain.append(message)
            continue
        kept = []
        for part in parts:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind in ("video", "video_url"):
                raise ValueError(f"a part of type {kind}: videos are not supported, images are")
            if kind in ("image", "image_url"):
                images.append(_image_of(part, kind))
                kept.append({"type": "image"})
            else:
                kept.append(part)
        texts = [part["text"] for part in kept if _is_text(part)]
        plain.append({**message, "content": "".join(texts) if len(texts) == len(kept) else kept})
    return plain, images


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _image_of(part: Mapping[str, Any], kind: str) -> Any:
    image = part.get(kind)
    if kind == "image_url":
        url = image.get("url") if isinstance(image, Mapping) else image
        return bytes_of_data_url(url if isinstance(url, str) else "")
    if image is None:
        raise ValueError('a part of type image needs "image"')
    return image


def with_images(prompts: Sequence[Any], images: Any, is_single: bool) -> list[Any]:
    """Combine prompts with the `images` of `LLM.generate`: a list for one prompt, or a list of lists."""
    lists = [images] if is_single else images
    is_list = isinstance(lists, (list, tuple)) and len(lists) == len(prompts)
    if not is_list or not all(isinstance(each, (list, tuple)) for each in lists):
        kind = "a list for the prompt" if is_single else f"a list for each of the {len(prompts)} prompts"
        raise ValueError(f"images must be {kind}, got {type(images).__name__}")
    return [
        ImagesPrompt(prompt, each) if is_single or each else prompt for prompt, each in zip(prompts, lists)
    ]
