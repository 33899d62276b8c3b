"""Models whose form of tool calls is not known: text, and a block of reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diptych.shared.dialects.parts.blocks import BlockDialect
from diptych.shared.interfaces.dialect import Call, NotACall, Steps, Stream


class Plain(BlockDialect):
    """Reads no calls, so a request cannot demand one."""

    markers = ()
    tool_parsers = ("none",)

    def write(self, calls: Sequence[Call]) -> str:
        raise NotImplementedError("the form of this model's tool calls is not known")

    def block(self, stream: Stream, start: str) -> Steps[None]:
        raise NotACall

    def tag(self, name: str, schema: Any) -> dict[str, Any]:
        raise NotImplementedError("the form of this model's tool calls is not known")
