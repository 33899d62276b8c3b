"""The status page at `/`, and the snapshot of the engine that it draws."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.responses import HTMLResponse, Response

from diptych.shared.server.api.state import ServerState
from diptych.shared.server.http.access import require_overview

PAGE = Path(__file__).parent / "assets" / "status.html"

TREE_SECONDS = 2.0
"""The prefix tree is read from the engine at most this often, however many pages are open."""

_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Cache-Control": "no-cache",
}


def add_status_routes(app: FastAPI, state: ServerState) -> None:
    """The page and its snapshot."""
    html = PAGE.read_text(encoding="utf-8")
    tree: dict[str, Any] = {"nodes": [], "is_cut": False}
    read_time = float("-inf")

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse(html, headers=_PAGE_HEADERS)

    @app.get("/status", dependencies=[Depends(require_overview)])
    async def status() -> dict[str, Any]:
        """The engine's load and the shape of its prefix tree: lengths of nodes, no text of any prompt."""
        nonlocal tree, read_time
        if time.monotonic() - read_time > TREE_SECONDS:
            read_time = time.monotonic()
            tree = await state.client.control("cache_tree")
        load = state.client.load
        return {
            "model": state.model_name,
            "time": time.time(),
            "context_len": state.ready.context_len,
            "max_total_tokens": state.ready.max_total_tokens,
            "max_running_requests": state.ready.max_running_requests,
            "components": state.ready.description,
            "is_draining": state.is_draining,
            "health_problem": state.health_problem,
            "load": {name: getattr(load, name) for name in load.__struct_fields__},
            "tree": tree,
        }
