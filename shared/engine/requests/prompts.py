"""What a prompt may be, and how many prompts a call has."""

from __future__ import annotations

from typing import Any

from diptych.shared.engine.requests.images import ImagesPrompt
from diptych.shared.engine.requests.input_embeds import EmbedsPrompt
from diptych.shared.text.tokenizer import Tokenizer

Prompt = str | list[int] | EmbedsPrompt | ImagesPrompt
WHOLE_PROMPTS = (str, EmbedsPrompt, ImagesPrompt)


def prompt_list(prompts: Any) -> tuple[list[Prompt], bool]:
    """The prompts of a call, and whether it gave a single one. A list that begins with a token id is one
    prompt. Raises `ValueError` for what is neither a prompt nor a list."""
    if isinstance(prompts, WHOLE_PROMPTS):
        return [prompts], True
    if not isinstance(prompts, (list, tuple)):
        raise ValueError(
            "prompts must be a text, a list of token ids, or a list of such prompts, got "
            f"{type(prompts).__name__}: {prompts!r:.80}"
        )
    if prompts and isinstance(prompts[0], int):
        return [prompts], True  # type: ignore[list-item]
    return list(prompts), False


def plain_prompt_ids(prompt: Any, tokenizer: Tokenizer | None, context_len: int) -> list[int]:
    """Token ids of a text or of a list of token ids. Raises `ValueError` for anything else, and for a text
    that is too long to be tokenized."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("this model has no tokenizer: give the prompt as token ids")
        longest = max_prompt_chars(tokenizer, context_len)
        if len(prompt) > longest:  # refused before it is tokenized
            raise ValueError(
                f"the prompt has {len(prompt)} characters; the context of {context_len} tokens holds at most "
                f"{longest}"
            )
        return tokenizer.encode(prompt)
    if not isinstance(prompt, (list, tuple)) or not set(map(type, prompt)) <= {int}:
        raise ValueError(
            f"a prompt is a text or a list of token ids, got {type(prompt).__name__}: {prompt!r:.80}"
        )
    return list(prompt)


def max_prompt_chars(tokenizer: Tokenizer, context_len: int) -> int:
    """No longer text can fit the context."""
    return context_len * tokenizer.max_token_bytes
