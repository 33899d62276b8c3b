"""Images in messages of Anthropic's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from diptych.shared.server.api.body import Body
from diptych.shared.server.api.protocol import ImagePart, ImageUrl, TextPart


class ImageSource(Body):
    type: Literal["base64"]  # nothing is fetched
    media_type: str
    data: str


class ImageBlock(Body):
    place = "messages.messages[].content[]"

    type: Literal["image"]
    source: ImageSource


def content_of(blocks: Sequence[Any]) -> str | list[TextPart | ImagePart]:
    """The text of a turn's blocks; its parts, where some are images."""
    parts: list[TextPart | ImagePart] = []
    for block in blocks:
        if isinstance(block, ImageBlock):
            url = f"data:{block.source.media_type};base64,{block.source.data}"
            parts.append(ImagePart(type="image_url", image_url=ImageUrl(url=url)))
        elif block.type == "text":
            parts.append(TextPart(type="text", text=block.text))
    texts = [part.text for part in parts if isinstance(part, TextPart)]
    return "".join(texts) if len(texts) == len(parts) else parts
