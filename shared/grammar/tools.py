"""Tool calls as a grammar: the calls that a model has to write, with arguments by each tool's schema."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

ANY_ARGUMENTS = {"type": "object", "additionalProperties": True}


def tool_call_tag(tools: Sequence[tuple[str, Mapping[str, Any] | None]], is_parallel: bool) -> str:
    """A structural tag for calls of these tools (name, schema of the arguments), in the form that
    `shared.server.parsers.ToolParser` reads. `is_parallel`: one call or more; else exactly one."""
    tags = [
        {
            "type": "tag",
            "begin": f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": ',
            "content": {
                "type": "json_schema",
                "json_schema": schema or ANY_ARGUMENTS,
                "max_whitespace_cnt": 1,
            },
            "end": "}\n</tool_call>",
        }
        for name, schema in tools
    ]
    several = {"type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True}
    return json.dumps({"type": "structural_tag", "format": {**several, "stop_after_first": not is_parallel}})
