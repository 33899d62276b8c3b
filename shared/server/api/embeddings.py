"""/v1/embeddings, as OpenAI defines it, and /classify for the scores of reward models."""

from __future__ import annotations

import base64
import struct
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import Field

from diptych.shared.engine.requests.embedding import NO_TOKENS, finish_embedding
from diptych.shared.server.api.answers import check_model
from diptych.shared.server.api.encode_prompts import for_each
from diptych.shared.server.api.field_types import Key, Priority
from diptych.shared.server.api.generation import Generation
from diptych.shared.server.api.long_answers import json_answer, num_values
from diptych.shared.server.api.state import ServerState
from diptych.shared.server.api.token_fields import TruncationFields
from diptych.shared.server.http.access import caller_of
from diptych.shared.server.http.connections import until_disconnect
from diptych.shared.server.http.errors import bad_request


class PoolingFields(TruncationFields):
    """Fields of all requests that want vectors."""

    model: str | None = None
    cache_salt: Key | None = None
    priority: Priority = 0


class PoolingRequest(PoolingFields):
    """/classify, and fields of both."""

    place = "embeddings"

    input: str | list[str] | list[int] | list[list[int]]
    add_special_tokens: bool = True


class EmbeddingRequest(PoolingRequest):
    """/v1/embeddings"""

    dimensions: Annotated[int, Field(ge=1)] | None = None
    encoding_format: Literal["float", "base64"] = "float"


def add_embedding_routes(app: FastAPI, state: ServerState) -> None:
    @app.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        vectors, num_tokens = await until_disconnect(request, _vectors(body, request, state, num_labels=0))
        size = len(vectors[0])
        if body.dimensions is not None and body.dimensions > size:
            raise bad_request(f"dimensions must be at most {size}, got {body.dimensions}", "dimensions")

        def make() -> dict[str, Any]:
            data = [
                {
                    "object": "embedding",
                    "index": i,
                    "embedding": _encoded(finish_embedding(v, body.dimensions), body),
                }
                for i, v in enumerate(vectors)
            ]
            return _answer(data, num_tokens, body, state)

        return await json_answer(num_values(vectors), make)

    @app.post("/classify")
    async def classify(body: PoolingRequest, request: Request) -> Response:
        vectors, num_tokens = await until_disconnect(request, _vectors(body, request, state, num_labels=1))
        data = [{"object": "scores", "index": i, "scores": v} for i, v in enumerate(vectors)]
        return await json_answer(num_values(vectors), lambda: _answer(data, num_tokens, body, state))


async def _vectors(
    body: PoolingRequest, request: Request, state: ServerState, num_labels: int
) -> tuple[list[list[float]], int]:
    """One for each prompt, and the number of prompt tokens. num_labels: 0 for embeddings."""
    check_model(body.model, state)
    if bool(state.ready.num_labels) != bool(num_labels):
        kind = "scores: POST /classify" if state.ready.num_labels else "embeddings: POST /v1/embeddings"
        raise bad_request(f"this model gives {kind}")
    prompts = await state.prompts.of_each(body.input, "input", body.add_special_tokens)
    return await pooled(prompts, "input", body, request, state)


async def pooled(
    prompts: list[list[int]], field: str, body: PoolingFields, request: Request, state: ServerState
) -> tuple[list[list[float]], int]:
    """What the model gives for each prompt, and the number of prompt tokens. field: of the body, from which
    the prompts come."""
    prompts = [body.truncated(prompt, state.ready.context_len - 1) for prompt in prompts]
    await for_each(state.prompts.check, prompts, field, NO_TOKENS)
    state.check_admission(len(prompts))
    generation = Generation(
        state.client,
        None,  # there is no text
        state.metrics,
        prompts,
        NO_TOKENS,
        seed=0,
        extra_key=body.cache_salt,
        priority=body.priority,
        lora=state.adapter_of(body.model),
        is_pooling=True,
    )
    generation.belong_to(caller_of(request))
    found: dict[int, list[float]] = {}
    async for deltas in generation.run():
        found |= {index: delta.embedding for index, delta in deltas if delta.embedding is not None}
    return [found[i] for i in range(len(prompts))], generation.usage.prompt_tokens


def _encoded(vector: list[float], body: EmbeddingRequest) -> list[float] | str:
    """base64: float32 numbers, little-endian; OpenAI's client asks for that."""
    if body.encoding_format == "float":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def _answer(
    data: list[dict[str, Any]], num_tokens: int, body: PoolingRequest, state: ServerState
) -> dict[str, Any]:
    return {
        "object": "list",
        "data": data,
        "model": body.model or state.model_name,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
