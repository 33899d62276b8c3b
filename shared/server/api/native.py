"""/generate: native generation in the manner of SGLang, with token ids in and out."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from diptych.shared.server.api import sse
from diptych.shared.server.api.answers import respond
from diptych.shared.server.api.generation import Generation, Usage
from diptych.shared.server.api.logprob_fields import TokenTexts, finite
from diptych.shared.server.api.long_answers import in_turn
from diptych.shared.server.api.native_prompts import start_native
from diptych.shared.server.api.native_protocol import NativeRequest
from diptych.shared.server.api.state import ServerState
from diptych.shared.server.engine.engine_client import Delta
from diptych.shared.server.engine.messages import Finish
from diptych.shared.types import TokenLogprob


def add_native_routes(app: FastAPI, state: ServerState) -> None:
    @app.post("/generate")
    async def generate(body: NativeRequest, request: Request) -> Response:
        generation = await start_native(body, state)
        is_list = len(generation.samples) > 1 or _is_batch(body)

        def fold(answers: list[dict[str, Any]], usage: Usage) -> Any:
            outputs = sorted(answers, key=lambda answer: answer["index"])
            return outputs if is_list else outputs[0]

        answers = _answers(body, generation, state)
        return await respond(request, body.stream, answers, generation, fold, sse.long_events)


def _is_batch(body: NativeRequest) -> bool:
    """Whether the prompts came as a list, whose answers are a list too, be it of one."""
    prompts: Any = body.text if body.input_ids is None else body.input_ids
    if body.input_embeds is not None:
        prompts = body.input_embeds[0]
    return isinstance(prompts, list) and (not prompts or not isinstance(prompts[0], (int, float)))


class _Logprobs:
    """Log-probabilities of one kind, as they come: [logprob, token id, text] for each token."""

    def __init__(self, name: str, texts: TokenTexts | None) -> None:
        self.name = name  # output or input
        self.texts = texts
        self.tokens: list[Any] = []
        self.tops: list[Any] = []
        self.asked: list[Any] = []

    def add(self, found: Sequence[TokenLogprob]) -> None:
        for each in found:
            self.tokens.append(self._entry(each.token_id, each.logprob))
            for alternatives, entries in ((each.top, self.tops), (each.asked, self.asked)):
                is_first = each.logprob is None  # nothing precedes the first prompt token
                entries.append(None if is_first else tuple(self._entry(*pair) for pair in alternatives))

    def _entry(self, token_id: int, logprob: float | None) -> tuple[float | None, int, str | None]:
        """A tuple: the garbage collector does not visit it again and again, as it does a list."""
        text = self.texts.text_of(token_id) if self.texts is not None else None
        return None if logprob is None else finite(logprob), token_id, text

    def fields(self, has_top: bool, has_asked: bool) -> dict[str, Any]:
        found = {f"{self.name}_token_logprobs": self.tokens}
        if has_top:
            found[f"{self.name}_top_logprobs"] = self.tops
        if has_asked:
            found[f"{self.name}_token_ids_logprobs"] = self.asked
        return found


async def _answers(
    body: NativeRequest, generation: Generation, state: ServerState
) -> AsyncIterator[dict[str, Any]]:
    """Answers with cumulative text: of a stream one for each delta, else the last one of each sample."""
    token_texts: TokenTexts | None = None
    if body.return_text_in_logprobs:
        token_texts = TokenTexts(state.prompts.token_bytes, as_ids=False)
    texts = [""] * len(generation.samples)
    ids: list[list[int]] = [[] for _ in generation.samples]
    logprobs = [[_Logprobs(kind, token_texts) for kind in ("output", "input")] for _ in generation.samples]
    async for deltas in generation.run():
        for index, delta in deltas:
            sample, params = generation.samples[index], generation.params_of(index)
            texts[index] += delta.text
            ids[index] += delta.token_ids
            for found, kind in zip((delta.logprobs, delta.input_logprobs), logprobs[index]):
                await in_turn(generation.num_values(index, len(found)), kind.add, found)
            if delta.finish is None and not body.stream:
                continue
            meta: dict[str, Any] = {
                "id": generation.name_of(index) or sample.rid,
                "finish_reason": _reason(delta),
                "prompt_tokens": sample.num_prompt_tokens,
                "completion_tokens": len(ids[index]),
                "cached_tokens": sample.num_cached_tokens,
                "e2e_latency": time.monotonic() - generation.start_time,
                "weight_version": delta.weight_version,
            }
            for kind in logprobs[index] if params.return_logprob else ():
                meta |= kind.fields(bool(params.top_logprobs_num), bool(params.token_ids_logprob))
            answer = {"index": index, "text": texts[index], "output_ids": ids[index], "meta_info": meta}
            if body.return_prompt_token_ids:
                answer["prompt_token_ids"] = generation.prompt_of(index)
            yield answer


def _reason(delta: Delta) -> dict[str, Any] | None:
    finish: Finish | None = delta.finish
    if finish is None:
        return None
    more: dict[str, Any] = {}
    if finish.kind == "stop":
        more = {"matched": finish.matched or finish.token_id}
    elif finish.kind == "length":
        more = {"length": finish.length}
    elif finish.kind == "abort":
        more = {"message": finish.message}
    return {"type": finish.kind, **more}
