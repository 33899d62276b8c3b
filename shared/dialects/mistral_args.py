"""Mistral's newer models (v11 and later): `[TOOL_CALLS]name[ARGS]{...}` for each call, some with its id."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from diptych.shared.dialects.mistral import ARGS, START, Mistral
from diptych.shared.dialects.parts.json_calls import dumps, json_object
from diptych.shared.interfaces.dialect import Call


class MistralArgs(Mistral):
    tool_parsers = ("mistral_args",)
    separator = ""
    around = ("", "")

    def write(self, calls: Sequence[Call]) -> str:
        return "".join(f"{START}{call.name}{ARGS}{dumps(call.arguments)}" for call in calls)

    def tag(self, name: str, schema: Any) -> dict[str, Any]:
        return {"type": "tag", "begin": f"{START}{name}{ARGS}", "content": json_object(schema), "end": ""}

    @classmethod
    def matches(cls, template: str, has_token: Callable[[str], bool]) -> bool:
        return START in template and (ARGS in template or has_token(ARGS))
