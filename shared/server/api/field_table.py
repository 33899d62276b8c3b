"""Fields that no body has: ignored, because they cannot change the answer, or refused with a reason. Bodies,
their errors and the page of the HTTP API are made from this table.

A place is a body, or an object in one: "chat.messages[]" is each entry of `messages`. A place that ends in
".type" lists values of that field in place of names. What is neither here nor in a body is refused by name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from pydantic_core import PydanticCustomError

LOGGER = logging.getLogger("diptych.server")

_CACHED = "every prefix is in the cache already"
_NO_ACCOUNT = "the server has no accounts"
_HISTORY = "it is not part of the prompt"
_NOT_STORED = "nothing is stored between requests: send the whole conversation"
_NO_SUCH_TOOL = "the server runs no tools; the model is not offered this one"

IGNORED: Mapping[str, Mapping[str, str]] = {
    "chat completions": {
        "user": _NO_ACCOUNT,
        "safety_identifier": _NO_ACCOUNT,
        "service_tier": _NO_ACCOUNT,
        "metadata": "nothing is stored",
        "store": "nothing is stored",
        "prompt_cache_key": _CACHED,
        "prompt_cache_options": _CACHED,
        "prompt_cache_retention": _CACHED,
    },
    "chat": {
        "verbosity": "chat templates do not take it",
        "prediction": "it is a hint for speed",
    },
    "chat.stream_options": {"include_obfuscation": "chunks have no padding"},
    "chat.messages[]": {
        "refusal": _HISTORY,
        "annotations": _HISTORY,
        "audio": _HISTORY,
        "provider_specific_fields": _HISTORY,
        "cache_control": _CACHED,
        "signature": _HISTORY,
        "index": _HISTORY,
        "status": _HISTORY,
        "id": _HISTORY,
        "parsed": _HISTORY,
        "reasoning_details": _HISTORY,
        "thinking_blocks": _HISTORY,
        "encrypted_content": _HISTORY,
    },
    "chat.messages[].content[]": {
        "annotations": _HISTORY,
        "cache_control": _CACHED,
        "provider_specific_fields": _HISTORY,
    },
    "chat.messages[].tool_calls[]": {
        "index": _HISTORY,
        "cache_control": _CACHED,
        "extra_content": _HISTORY,
        "provider_specific_fields": _HISTORY,
    },
    "chat.messages[].tool_calls[].function": {
        "parsed_arguments": _HISTORY,
        "provider_specific_fields": _HISTORY,
    },
    "chat.tools[]": {"cache_control": _CACHED, "defer_loading": "all tools are in the prompt"},
    "chat.tools[].function": {"cache_control": _CACHED},
    "embeddings": {"user": _NO_ACCOUNT},
    "responses": {
        "client_metadata": "nothing is stored",
        "context_management": "a conversation is never shortened",
        "max_tool_calls": "the server runs no tools",
        "prompt_cache_options": _CACHED,
        "prompt_cache_retention": _CACHED,
        "store": "nothing is stored",
    },
    "responses.stream_options": {"include_obfuscation": "events have no padding"},
    "responses.reasoning": {"generate_summary": "the reasoning is given whole"},
    "responses.tools[]": {"defer_loading": "all tools are in the prompt", "output_schema": _HISTORY},
    "responses.tools[].type": {
        "image_generation": _NO_SUCH_TOOL,
        "namespace": _NO_SUCH_TOOL,
        "tool_search": _NO_SUCH_TOOL,
        "web_search": _NO_SUCH_TOOL,
        "web_search_preview": _NO_SUCH_TOOL,
    },
    "responses.input[]": {
        "encrypted_content": _HISTORY,
        "id": _HISTORY,
        "namespace": _HISTORY,
        "phase": _HISTORY,
        "status": _HISTORY,
    },
    "responses.input[].type": {
        "additional_tools": _NO_SUCH_TOOL,
        "image_generation_call": _HISTORY,
        "tool_search_call": _HISTORY,
        "tool_search_output": _HISTORY,
        "web_search_call": _HISTORY,
    },
    "responses.input[].content[]": {"annotations": _HISTORY, "logprobs": _HISTORY},
    "messages": {
        "billing_policy": _NO_ACCOUNT,
        "cache_control": _CACHED,
        "diagnostics": _CACHED,
        "fallback_credit_token": _NO_ACCOUNT,
        "fallbacks": "no request is declined",
        "inference_geo": "there is one server",
        "metadata": "nothing is stored",
        "service_tier": _NO_ACCOUNT,
        "speed": "there is one speed",
    },
    "messages.messages[].content[]": {
        "cache_control": _CACHED,
        "caller": _HISTORY,
        "citations": _HISTORY,
        "toolset_name": _HISTORY,
    },
    "messages.messages[].content[].type": {"redacted_thinking": "its text is encrypted"},
    "messages.tools[]": {
        "allowed_callers": "only the model calls tools",
        "cache_control": _CACHED,
        "defer_loading": "all tools are in the prompt",
        "eager_input_streaming": "arguments are always streamed as they are written",
    },
    "messages.thinking": {
        "budget_tokens": "chat templates do not take it",
        "display": "the reasoning is given whole",
    },
}
"""Places -> name -> why it has no effect. A line of the log names it once."""

REFUSED: Mapping[str, Mapping[str, str]] = {
    "chat": {
        "audio": "the server answers in text",
        "chat_template": "the template comes with the model",
        "enable_thinking": "send chat_template_kwargs",
        "function_call": "send tool_choice",
        "functions": "send tools",
        "moderation": "the server does not judge texts",
        "reasoning": "send reasoning_effort",
        "thinking": "send chat_template_kwargs",
        "web_search_options": "the server searches nothing",
    },
    "chat.messages[]": {"function_call": "send tool_calls"},
    "responses": {
        "background": "an answer is given to the request that asks for it",
        "conversation": _NOT_STORED,
        "moderation": "the server does not judge texts",
        "previous_response_id": _NOT_STORED,
        "prompt": "the server has no stored prompts",
    },
    "responses.input[].type": {"item_reference": _NOT_STORED},
    "messages": {
        "compaction": "send a request that asks for a summary",
        "container": "the server runs no tools",
        "mcp_servers": "the server runs no tools",
        "output_format": "send output_config.format",
        "thread": _NOT_STORED,
    },
}
"""Places -> name -> what to do instead."""


class Rule(NamedTuple):
    """What happens to a field with a value."""

    is_ignored: bool
    reason: str


@cache
def rules(place: str) -> Mapping[str, Rule]:
    """The rules of a place, by name."""
    return {
        name: Rule(table is IGNORED, reason)
        for table in (IGNORED, REFUSED)
        for places, fields in table.items()
        if place in places.split()
        for name, reason in fields.items()
    }


_LOGGED: set[tuple[str, str]] = set()


def log_ignored(place: str, name: str, reason: str) -> None:
    """Log that a field has no effect, once for each field of the table."""
    if (place, name) not in _LOGGED:
        _LOGGED.add((place, name))
        LOGGER.warning(f"{place}: {name!r} is ignored: {reason}")


def without_ignored(entries: Any, place: str) -> Any:
    """Remove the entries of a list whose `type` the table ignores. Raises for one that it refuses."""
    if not isinstance(entries, list):
        return entries
    table, kept = rules(f"{place}.type"), []
    for entry in entries:
        kind = entry.get("type") if isinstance(entry, dict) else None
        rule = table.get(kind) if isinstance(kind, str) else None
        if rule is None:
            kept.append(entry)
        elif rule.is_ignored:
            log_ignored(place, str(kind), rule.reason)
        else:
            said = f"type {kind!r} is not supported: {rule.reason}"
            raise PydanticCustomError("refused_entry", "{said}", {"said": said})
    return kept
