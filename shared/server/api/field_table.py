"""Fields that no body has: ignored, because they cannot change the answer, or refused with a reason. Bodies,
their errors and the page docs/reference/http-fields.md are made from this table.

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
_PLACED = "the server chooses where a request runs"
_HINT = "it is a hint for speed"
_LABELS = "metrics have no labels of clients"
_OTHER_ROUTES = "it belongs to routes that render prompts"
_NO_BEAMS = "beam search is not supported: send n"
_NO_CODE = "code and data of clients do not change sampling"
_OTHER_SERVERS = "the engine finds its other parts itself"
_NOT_GIVEN = "the answer has no such data"
_TEXT_ONLY = "images come in messages; there is no other input beside text"
_NO_SESSIONS = "send the whole prompt"
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
        "spaces_between_special_tokens": "no spaces are written there",
        "length_penalty": "it belongs to beam search",
        "request_id": "ids are the server's",
        "return_token_offsets": _OTHER_ROUTES,
        "return_mm_kwargs": _OTHER_ROUTES,
    },
    "chat completions generate": {
        "session_id": _PLACED,
        "routed_dp_rank": _PLACED,
        "data_parallel_rank": _PLACED,
        "disagg_prefill_dp_rank": _PLACED,
        "custom_labels": _LABELS,
        "ngram_corpus_id": _HINT,
        "stream_interval": "chunks come as tokens come",
    },
    "generate": {
        "conversation_id": "nothing is stored",
        "log_metrics": "all requests count",
        "no_logs": "prompts and answers are not logged",
        "external_trace_header": "requests are not traced",
        "received_time": "the server measures its own times",
        "kv_router_hint": _HINT,
    },
    "generate.sampling_params": {
        "spaces_between_special_tokens": "no spaces are written there",
        "stream_interval": "chunks come as tokens come",
    },
    "chat": {
        "verbosity": "chat templates do not take it",
        "prediction": _HINT,
        "stream_reasoning": "reasoning is streamed as it comes",
    },
    "embeddings score rerank": {"request_id": "ids are the server's", "rid": "ids are the server's"},
    "score rerank": {"user": _NO_ACCOUNT},
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
    "chat completions": {
        "use_beam_search": _NO_BEAMS,
        "watermarking": _NO_CODE,
        "repetition_detection": "send repetition_penalty or stop_regex",
        "thinking_token_budget": "send max_tokens",
        "vllm_xargs": _NO_CODE,
        "kv_transfer_params": _OTHER_SERVERS,
        "ec_transfer_params": _OTHER_SERVERS,
        "routed_experts_prompt_start": _NOT_GIVEN,
        "lora_path": "send the adapter's name as model",
        "images_config": _TEXT_ONLY,
        "return_cached_tokens_details": "usage counts the cached tokens",
    },
    "chat completions generate": {
        "return_hidden_states": _NOT_GIVEN,
        "return_routed_experts": _NOT_GIVEN,
        "routed_experts_start_len": _NOT_GIVEN,
        "session_params": _NO_SESSIONS,
        "custom_logit_processor": _NO_CODE,
        "custom_params": _NO_CODE,
        "bootstrap_host": _OTHER_SERVERS,
        "bootstrap_port": _OTHER_SERVERS,
        "bootstrap_room": _OTHER_SERVERS,
    },
    "completions": {
        "json_schema": "send response_format or guided_json",
        "prompt_embeds": "send /generate input_embeds",
    },
    "generate": {
        "image_data": _TEXT_ONLY,
        "audio_data": _TEXT_ONLY,
        "video_data": _TEXT_ONLY,
        "return_sampling_mask": _NOT_GIVEN,
        "return_entropy": _NOT_GIVEN,
        "background": "an answer is given to the request that asks for it",
        "max_thinking_tokens": "send max_new_tokens",
        "positional_embed_overrides": "send input_embeds",
    },
    "generate.sampling_params": {
        "beam_width": _NO_BEAMS,
        "custom_params": _NO_CODE,
        "stop_strs": "send stop",
        "stop_regex_strs": "send stop_regex",
    },
    "score rerank": {
        "query_embed_overrides": "send texts or token ids",
        "item_embed_overrides": "send texts or token ids",
        "embed_override_token_id": "send texts or token ids",
        "return_pooled_hidden_states": "send the texts to /v1/embeddings",
        "instruct": "write the instruction into the query",
    },
    "chat": {
        "audio": "the server answers in text",
        "chat_template": "the template comes with the model",
        "documents": "send chat_template_kwargs",
        "input_ids": "send /v1/completions with token ids",
        "add_special_tokens": "the template writes them",
        "media_io_kwargs": _TEXT_ONLY,
        "mm_processor_kwargs": _TEXT_ONLY,
        "return_prompt_text": "send /apply-template",
        "return_meta_info": "usage and choices have it",
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
