"""Endpoints beside OpenAI's: native generation, tokens, and facts of the model."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import Response

from diptych.shared.engine.requests.input_embeds import PLACEHOLDER
from diptych.shared.server.api.answers import respond
from diptych.shared.server.api.generation import Generation, Usage
from diptych.shared.server.api.logprob_fields import finite
from diptych.shared.server.api.native_protocol import DetokenizeRequest, NativeRequest, TokenizeRequest
from diptych.shared.server.api.state import ServerState
from diptych.shared.server.http.errors import ApiError, bad_request, first_word, renamed
from diptych.shared.types import SamplingParams, TokenLogprob


def add_native_routes(app: FastAPI, state: ServerState) -> None:
    """/generate, /tokenize, /detokenize and what clients ask about the model."""

    @app.post("/generate")
    async def generate(body: NativeRequest, request: Request) -> Response:
        generation = await _start(body, state)
        answers = _answers(body, generation)
        return await respond(request, body.stream, answers, generation, _fold)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("give either prompt or messages", "prompt")
        if body.prompt is not None:
            ids = await state.prompts.of_text(body.prompt, "prompt", body.add_special_tokens)
        else:
            args = {"add_generation_prompt": body.add_generation_prompt}
            ids = (await state.prompts.of_messages(body.messages or [], None, args)).ids
        return {"tokens": ids, "count": len(ids), "max_model_len": state.ready.context_len}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        text = await state.prompts.to_text(body.tokens, body.skip_special_tokens)
        return {"prompt": text, "text": text}

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        tokenizer = state.prompts.tokenizer
        if tokenizer is None:
            raise ApiError(404, "this model has no tokenizer")
        eos = getattr(tokenizer.hf_tokenizer, "eos_token", None)
        return {
            "eos_token": eos,
            "vocab_size": tokenizer.vocab_size,
            "chat_template": tokenizer.hf_tokenizer.chat_template,
        }

    @app.get("/model_info")
    @app.get("/get_model_info")
    async def model_info() -> dict[str, Any]:
        return {
            "model_path": state.model_name,
            "is_generation": True,
            "context_length": state.ready.context_len,
            "vocab_size": state.ready.vocab_size,
            "weight_version": state.client.load.weight_version,
        }


async def _start(body: NativeRequest, state: ServerState) -> Generation:
    if body.lora_path is not None and body.lora_path not in state.adapters:
        raise ApiError(404, f"no LoRA adapter {body.lora_path!r} is loaded", param="lora_path")
    if [body.text, body.input_ids, body.input_embeds].count(None) != 2:
        raise bad_request("give one of text, input_ids and input_embeds", "text")
    input_embeds = b""
    if body.input_embeds is not None:
        field, input_embeds = "input_embeds", _as_bytes(body.input_embeds)
        prompt = [PLACEHOLDER] * len(body.input_embeds)
    elif body.input_ids is not None:
        field, prompt = "input_ids", body.input_ids
    else:
        field, prompt = "text", await state.prompts.of_text(body.text or "", "text")
    fields = body.sampling_params.fields()
    state.prompts.check(prompt, field)
    room = state.prompts.ready.context_len - len(prompt)
    fields["max_new_tokens"] = min(fields["max_new_tokens"], room)
    try:
        params = SamplingParams(
            **fields,
            return_logprob=body.return_logprob,
            top_logprobs_num=body.top_logprobs_num,
            logprob_start_len=body.logprob_start_len,
        )
    except ValueError as error:
        name = first_word(error)
        field = name if name in NativeRequest.model_fields else f"sampling_params.{name}"
        raise bad_request(str(error), field) from None
    with renamed({name: f"sampling_params.{name}" for name in fields}):
        state.prompts.check(prompt, field, params)
    state.check_admission(1, params.n)
    seed = body.sampling_params.seed
    seed = body.sampling_params.sampling_seed if seed is None else seed
    return Generation(
        state.client,
        state.prompts.tokenizer,
        state.metrics,
        [prompt],
        params,
        seed=secrets.randbits(63) if seed is None else seed,
        priority=body.priority,
        lora=body.lora_path,
        input_embeds=input_embeds,
        name=body.rid,
    )


def _as_bytes(rows: list[list[float]]) -> bytes:
    """float32, row after row."""
    widths = {len(row) for row in rows}
    if len(widths) != 1 or 0 in widths:
        raise bad_request(f"rows of input_embeds must be of one length, got {sorted(widths)}", "input_embeds")
    with np.errstate(over="ignore"):  # the engine refuses what is not finite
        return np.array(rows, np.float32).tobytes()


async def _answers(body: NativeRequest, generation: Generation) -> AsyncIterator[dict[str, Any]]:
    """Answers with cumulative text: of a stream one for each delta, else the last one of each sample."""
    texts = [""] * len(generation.samples)
    ids: list[list[int]] = [[] for _ in generation.samples]
    logprobs: list[list[Any]] = [[] for _ in generation.samples]
    prompt_logprobs: list[list[Any]] = [[] for _ in generation.samples]
    num_top = body.top_logprobs_num
    tops: list[list[Any]] = [[] for _ in generation.samples]
    prompt_tops: list[list[Any]] = [[] for _ in generation.samples]
    async for deltas in generation.run():
        for index, delta in deltas:
            sample = generation.samples[index]
            texts[index] += delta.text
            ids[index] += delta.token_ids
            logprobs[index] += [_entry(p.token_id, p.logprob) for p in delta.logprobs]
            prompt_logprobs[index] += [_entry(p.token_id, p.logprob) for p in delta.input_logprobs]
            tops[index] += [_alternatives(p, num_top) for p in delta.logprobs]
            prompt_tops[index] += [_alternatives(p, num_top) for p in delta.input_logprobs]
            finish = delta.finish
            if finish is None and not body.stream:
                continue
            reason: dict[str, Any] | None = {"type": finish.kind} if finish is not None else None
            if finish is not None and finish.kind == "stop":
                reason = {"type": "stop", "matched": finish.matched or finish.token_id}
            if finish is not None and finish.kind == "length":
                reason = {"type": "length", "length": finish.length}
            meta: dict[str, Any] = {
                "id": body.rid or sample.rid,
                "finish_reason": reason,
                "prompt_tokens": sample.num_prompt_tokens,
                "completion_tokens": len(ids[index]),
                "cached_tokens": sample.num_cached_tokens,
                "e2e_latency": time.monotonic() - generation.start_time,
                "weight_version": delta.weight_version,
            }
            if body.return_logprob:
                meta["output_token_logprobs"] = logprobs[index]
                meta["input_token_logprobs"] = prompt_logprobs[index]
            if num_top:
                meta["output_top_logprobs"] = tops[index]
                meta["input_top_logprobs"] = prompt_tops[index]
            yield {"index": index, "text": texts[index], "output_ids": ids[index], "meta_info": meta}


def _entry(token_id: int, logprob: float | None) -> list[Any]:
    return [None if logprob is None else finite(logprob), token_id, None]


def _alternatives(found: TokenLogprob, num_top: int) -> list[list[Any]] | None:
    """The likeliest tokens in this place, best first; None for the first prompt token."""
    if found.logprob is None:
        return None
    return [_entry(token_id, logprob) for token_id, logprob in found.top[:num_top]]


def _fold(answers: list[dict[str, Any]], usage: Usage) -> Any:
    """The answers in order; a single one without a list."""
    outputs = sorted(answers, key=lambda answer: answer["index"])
    return outputs[0] if len(outputs) == 1 else outputs
