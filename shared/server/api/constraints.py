"""Constraints on a chat answer: calls that tool_choice demands, and calls beside a response_format."""

from __future__ import annotations

import json
from typing import Any

from diptych.shared.dialects.parts.choose import NONE
from diptych.shared.dialects.parts.json_calls import ANY_OBJECT
from diptych.shared.dialects.parts.tags import with_tokens
from diptych.shared.server.api.chat_choice import AnswerForm
from diptych.shared.server.api.protocol import ChatRequest, ToolChoice
from diptych.shared.server.http.errors import bad_request


def constrained(body: ChatRequest, form: AnswerForm) -> tuple[ChatRequest, dict[str, Any]]:
    """The body whose fields of sampling hold, and further fields of SamplingParams.

    A call that is required or named leaves no place for a response_format. With "auto" the answer is calls,
    or the text that the format asks for; without a format calls are constrained if a tool is strict. Raises
    400 for a call that the model's dialect cannot write."""
    choice, tools = body.tool_choice, form.tools
    if isinstance(choice, ToolChoice):
        name = choice.function.name
        if name not in tools:
            raise bad_request(f"tool_choice names {name!r}, which is not in tools", "tool_choice")
        tools = {name: tools[name]}
    is_forced = isinstance(choice, ToolChoice) or choice == "required"
    shape = body.response_format
    has_format = shape is not None and shape.type != "text"
    if not tools or not (is_forced or has_format):
        return body, _optional_calls(body, form)
    if NONE in form.dialect.tool_parsers:
        if not is_forced:
            return body, {}
        raise bad_request(
            "the form of this model's tool calls is not known, so a call cannot be demanded; the server's "
            "--tool-call-parser names it",
            "tool_choice",
        )
    is_parallel = body.parallel_tool_calls and not isinstance(choice, ToolChoice)
    try:
        calls = form.dialect.calls_format(tools, is_parallel)
    except ValueError as error:
        raise bad_request(str(error), "tools") from None
    plain = body.model_copy(update={"response_format": None})
    if is_forced:
        return plain, _constraint(calls, form)
    schema = body.grammar_params().get("json_schema", ANY_OBJECT)
    schema = json.loads(schema) if isinstance(schema, str) else schema
    text = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}
    return plain, _constraint({"type": "or", "elements": [calls, form.dialect.text_format(text)]}, form)


def _optional_calls(body: ChatRequest, form: AnswerForm) -> dict[str, Any]:
    """Strict tools are called by their schema, and others with any object. Where the form of calls is not
    known, an answer has none, so there is nothing to constrain."""
    strict = {tool.function.name for tool in body.tools or () if tool.function.strict}
    if not form.tools or not strict or body.grammar_params() or NONE in form.dialect.tool_parsers:
        return {}
    tools = {name: schema if name in strict else True for name, schema in form.tools.items()}
    try:
        shape = form.dialect.optional_calls_format(tools, body.parallel_tool_calls)
    except ValueError as error:
        raise bad_request(str(error), "tools") from None
    if shape is None:
        raise bad_request("strict tools are not supported with this model's form of calls", "tools")
    return _constraint(shape, form)


def _constraint(shape: dict[str, Any], form: AnswerForm) -> dict[str, Any]:
    tag = {"type": "structural_tag", "format": with_tokens(shape, form.marker_ids)}
    whole = {"reasoning_start": None, "reasoning_end": ()} if form.dialect.constrains_reasoning else {}
    return {"structural_tag": json.dumps(tag), **whole}
