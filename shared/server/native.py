"""Endpoints beside OpenAI's: native generation, tokens, and the administration of the engine."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from ipaddress import ip_address
from typing import Any

import numpy as np
from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response

from shared.engine.input_embeds import PLACEHOLDER
from shared.server.answers import respond
from shared.server.errors import ApiError, bad_request
from shared.server.generation import Generation, Usage
from shared.server.protocol import (
    DetokenizeRequest,
    LoadLoraRequest,
    NativeRequest,
    TokenizeRequest,
    UnloadLoraRequest,
)
from shared.server.state import ServerState
from shared.types import SamplingParams


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
            ids = await state.prompts.of_text(body.prompt, body.add_special_tokens)
        else:
            args = {"add_generation_prompt": body.add_generation_prompt}
            ids = await state.prompts.of_messages(body.messages or [], None, args)
        return {"tokens": ids, "count": len(ids), "max_model_len": state.ready.context_len}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        tokenizer = state.prompts.tokenizer
        if tokenizer is None:
            raise bad_request("this model has no tokenizer")
        if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < state.ready.vocab_size:
            raise bad_request(f"tokens must be in [0, {state.ready.vocab_size})", "tokens")
        text = tokenizer.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)
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
        }


async def _start(body: NativeRequest, state: ServerState) -> Generation:
    if body.lora_path is not None and body.lora_path not in state.adapters:
        raise ApiError(404, f"no LoRA adapter {body.lora_path!r} is loaded", param="lora_path")
    if [body.text, body.input_ids, body.input_embeds].count(None) != 2:
        raise bad_request("give one of text, input_ids and input_embeds", "text")
    input_embeds = b""
    if body.input_embeds is not None:
        input_embeds = _as_bytes(body.input_embeds)
        prompt = [PLACEHOLDER] * len(body.input_embeds)
    elif body.input_ids is not None:
        prompt = body.input_ids
    else:
        prompt = await state.prompts.of_text(body.text or "")
    fields = body.sampling_params.model_dump(exclude={"sampling_seed", "seed", "stop", "stop_regex"})
    stops = {
        name: (value,)
        if isinstance(value := getattr(body.sampling_params, name), str)
        else tuple(value or ())
        for name in ("stop", "stop_regex")
    }
    fields |= {name: tuple(fields[name] or ()) for name in ("stop_token_ids", "choice")}
    state.prompts.check(prompt)
    room = state.prompts.ready.context_len - len(prompt)
    fields["max_new_tokens"] = min(fields["max_new_tokens"], room)
    try:
        params = SamplingParams(
            **fields,
            **stops,
            return_logprob=body.return_logprob,
            top_logprobs_num=body.top_logprobs_num if body.return_logprob else 0,
            logprob_start_len=body.logprob_start_len if body.return_logprob else -1,
        )
    except ValueError as error:
        raise bad_request(str(error), "sampling_params") from None
    state.prompts.check(prompt, params)
    state.check_admission(params.n)
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
    async for deltas in generation.run():
        for index, delta in deltas:
            sample = generation.samples[index]
            texts[index] += delta.text
            ids[index] += delta.token_ids
            logprobs[index] += [[p.logprob, p.token_id, None] for p in delta.logprobs]
            prompt_logprobs[index] += [[p.logprob, p.token_id, None] for p in delta.input_logprobs]
            finish = delta.finish
            if finish is None and not body.stream:
                continue
            reason = {"type": finish.kind} if finish is not None else None
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
            }
            if body.return_logprob:
                meta["output_token_logprobs"] = logprobs[index]
                meta["input_token_logprobs"] = prompt_logprobs[index]
            yield {"index": index, "text": texts[index], "output_ids": ids[index], "meta_info": meta}


def _fold(answers: list[dict[str, Any]], usage: Usage) -> Any:
    """The answers in order; a single one without a list."""
    outputs = sorted(answers, key=lambda answer: answer["index"])
    return outputs[0] if len(outputs) == 1 else outputs


def add_admin_routes(app: FastAPI, state: ServerState) -> None:
    """Operations on the engine. With API keys they need one; without, they answer loopback only."""

    def guard(request: Request) -> None:
        host = request.client.host if request.client is not None else None
        if not state.settings.api_keys and host is not None and not _is_loopback(host):
            raise ApiError(403, "admin endpoints answer loopback only, or need an API key")

    admin = [Depends(guard)]

    @app.post("/flush_cache", dependencies=admin)
    async def flush_cache(timeout: float = 0.0) -> Response:
        """Empty the prefix cache; wait at most `timeout` seconds until the engine is idle."""
        end = time.monotonic() + min(max(timeout, 0.0), 600.0)
        while True:
            result = await state.client.control("flush_cache")
            if result["flushed"] or time.monotonic() >= end:
                break
            await asyncio.sleep(0.05)
        if not result["flushed"]:
            raise ApiError(409, "the cache cannot be flushed while requests are alive")
        return JSONResponse({"success": True})

    @app.post("/abort_request", dependencies=admin)
    async def abort_request(request: Request) -> dict[str, Any]:
        """End all requests ({"abort_all": true}); single ones end when their client leaves."""
        try:
            body = await request.json()
        except ValueError:
            raise bad_request("the body is not valid JSON") from None
        if not isinstance(body, dict) or body.get("abort_all") is not True:
            raise bad_request('the body must be {"abort_all": true}', "abort_all")
        return await state.client.control("abort_all")

    @app.post("/pause_generation", dependencies=admin)
    async def pause_generation(request: Request) -> dict[str, Any]:
        """Run no step until /continue_generation. Body: {"mode": "in_place" | "retract" | "abort"}."""
        text = await request.body()
        mode = "in_place"
        if text:
            body = await request.json()
            mode = body.get("mode", mode) if isinstance(body, dict) else mode
        try:
            await state.client.control("pause", mode=mode)
        except ValueError as error:
            raise bad_request(str(error), "mode") from None
        return {"paused": True}

    @app.post("/continue_generation", dependencies=admin)
    async def continue_generation() -> dict[str, Any]:
        await state.client.control("continue")
        return {"paused": False}

    @app.post("/load_lora_adapter", dependencies=admin)
    @app.post("/v1/load_lora_adapter", dependencies=admin)
    async def load_lora_adapter(body: LoadLoraRequest) -> dict[str, Any]:
        """From a folder of the server's computer. Requests may name it as their model afterwards."""
        if body.lora_name == state.model_name:
            raise bad_request(f"{body.lora_name!r} is the name of the model", "lora_name")
        try:
            await state.client.control("load_lora", name=body.lora_name, path=body.lora_path)
        except ValueError as error:
            raise bad_request(str(error), "lora_path") from None
        state.adapters.add(body.lora_name)
        return {"success": True, "loaded_adapters": sorted(state.adapters)}

    @app.post("/unload_lora_adapter", dependencies=admin)
    @app.post("/v1/unload_lora_adapter", dependencies=admin)
    async def unload_lora_adapter(body: UnloadLoraRequest) -> dict[str, Any]:
        """Refused with 400 while requests use it."""
        try:
            await state.client.control("unload_lora", name=body.lora_name)
        except ValueError as error:
            raise bad_request(str(error), "lora_name") from None
        state.adapters.discard(body.lora_name)
        return {"success": True, "loaded_adapters": sorted(state.adapters)}

    @app.get("/server_info", dependencies=admin)
    @app.get("/get_server_info", dependencies=admin)
    async def server_info() -> dict[str, Any]:
        load = await state.client.control("load")
        verifications = load["num_verifications"]
        accept = load["num_accepted_tokens"] / max(verifications, 1) + (verifications > 0)
        return {
            "model": state.model_name,
            "context_len": state.ready.context_len,
            "max_total_num_tokens": state.ready.max_total_tokens,
            "components": state.ready.description,
            "num_live_requests": state.client.num_live,
            "load": load,
            "internal_states": [{"avg_spec_accept_length": accept}],
        }


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "testclient"
