"""DeepSeek V4: as V3.2, with another name for the block."""

from __future__ import annotations

from diptych.shared.dialects.deepseek_v32 import PREFIX, DeepSeekV32


class DeepSeekV4(DeepSeekV32):
    wrapper = "tool_calls"
    tool_parsers = ("deepseekv4",)
    starts = (f"<{PREFIX}tool_calls>",)
    around = (f"\n\n<{PREFIX}tool_calls>\n", f"\n</{PREFIX}tool_calls>")
