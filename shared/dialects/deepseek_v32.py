"""DeepSeek V3.2: `invoke` elements in its own markup; each parameter says whether it is a text."""

from __future__ import annotations

from collections.abc import Callable

from diptych.shared.dialects.parts.invoke import InvokeDialect

PREFIX = "｜DSML｜"


class DeepSeekV32(InvokeDialect):
    wrapper = "function_calls"
    """The element around all calls."""
    prefix, names_types = PREFIX, True
    tool_parsers = ("deepseekv32",)
    markers = (PREFIX, "<think>", "</think>", "<function_results>", "</function_results>")
    starts = (f"<{PREFIX}function_calls>",)
    around = (f"\n\n<{PREFIX}function_calls>\n", f"\n</{PREFIX}function_calls>")

    @classmethod
    def matches(cls, template: str, has_token: Callable[[str], bool]) -> bool:
        return PREFIX in template and cls.wrapper in template
