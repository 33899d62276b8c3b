"""The HTTP application: routes and validation errors."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from diptych.shared.server.admin import add_admin_routes
from diptych.shared.server.api import chat, completions
from diptych.shared.server.api.answers import check_model, respond
from diptych.shared.server.api.anthropic import add_anthropic_routes
from diptych.shared.server.api.embeddings import add_embedding_routes
from diptych.shared.server.api.native import add_native_routes
from diptych.shared.server.api.protocol import ChatRequest, CompletionRequest
from diptych.shared.server.api.responses import add_responses_routes
from diptych.shared.server.api.scores import add_score_routes
from diptych.shared.server.api.state import ServerState
from diptych.shared.server.api.token_routes import add_token_routes
from diptych.shared.server.engine.engine_client import EngineDead
from diptych.shared.server.health import add_health_routes
from diptych.shared.server.http.bodies import BodyRoute
from diptych.shared.server.http.errors import ApiError, invalid_body
from diptych.shared.server.http.server_layers import add_layers
from diptych.shared.server.status import add_status_routes
from diptych.shared.server.weight_routes import add_weight_routes


def create_app(state: ServerState) -> FastAPI:
    """The application of a ready engine."""
    app = FastAPI(title="Diptych", docs_url=None, redoc_url=None)
    app.router.route_class = BodyRoute
    app.state.server = state
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(EngineDead, _on_dead_engine)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(ValidationError, _on_unfit_values)
    app.add_exception_handler(HTTPException, _on_http_error)
    _add_openai_routes(app, state)
    add_responses_routes(app, state)
    add_anthropic_routes(app, state)
    add_embedding_routes(app, state)
    add_score_routes(app, state)
    add_status_routes(app, state)
    add_health_routes(app, state)
    add_native_routes(app, state)
    add_token_routes(app, state)
    add_admin_routes(app, state)
    add_weight_routes(app, state)
    max_image_bytes = state.settings.max_image_bytes if state.ready.vision is not None else 0
    add_layers(app, state.settings, state.settings.max_body_bytes + max_image_bytes)
    return app


def _add_openai_routes(app: FastAPI, state: ServerState) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        check_model(body.model, state)
        generation = await chat.start_chat(body, state)
        chunks = chat.chat_chunks(body, generation, state)
        return await respond(request, body.stream, chunks, generation, chat.fold_chat)

    @app.post("/v1/completions")
    async def text_completions(body: CompletionRequest, request: Request) -> Response:
        check_model(body.model, state)
        generation = await completions.start_completion(body, state)
        chunks = completions.completion_chunks(body, generation, state)
        return await respond(request, body.stream, chunks, generation, completions.fold_completion)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {
            "object": "list",
            "data": [_model_card(state, name) for name in [state.model_name, *sorted(state.adapters)]],
        }

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        check_model(name, state)
        return _model_card(state, name)


def _model_card(state: ServerState, name: str) -> dict[str, Any]:
    """`parent`: an adapter's model."""
    return {
        "id": name,
        "object": "model",
        "created": state.start_time,
        "owned_by": "diptych",
        "max_model_len": state.ready.context_len,
        "root": name,
        "default_sampling_params": dict(state.sampling_defaults),
        "parent": state.model_name if name in state.adapters else None,
    }


# ---- errors ----


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status, headers=error.headers)


async def _on_dead_engine(request: Request, error: Exception) -> Response:
    return await _on_api_error(request, ApiError(503, f"the engine is not running: {error}"))


async def _on_validation_error(request: Request, error: Exception) -> Response:
    """FastAPI's 422 as a 400."""
    assert isinstance(error, RequestValidationError)
    return await _on_api_error(request, invalid_body(error.errors(), error.body))


async def _on_unfit_values(request: Request, error: Exception) -> Response:
    """A valid body whose translation into another API's is none: it has too many messages, for one."""
    assert isinstance(error, ValidationError)
    found = error.errors(include_url=False, include_input=False)
    return await _on_api_error(
        request, invalid_body([{**each, "loc": ("", *each["loc"])} for each in found], {})
    )


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    answer = ApiError(error.status_code, str(error.detail))
    return JSONResponse(answer.body(), answer.status, headers=error.headers)
