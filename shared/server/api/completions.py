"""/v1/completions: prompts to a generation, and its deltas to chunks; a whole response is their fold."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from diptych.shared.server.api.chat import usage_body, usage_of_chunk
from diptych.shared.server.api.encode_prompts import for_each
from diptych.shared.server.api.generation import Generation, Usage
from diptych.shared.server.api.logprob_fields import CompletionLogprobs, TokenTexts, prompt_entries
from diptych.shared.server.api.long_answers import in_turn
from diptych.shared.server.api.protocol import CompletionRequest
from diptych.shared.server.api.state import HEAD, ServerState
from diptych.shared.server.api.token_fields import FIELDS_OF_PARAMS
from diptych.shared.server.engine.engine_client import Delta
from diptych.shared.server.http.errors import bad_request, renamed

DEFAULT_MAX_TOKENS = 16
Chunk = dict[str, Any]


async def start_completion(body: CompletionRequest, state: ServerState) -> Generation:
    """Validate everything and make the generation; nothing runs yet."""
    if body.suffix is not None:
        raise bad_request("suffix is not supported", "suffix")
    max_new_tokens = body.max_tokens if body.max_tokens is not None else DEFAULT_MAX_TOKENS
    room = state.prompts.ready.context_len - max(max_new_tokens, 1)
    given = await state.prompts.of_each(body.prompt, "prompt", body.add_special_tokens)
    prompts = [body.truncated(prompt, room) for prompt in given]
    echoes_logprobs = body.echo and body.logprobs is not None
    more = {"logprob_start_len": 0} if echoes_logprobs else {}
    params = body.sampling_params(max_new_tokens, body.logprobs, state.sampling_defaults, **more)
    with renamed(FIELDS_OF_PARAMS):
        await for_each(state.prompts.check, prompts, "prompt", params)
    params = await state.prompts.with_words(params)
    return state.generation(prompts, params, body)


class CompletionChoice:
    """One choice: its log-probabilities' offsets, and the echo that comes first."""

    def __init__(
        self, body: CompletionRequest, echo: str, texts: TokenTexts, special_ids: frozenset[int]
    ) -> None:
        self.echo = echo
        self.echoes_logprobs = body.echo
        self.logprobs: CompletionLogprobs | None = None
        if body.logprobs is not None:
            skipped = special_ids if body.skip_special_tokens else frozenset[int]()
            self.logprobs = CompletionLogprobs(texts, body.logprobs, skipped)

    def piece(self, delta: Delta) -> tuple[str, dict[str, Any] | None]:
        """Text and log-probabilities of a delta; the first one begins with the echoed prompt."""
        text, self.echo = self.echo + delta.text, ""
        found = [*(delta.input_logprobs if self.echoes_logprobs else ()), *delta.logprobs]
        return text, self.logprobs.piece(found) if self.logprobs is not None and found else None


async def completion_chunks(
    body: CompletionRequest, generation: Generation, state: ServerState
) -> AsyncIterator[Chunk]:
    """Text chunks; the last one of a choice carries its finish_reason. Then usage, if asked for."""
    head = state.head_of("cmpl", "text_completion", body.model)
    with_ids = body.return_token_ids
    if with_ids is None:
        with_ids = state.prompts.tokenizer is None
    texts = TokenTexts(state.prompts.token_bytes, body.return_tokens_as_token_ids)
    tokenizer = state.prompts.tokenizer
    special_ids = tokenizer.special_ids if tokenizer is not None else frozenset[int]()
    echoes = [await _echo(body, state, prompt) for prompt in generation.prompts]
    n = generation.params.n
    choices = [
        CompletionChoice(body, echoes[sample.index // n], texts, special_ids) for sample in generation.samples
    ]
    has_begun = [False] * len(choices)
    async for deltas in generation.run():
        for index, delta in deltas:
            size = generation.num_values(index, len(delta.input_logprobs))
            text, logprobs = await in_turn(size, choices[index].piece, delta)
            finish = delta.finish
            is_first = not has_begun[index]
            has_prompt_logprobs = is_first and body.prompt_logprobs is not None
            has_ids = with_ids and delta.token_ids
            if not (text or logprobs or finish or has_ids or has_prompt_logprobs):
                continue
            entry: dict[str, Any] = {
                "index": index,
                "text": text,
                "logprobs": logprobs,
                "finish_reason": finish.kind if finish is not None else None,
            }
            if with_ids:
                entry["token_ids"] = delta.token_ids
                if is_first:
                    entry["prompt_token_ids"] = generation.prompt_of(index)
            if is_first and body.prompt_logprobs is not None:
                given = delta.input_logprobs, body.prompt_logprobs
                entry["prompt_logprobs"] = await in_turn(size, prompt_entries, texts, *given)
            has_begun[index] = True
            if finish is not None:
                entry["matched_stop"] = finish.matched or finish.token_id
            yield {**head, "choices": [entry], **usage_of_chunk(body.stream_options, generation)}
    if body.stream_options is not None and body.stream_options.include_usage:
        yield {**head, "choices": [], "usage": usage_body(generation.usage)}


async def _echo(body: CompletionRequest, state: ServerState, prompt: list[int]) -> str:
    if not body.echo or state.prompts.tokenizer is None:
        return ""
    return await state.prompts.to_text(prompt, body.skip_special_tokens)


def fold_completion(chunks: list[Chunk], usage: Usage) -> dict[str, Any]:
    """The response of a request that does not stream."""
    choices: dict[int, dict[str, Any]] = {}
    texts: dict[int, list[str]] = {}  # joined once, at the end
    for chunk in chunks:
        for entry in chunk["choices"]:
            index = entry["index"]
            texts.setdefault(index, []).append(entry["text"])
            choice = choices.get(index)
            if choice is None:
                choice = choices[index] = {**entry, "logprobs": None}
                if "token_ids" in entry:
                    choice["token_ids"] = [*entry["token_ids"]]
            elif "token_ids" in entry:
                choice["token_ids"] += entry["token_ids"]
            if entry["logprobs"] is not None:
                choice["logprobs"] = choice["logprobs"] or {name: [] for name in entry["logprobs"]}
                for name, values in entry["logprobs"].items():
                    choice["logprobs"][name] += values
            if entry["finish_reason"] is not None:
                choice |= {name: entry[name] for name in ("finish_reason", "matched_stop")}
    for index, parts in texts.items():
        choices[index]["text"] = "".join(parts)
    head = {name: chunks[0][name] for name in HEAD}
    return {**head, "choices": [choices[i] for i in sorted(choices)], "usage": usage_body(usage)}
