"""Administration of the engine: cache, aborts, pauses, LoRA adapters and its state."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response

from diptych import __version__
from diptych.shared.server.api.native_protocol import (
    AbortRequest,
    LoadLoraRequest,
    PauseRequest,
    ProfileRequest,
    UnloadLoraRequest,
)
from diptych.shared.server.api.state import ServerState
from diptych.shared.server.http.access import caller_of, require_admin
from diptych.shared.server.http.connections import until_disconnect
from diptych.shared.server.http.errors import ApiError, bad_request

MAX_FLUSH_SECONDS = 600.0


def add_admin_routes(app: FastAPI, state: ServerState) -> None:
    """Operations on the engine. With keys they need one of the administration; without, they answer this
    computer."""
    admin = [Depends(require_admin)]

    @app.post("/flush_cache", dependencies=admin)
    async def flush_cache(
        request: Request,
        timeout: Annotated[float, Query(ge=0, le=MAX_FLUSH_SECONDS, allow_inf_nan=False)] = 0.0,
    ) -> Response:
        """Empty the prefix cache; wait at most `timeout` seconds until the engine is idle."""
        if not await until_disconnect(request, _flush(state, timeout)):
            raise ApiError(409, "the cache cannot be flushed while requests are alive")
        return JSONResponse({"success": True})

    @app.post("/abort_request")
    async def abort_request(body: AbortRequest, request: Request) -> dict[str, Any]:
        """End the requests with this id, which may have ended meanwhile, or all requests. A client with a key
        ends its own."""
        caller = caller_of(request)
        if body.abort_all or not caller.owner:
            require_admin(request)
        reason = "the request was ended by /abort_request"
        if body.abort_all:
            state.client.set_end_reason(reason)
            return await state.client.control("abort_all")
        if not body.rid:
            raise bad_request('the body must be {"rid": ID} or {"abort_all": true}', "rid")
        owner = None if caller.is_admin else caller.owner
        return {"num_aborted": state.client.abort(state.client.rids_of(body.rid, owner), reason)}

    @app.get("/server_info", dependencies=admin)
    @app.get("/get_server_info", dependencies=admin)
    async def server_info() -> dict[str, Any]:
        load = await state.client.control("load")
        verifications = load["num_verifications"]
        accept = load["num_accepted_tokens"] / max(verifications, 1) + (verifications > 0)
        return {
            "version": __version__,
            "model": state.model_name,
            "context_len": state.ready.context_len,
            "max_total_num_tokens": state.ready.max_total_tokens,
            "components": state.ready.description,
            "num_live_requests": state.client.num_live,
            "load": load,
            "internal_states": [{"avg_spec_accept_length": accept}],
        }

    _add_pause_routes(app, state, admin)
    _add_profile_routes(app, state, admin)
    _add_lora_routes(app, state, admin)


def _add_pause_routes(app: FastAPI, state: ServerState, admin: list[Any]) -> None:
    @app.post("/pause_generation", dependencies=admin)
    async def pause_generation(body: PauseRequest | None = None) -> dict[str, Any]:
        """Run no step until /continue_generation. Without a body: in_place."""
        mode = (body or PauseRequest()).mode
        if mode == "abort":
            state.client.set_end_reason("the request was ended by /pause_generation")
        try:
            await state.client.control("pause", mode=mode)
        except ValueError as error:
            raise bad_request(str(error)) from None
        state.client.load.is_paused = True  # before the next heartbeat says so
        return {"paused": True}

    @app.post("/continue_generation", dependencies=admin)
    async def continue_generation() -> dict[str, Any]:
        await state.client.control("continue")
        state.client.load.is_paused = False
        return {"paused": False}


def _add_profile_routes(app: FastAPI, state: ServerState, admin: list[Any]) -> None:
    @app.post("/start_profile", dependencies=admin)
    async def start_profile(body: ProfileRequest | None = None) -> dict[str, Any]:
        """Record the engine's work until /stop_profile, or for so many steps."""
        folder, options = state.settings.profile_dir, body or ProfileRequest()
        if folder is None:
            raise bad_request("profiles are written below --profile-dir, which this server has not")
        file = folder.expanduser().resolve() / f"profile-{time.time_ns()}.json"
        try:
            return await state.client.control(
                "start_profile", file=str(file), num_steps=options.num_steps, nvtx=options.nvtx
            )
        except ValueError as error:
            raise bad_request(str(error)) from None

    @app.post("/stop_profile", dependencies=admin)
    async def stop_profile() -> dict[str, Any]:
        """Write the file, for Perfetto."""
        try:
            return await state.client.control("stop_profile")
        except ValueError as error:
            raise bad_request(str(error)) from None


def _add_lora_routes(app: FastAPI, state: ServerState, admin: list[Any]) -> None:
    @app.post("/load_lora_adapter", dependencies=admin)
    @app.post("/v1/load_lora_adapter", dependencies=admin)
    async def load_lora_adapter(body: LoadLoraRequest) -> dict[str, Any]:
        """From a folder of the server's computer. Requests may name it as their model afterwards."""
        if body.lora_name == state.model_name:
            raise bad_request(f"{body.lora_name!r} is the name of the model", "lora_name")
        folder = folder_below(state.settings.lora_root, body.lora_path, "lora")
        try:
            await state.client.control("load_lora", name=body.lora_name, path=str(folder))
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


async def _flush(state: ServerState, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not (await state.client.control("flush_cache"))["flushed"]:
        if time.monotonic() >= end:
            return False
        await asyncio.sleep(0.05)
    return True


def folder_below(root: Path | None, path: str, what: str) -> Path:
    """A folder below `root`, the flag --WHAT-root: a name from the network must not open any file. Raises
    `ApiError` 400."""
    param = {"lora": "lora_path", "weights": "model_path"}[what]
    if root is None:
        raise bad_request(f"folders are read from below --{what}-root, which this server has not", param)
    root = root.expanduser().resolve()
    try:
        folder = (root / path).resolve()
    except (OSError, ValueError, RuntimeError):  # too long, a NUL character, a loop of links
        folder = Path()
    if not folder.is_relative_to(root):
        raise bad_request(f"{param} must be a folder below --{what}-root", param)
    return folder
