"""/v1/score and /v1/rerank: how alike texts are by their embeddings, and how likely tokens follow a text."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import Field

from diptych.shared.server.api.answers import check_model
from diptych.shared.server.api.body import Body
from diptych.shared.server.api.embeddings import PoolingFields, pooled
from diptych.shared.server.api.encode_prompts import for_each
from diptych.shared.server.api.field_types import TokenIds
from diptych.shared.server.api.generation import Generation
from diptych.shared.server.api.long_answers import in_turn, json_answer, num_values
from diptych.shared.server.api.state import ServerState
from diptych.shared.server.http.access import caller_of
from diptych.shared.server.http.connections import until_disconnect
from diptych.shared.server.http.errors import bad_request, renamed
from diptych.shared.types import SamplingParams

Texts = str | list[str] | list[int] | list[list[int]]
PAIRS = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))
"""Names of the two sides of a comparison, as vLLM has them."""


class ScoreRequest(PoolingFields):
    """/v1/score: two sides under one of vLLM's pairs of names, or SGLang's `query`, `items` and
    `label_token_ids`."""

    place = "score"

    text_1: Texts | None = None
    text_2: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    query: str | list[int] | None = None
    items: Texts | None = None
    label_token_ids: TokenIds | None = None
    apply_softmax: bool = False
    item_first: bool = False


class Document(Body):
    text: str


class RerankRequest(PoolingFields):
    """/v1/rerank"""

    place = "rerank"

    query: str | list[int]
    documents: Annotated[list[str | Document], Field(min_length=1)]
    top_n: Annotated[int, Field(ge=0)] = 0
    return_documents: bool = True


def add_score_routes(app: FastAPI, state: ServerState) -> None:
    @app.post("/v1/score")
    @app.post("/score")
    async def score(body: ScoreRequest, request: Request) -> Response:
        check_model(body.model, state)
        _check_kind(state)
        work = _label_scores if body.query is not None else _similarity_scores
        answer = await until_disconnect(request, work(body, request, state))
        return await json_answer(num_values(answer), lambda: answer)

    @app.post("/v1/rerank")
    @app.post("/rerank")
    @app.post("/v2/rerank")
    async def rerank(body: RerankRequest, request: Request) -> Response:
        check_model(body.model, state)
        _check_kind(state)
        texts = [each if isinstance(each, str) else each.text for each in body.documents]
        query = await state.prompts.of_each(body.query, "query")
        documents = await state.prompts.of_each(texts, "documents")
        scores, num_tokens = await until_disconnect(
            request, _similarities(query, documents, "documents", body, request, state)
        )
        order = sorted(range(len(texts)), key=lambda i: -scores[i])[: body.top_n or len(texts)]
        results = [
            {
                "index": i,
                "relevance_score": scores[i],
                **({"document": {"text": texts[i]}} if body.return_documents else {}),
            }
            for i in order
        ]
        head = {"id": f"rerank-{uuid.uuid4().hex}", **_counts(body, state, num_tokens)}
        return await json_answer(num_values(results), lambda: {**head, "results": results})


def _check_kind(state: ServerState) -> None:
    if state.ready.num_labels:
        raise bad_request("this model scores single texts: POST /classify")


async def _similarity_scores(body: ScoreRequest, request: Request, state: ServerState) -> dict[str, Any]:
    """Cosines, pair by pair, or of one text with each of the other side."""
    given = [pair for pair in PAIRS if all(getattr(body, name) is not None for name in pair)]
    if len(given) != 1:
        names = ", ".join(map(" and ".join, PAIRS))
        raise bad_request(f"give one of these pairs: {names}; or query, items and label_token_ids")
    left, right = [await state.prompts.of_each(getattr(body, name), name) for name in given[0]]
    first, second = given[0]
    if len(left) not in (1, len(right)):
        raise bad_request(f"{first} has {len(left)} texts and {second} {len(right)}: give as many", first)
    scores, num_tokens = await _similarities(left, right, second, body, request, state)
    data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
    head = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "created": int(time.time())}
    return {**head, **_counts(body, state, num_tokens), "data": data}


async def _similarities(
    left: Sequence[list[int]],
    right: Sequence[list[int]],
    field: str,
    body: PoolingFields,
    request: Request,
    state: ServerState,
) -> tuple[list[float], int]:
    """The cosine of each pair, and the number of tokens."""
    vectors, num_tokens = await pooled([*left, *right], field, body, request, state)
    firsts = vectors[: len(left)] * (len(right) if len(left) == 1 else 1)
    return await asyncio.to_thread(_cosines, firsts, vectors[len(left) :]), num_tokens


def _cosines(left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> list[float]:
    """The cosine of each pair; of a vector of zeros 0."""
    found = []
    for pair in zip(left, right):
        first, second = (np.asarray(each, np.float64) for each in pair)
        length = float(np.linalg.norm(first) * np.linalg.norm(second))
        found.append(float(first @ second) / max(length, 1e-24))
    return found


async def _label_scores(body: ScoreRequest, request: Request, state: ServerState) -> dict[str, Any]:
    """For each item, how likely each label is to be the next token behind query and item."""
    if body.items is None or not body.label_token_ids:
        missing = "items" if body.items is None else "label_token_ids"
        raise bad_request(f"query needs {missing}", missing)
    prompts = [body.truncated(each, state.ready.context_len - 1) for each in await _joined(body, state)]
    labels = tuple(body.label_token_ids)
    with renamed({"token_ids_logprob": "label_token_ids"}):
        try:
            params = SamplingParams(
                max_new_tokens=1, temperature=0.0, return_logprob=True, token_ids_logprob=labels
            )
        except ValueError as error:
            raise bad_request(str(error), "label_token_ids") from None
        await for_each(state.prompts.check, prompts, "items", params)
    state.check_admission(len(prompts))
    generation = Generation(
        state.client,
        None,
        state.metrics,
        prompts,
        params,
        seed=0,
        extra_key=body.cache_salt,
        priority=body.priority,
        lora=state.adapter_of(body.model),
    )
    generation.belong_to(caller_of(request))
    found: dict[int, list[float]] = {}
    async for deltas in generation.run():
        for index, delta in deltas:
            for each in delta.logprobs[:1]:
                found[index] = [logprob for _, logprob in each.asked]
    logprobs = [found[i] for i in range(len(prompts))]
    scores = await in_turn(len(prompts) * len(labels), _label_weights, logprobs, body.apply_softmax)
    return {"object": "scoring", "scores": scores, **_counts(body, state, generation.usage.prompt_tokens)}


def _label_weights(logprobs: list[list[float]], are_shares: bool) -> list[list[float]]:
    """Probabilities of labels. As shares of each other they are scaled by the likeliest, since all may be too
    small for a float."""
    tops = [max(each) if are_shares else 0.0 for each in logprobs]
    weights = [[math.exp(value - top) for value in each] for each, top in zip(logprobs, tops, strict=True)]
    sums = [sum(each) if are_shares else 1.0 for each in weights]
    return [[weight / total for weight in each] for each, total in zip(weights, sums, strict=True)]


async def _joined(body: ScoreRequest, state: ServerState) -> list[list[int]]:
    """The prompts: query and item as one text, or their token ids one behind the other."""
    query, items = body.query, body.items
    is_one = not isinstance(items, list) or (bool(items) and isinstance(items[0], int))
    several: list[Any] = [items] if is_one else list(items or ())
    if any(type(each) is not type(query) for each in several):
        raise bad_request("query and items must both be texts, or both token ids", "items")
    pairs: list[Any] = [(item, query) if body.item_first else (query, item) for item in several]
    return await state.prompts.of_each([first + second for first, second in pairs], "items")


def _counts(body: PoolingFields, state: ServerState, num_tokens: int) -> dict[str, Any]:
    return {
        "model": body.model or state.model_name,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
