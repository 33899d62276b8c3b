"""MiniMax M2: `invoke` elements; strings raw, other values as JSON, as the tool's schema has them."""

from __future__ import annotations

from collections.abc import Callable

from diptych.shared.dialects.parts.invoke import InvokeDialect

BEGIN, END = "<minimax:tool_call>", "</minimax:tool_call>"


class MiniMax(InvokeDialect):
    """The history keeps reasoning, which the template writes."""

    markers = (BEGIN, END, "<think>", "</think>", "]~b]", "]~!b[", "[e~[", "<response>", "</response>")
    tool_parsers = ("minimax-m2",)
    starts = (BEGIN,)
    around = (f"{BEGIN}\n", f"\n{END}")

    @classmethod
    def matches(cls, template: str, has_token: Callable[[str], bool]) -> bool:
        return BEGIN in template or (not template and has_token(BEGIN))
