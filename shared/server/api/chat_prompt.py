"""What an answer of the chat API repeats of its prompt."""

from __future__ import annotations

from typing import Any

from diptych.shared.server.api.encode_prompts import Prompts
from diptych.shared.server.api.logprob_fields import TokenTexts, prompt_entries
from diptych.shared.server.api.protocol import ChatRequest
from diptych.shared.server.http.errors import bad_request
from diptych.shared.types import TokenLogprob

PROMPT_FIELDS = ("prompt_token_ids", "prompt_logprobs")
"""Of the first chunk, and of a whole answer."""


def template_args_of(body: ChatRequest, prompts: Prompts) -> dict[str, Any]:
    """What the chat template gets beside messages and tools. 400 for a switch that is none, and for a message
    that cannot be continued."""
    args = dict(body.chat_template_kwargs or {})
    prompts.check_template_args(args)
    if body.reasoning_effort is not None:
        args.setdefault("reasoning_effort", body.reasoning_effort)
    if not body.continue_final_message:
        return {**args, "add_generation_prompt": body.add_generation_prompt}
    if body.add_generation_prompt and "add_generation_prompt" in body.model_fields_set:
        raise bad_request(
            "continue_final_message and add_generation_prompt exclude each other", "add_generation_prompt"
        )
    last = body.messages[-1]
    if last.role != "assistant" or last.tool_calls or not last_answer(body):
        raise bad_request(
            "continue_final_message needs a last message of the assistant with text and without calls",
            "messages",
        )
    return {**args, "add_generation_prompt": False, "continue_final_message": True}


def prompt_fields(
    body: ChatRequest, prompt: list[int], texts: TokenTexts, logprobs: list[TokenLogprob]
) -> dict[str, Any]:
    """The token ids of the prompt and their log-probabilities, if asked for."""
    fields: dict[str, Any] = {}
    if body.return_token_ids or body.return_prompt_token_ids:
        fields["prompt_token_ids"] = prompt
    if body.prompt_logprobs is not None:
        fields["prompt_logprobs"] = prompt_entries(texts, logprobs, body.prompt_logprobs)
    return fields


def last_answer(body: ChatRequest) -> str:
    """The text of a last message of the assistant, which `echo` puts before the answer."""
    last = body.messages[-1]
    if last.role != "assistant" or last.content is None:
        return ""
    if isinstance(last.content, str):
        return last.content
    return "".join(part.text for part in last.content if part.type == "text")
