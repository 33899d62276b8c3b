"""What an answer of the chat API repeats of its prompt."""

from __future__ import annotations

from typing import Any

from diptych.shared.server.api.logprob_fields import TokenTexts, prompt_entries
from diptych.shared.server.api.protocol import ChatRequest
from diptych.shared.server.engine.engine_client import Delta

PROMPT_FIELDS = ("prompt_token_ids", "prompt_logprobs")
"""Of the first chunk, and of a whole answer."""


def prompt_fields(body: ChatRequest, prompt: list[int], texts: TokenTexts, first: Delta) -> dict[str, Any]:
    """The token ids of the prompt and their log-probabilities, if asked for. first: of a choice."""
    fields: dict[str, Any] = {}
    if body.return_token_ids or body.return_prompt_token_ids:
        fields["prompt_token_ids"] = prompt
    if body.prompt_logprobs is not None:
        fields["prompt_logprobs"] = prompt_entries(texts, first.input_logprobs, body.prompt_logprobs)
    return fields


def last_answer(body: ChatRequest) -> str:
    """The text of a last message of the assistant, which `echo` puts before the answer."""
    last = body.messages[-1]
    if last.role != "assistant" or last.content is None:
        return ""
    if isinstance(last.content, str):
        return last.content
    return "".join(part.text for part in last.content if part.type == "text")
