"""DeepSeek V3.1: as V3, the name before the separator, and no fence."""

from __future__ import annotations

from collections.abc import Callable

from diptych.shared.dialects.deepseek_v3 import BEGIN, SEPARATOR, DeepSeekV3
from diptych.shared.interfaces.dialect import NotACall, Steps, Stream


class DeepSeekV31(DeepSeekV3):
    tool_parsers = ("deepseekv31",)
    separator = ""
    before, opening, closing = "", SEPARATOR, ""

    def _name(self, stream: Stream) -> Steps[str]:
        name = yield from stream.head(SEPARATOR)
        if not name:
            raise NotACall
        return name

    @classmethod
    def matches(cls, template: str, has_token: Callable[[str], bool]) -> bool:
        return BEGIN in template or (not template and has_token(BEGIN))
