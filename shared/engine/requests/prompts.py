"""What a prompt may be, how many prompts a call has, and the token ids of each."""

from __future__ import annotations

from typing import Any

from diptych.shared.engine.build.assembly import Assembly
from diptych.shared.engine.requests.images import ImagesPrompt, images_prompt
from diptych.shared.engine.requests.input_embeds import EmbedsPrompt, embeds_prompt
from diptych.shared.types import PromptEmbeds, SamplingParams

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


def encode_prompt(
    prompt: Any, params: SamplingParams, assembly: Assembly
) -> tuple[list[int], PromptEmbeds | None]:
    """Token ids of a prompt, and the rows that replace some of them. Raises `ValueError` for what is no
    prompt, for what the engine does not take, and for a text that is too long to be tokenized."""
    tokenizer, config = assembly.tokenizer, assembly.config
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("this model has no tokenizer: give the prompt as token ids")
        context_len = config.context_len or 0
        longest = context_len * tokenizer.max_token_bytes
        if len(prompt) > longest:  # refused before it is tokenized
            raise ValueError(
                f"the prompt has {len(prompt)} characters; the context of {context_len} tokens holds at most "
                f"{longest}"
            )
        return tokenizer.encode(prompt), None
    if isinstance(prompt, EmbedsPrompt):
        return embeds_prompt(prompt.rows, params, config, assembly.model_config, assembly.dtype)
    if isinstance(prompt, ImagesPrompt):
        prompt_ids, _ = encode_prompt(prompt.prompt, params, assembly)
        return images_prompt(prompt_ids, prompt.images, config, assembly.model_config, assembly.vision)
    if not isinstance(prompt, (list, tuple)) or not set(map(type, prompt)) <= {int}:
        raise ValueError(
            f"a prompt is a text or a list of token ids, got {type(prompt).__name__}: {prompt!r:.80}"
        )
    return list(prompt), None
